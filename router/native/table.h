/* What one worker holds, of each tier a set of names that keeps the order in which they came (fleet/kv_log.py). */

#pragma once

#include "objects.h"

#define TIERS 3
#define LEAST 8
/* Places of the smallest set. */
#define MOST (1u << 31)
#define AHEAD 8
/* Names whose places are asked of memory before they are needed. */

static uint64_t seed;
/* Drawn for each process: names are meant to be even, but a worker could make them so that they all meet. */

typedef struct {
    uint64_t name;
    uint32_t age;
    /* Place in the order, from 1; 0: there is none here. */
} Entry;

static Entry none;

typedef struct {
    Entry *entries;
    /* A power of two of them, at most 5 of 8 used, each behind where its hash says without a gap. */
    uint64_t *order;
    /* Names as they came. One that is gone, or has come again since, is passed over: its entry has another age. */
    uint32_t mask, count;
    uint32_t first, end, room;
    /* Of the order: what is before `first` or from `end` on is over. */
    uint64_t sum;
    /* All names, by exclusive or. */
} Set;

typedef struct {
    Set sets[TIERS];
} Table;

static inline uint64_t spread(uint64_t name) {
    uint64_t x = name ^ seed;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93;
    return x ^ x >> 32;
}

/* Its entry, or the empty one where it would be. */
static inline Entry *find_from(const Set *s, uint64_t name, uint64_t spot) {
    for (uint32_t at = (uint32_t)spot & s->mask;; at = (at + 1) & s->mask) {
        Entry *entry = s->entries + at;
        if (!entry->age || entry->name == name) return entry;
    }
}

static inline Entry *find(const Set *s, uint64_t name) { return find_from(s, name, spread(name)); }

static inline void ask_for(const Set *s, uint64_t spot) { __builtin_prefetch(s->entries + ((uint32_t)spot & s->mask)); }

static void empty(Set *s) {
    if (s->entries != &none) free(s->entries);
    free(s->order);
    *s = (Set){.entries = &none};
}

/* Entries for so many names. -1: no memory; nothing has changed then, here and below. */
static int widen(Set *s, uint64_t count) {
    uint64_t places = s->entries == &none ? LEAST : (uint64_t)s->mask + 1;
    while (8 * count > 5 * places && places <= MOST) places *= 2;
    if (s->entries != &none && places == (uint64_t)s->mask + 1) return 0;
    Entry *wider = places > MOST ? NULL : calloc(places, sizeof(Entry));
    if (!wider) return -1;
    Set next = {.entries = wider, .mask = (uint32_t)(places - 1)};
    for (uint64_t at = 0; at <= s->mask; at++)
        if (s->entries[at].age) *find(&next, s->entries[at].name) = s->entries[at];
    if (s->entries != &none) free(s->entries);
    s->entries = wider, s->mask = next.mask;
    return 0;
}

/* Room for one more in the order: by closing its gaps where half of it is, else by twice the room. */
static int make_room(Set *s) {
    if (s->end < s->room) return 0;
    if (s->count > s->room / 2 || !s->room) {
        uint64_t room = s->room ? 2 * (uint64_t)s->room : LEAST;
        uint64_t *order = room > MOST ? NULL : realloc(s->order, 8 * room);
        if (!order) return -1;
        s->order = order, s->room = (uint32_t)room;
        return 0;
    }
    uint32_t end = 0;
    for (uint32_t at = s->first; at < s->end; at++) {
        if (at + AHEAD < s->end) ask_for(s, spread(s->order[at + AHEAD]));
        Entry *entry = find(s, s->order[at]);
        if (entry->age == at + 1) {
            s->order[end++] = entry->name;
            entry->age = end;
        }
    }
    s->first = 0, s->end = end;
    return 0;
}

/* 1: it is new; 0: it was there; -1: no memory. */
static int put(Set *s, uint64_t name) {
    Entry *entry = find(s, name);
    if (entry->age) return 0;
    if (make_room(s) < 0) return -1;
    if (8 * ((uint64_t)s->count + 1) > 5 * ((uint64_t)s->mask + 1)) {
        if (widen(s, (uint64_t)s->count + 1) < 0) return -1;
        entry = find(s, name);
    }
    s->order[s->end++] = name;
    *entry = (Entry){name, s->end};
    s->count++;
    s->sum ^= name;
    return 1;
}

static void take_out(Set *s, Entry *entry) {
    uint32_t hole = (uint32_t)(entry - s->entries), next = hole;
    s->sum ^= entry->name;
    for (;;) {
        next = (next + 1) & s->mask;
        if (!s->entries[next].age) break;
        uint32_t home = (uint32_t)spread(s->entries[next].name) & s->mask;
        if (((next - home) & s->mask) >= ((next - hole) & s->mask)) {
            s->entries[hole] = s->entries[next];
            hole = next;
        }
    }
    s->entries[hole].age = 0;
    if (!--s->count) s->first = s->end = 0;
}

/* Names that may lie anywhere, 8 bytes each. How many were new; -1: no memory. */
static int64_t store(Set *s, const uint8_t *names, size_t count) {
    int64_t found = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t name, later;
        if (i + AHEAD < count) {
            memcpy(&later, names + 8 * (i + AHEAD), 8);
            ask_for(s, spread(later));
        }
        memcpy(&name, names + 8 * i, 8);
        int new = put(s, name);
        if (new < 0) return -1;
        found += new;
    }
    return found;
}

/* How many were there. */
static int64_t drop(Set *s, const uint8_t *names, size_t count) {
    int64_t found = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t name, later;
        if (i + AHEAD < count) {
            memcpy(&later, names + 8 * (i + AHEAD), 8);
            ask_for(s, spread(later));
        }
        memcpy(&name, names + 8 * i, 8);
        Entry *entry = find(s, name);
        if (entry->age) take_out(s, entry), found++;
    }
    return found;
}

EXPORT void draw(uint64_t drawn) { seed = drawn; }

EXPORT Table *table_new(void) {
    Table *t = malloc(sizeof *t);
    if (!t) return NULL;
    for (int tier = 0; tier < TIERS; tier++) t->sets[tier] = (Set){.entries = &none};
    return t;
}

EXPORT void table_clear(Table *t) {
    for (int tier = 0; tier < TIERS; tier++) empty(t->sets + tier);
}

EXPORT void table_free(Table *t) {
    table_clear(t);
    free(t);
}

/* So many names are about to come: entries for all of them at once. Without memory they come one by one. */
EXPORT void table_expect(Table *t, int tier, uint64_t count) {
    if (count < MOST) widen(t->sets + tier, count);
}

/* Stores or drops a tuple of names. By how many there are more, or less; -1, and Python's error is set: one is no name,
   and nothing has changed, or there is no memory, and some are stored. */
EXPORT int64_t table_change(Table *t, int tier, int stored, Object *names) {
    ssize_t count = PyTuple_Size(names);
    if (count < 0) return -1;
    uint64_t few[64], *read = few;
    if (count > 64 && !(read = malloc(8 * (size_t)count))) return PyErr_NoMemory(), -1;
    int64_t found = -1;
    if (read_names(names, 0, count, read) == 0) {
        Set *s = t->sets + tier;
        found = stored ? store(s, (uint8_t *)read, count) : drop(s, (uint8_t *)read, count);
        if (found < 0) PyErr_NoMemory();
    }
    if (read != few) free(read);
    return found;
}

/* How many of the oldest, of so many at most, there were. */
EXPORT int64_t table_drop_oldest(Table *t, int tier, int64_t count) {
    Set *s = t->sets + tier;
    int64_t found = 0;
    while (found < count && s->first < s->end) {
        Entry *entry = find(s, s->order[s->first]);
        if (entry->age == ++s->first) take_out(s, entry), found++;
    }
    return found;
}

EXPORT int64_t table_count(const Table *t, int tier) { return t->sets[tier].count; }

EXPORT int64_t table_blocks(const Table *t) {
    int64_t found = 0;
    for (int tier = 0; tier < TIERS; tier++) found += t->sets[tier].count;
    return found;
}

/* As `KvTable.xor`. */
EXPORT uint64_t table_xor(const Table *t) {
    uint64_t sum = t->sets[0].sum;
    for (int tier = 1; tier < TIERS; tier++) {
        int turn = 21 * tier;
        sum ^= t->sets[tier].sum << turn | t->sets[tier].sum >> (64 - turn);
    }
    return sum;
}

EXPORT int table_has(const Table *t, uint64_t name) {
    for (int tier = 0; tier < TIERS; tier++)
        if (find(t->sets + tier, name)->age) return 1;
    return 0;
}

/* All names of a tier, the oldest first, into room for so many. How many there are. */
EXPORT int64_t table_names(const Table *t, int tier, uint64_t *out, int64_t room) {
    const Set *s = t->sets + tier;
    int64_t found = 0;
    for (uint32_t at = s->first; at < s->end; at++) {
        if (find(s, s->order[at])->age != at + 1) continue;
        if (found < room) out[found] = s->order[at];
        found++;
    }
    return found;
}

/* 0: an invariant is broken. */
EXPORT int table_valid(const Table *t) {
    for (int tier = 0; tier < TIERS; tier++) {
        const Set *s = t->sets + tier;
        uint64_t sum = 0, count = 0;
        for (uint64_t at = 0; at <= s->mask; at++) {
            const Entry *entry = s->entries + at;
            if (!entry->age) continue;
            if (find(s, entry->name) != entry) return 0;
            if (entry->age <= s->first || entry->age > s->end || s->order[entry->age - 1] != entry->name) return 0;
            sum ^= entry->name, count++;
        }
        if (sum != s->sum || count != s->count || s->end > s->room) return 0;
    }
    return 1;
}
