/* The hot part of the router's prefix index: tables of workers, events into them, prompts looked up in all of them.

   Whoever calls holds Python's lock, keeps what is pointed to, and hands in counts and tiers that are checked. */

#include "objects.h"
#include "prompt.h"
#include "table.h"

/* -- tables that are looked up together */

typedef struct {
    uint64_t spot;
    uint32_t low, high;
    /* It holds the first `low` blocks, and not the first `high`. */
    uint32_t place;
} Search;

typedef struct {
    int count, tiers;
    const Table **tables;
    Search *searches;
} Group;

EXPORT void group_free(Group *g) {
    if (g) free(g->tables), free(g->searches);
    free(g);
}

/* Of as many tables; what is in the first `tiers` of them counts. NULL: no memory. */
EXPORT Group *group_new(int count, int tiers, const Table **tables) {
    Group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->count = count, g->tiers = tiers;
    g->tables = malloc(sizeof(Table *) * (size_t)(count + 1));
    g->searches = malloc(sizeof(Search) * (size_t)(count + 1));
    if (!g->tables || !g->searches) return group_free(g), NULL;
    memcpy(g->tables, tables, sizeof(Table *) * (size_t)count);
    return g;
}

static inline void ask_group(const Group *g, uint32_t place, uint64_t spot) {
    for (int tier = 0; tier < g->tiers; tier++) ask_for(g->tables[place]->sets + tier, spot);
}

static inline int held(const Group *g, uint32_t place, uint64_t name, uint64_t spot) {
    for (int tier = 0; tier < g->tiers; tier++)
        if (find_from(g->tables[place]->sets + tier, name, spot)->age) return 1;
    return 0;
}

/* Keeps of the first `count` searches, in front, those whose table holds that name. How many they are. */
static int keep(Group *g, int count, uint64_t name) {
    uint64_t spot = spread(name);
    int kept = 0;
    for (int i = 0; i < count; i++) ask_group(g, g->searches[i].place, spot);
    for (int i = 0; i < count; i++) {
        if (!held(g, g->searches[i].place, name, spot)) continue;
        Search other = g->searches[kept];
        g->searches[kept++] = g->searches[i];
        g->searches[i] = other;
    }
    return kept;
}

/* A table that holds a block holds those before it, so depths are taken times four until a block is missing and then
   halved: for all tables at once, so that memory is waited for together. Names far behind the deepest are not worked out.
   How many hold the first block; the first so many searches tell of them. -1: as of `name_blocks`. */
static int search(Group *g, Prompt *p, Object *tokens) {
    Search *searches = g->searches;
    uint64_t level = 1;
    if (!p->count) return 0;
    for (int i = 0; i < g->count; i++) searches[i].place = (uint32_t)i, searches[i].low = 1;
    if (name_blocks(p, tokens, 1) < 0) return -1;
    int begun = keep(g, g->count, p->names[0]), on = begun;
    while (on && level < p->count) {
        level = 4 * level < p->count ? 4 * level : p->count;
        if (name_blocks(p, tokens, (uint32_t)level) < 0) return -1;
        int went_on = keep(g, on, p->names[level - 1]);
        for (int i = 0; i < went_on; i++) searches[i].low = (uint32_t)level;
        for (int i = went_on; i < on; i++) searches[i].high = (uint32_t)level;
        on = went_on;
    }
    for (int i = 0; i < on; i++) searches[i].high = p->count + 1;
    for (int open = 1; open;) {
        open = 0;
        for (int i = 0; i < begun; i++) {
            Search *s = searches + i;
            if (s->high - s->low == 1) continue;
            s->spot = spread(p->names[(s->low + s->high) / 2 - 1]);
            ask_group(g, s->place, s->spot);
        }
        for (int i = 0; i < begun; i++) {
            Search *s = searches + i;
            if (s->high - s->low == 1) continue;
            uint32_t middle = (s->low + s->high) / 2;
            if (held(g, s->place, p->names[middle - 1], s->spot)) s->low = middle;
            else s->high = middle;
            open |= s->high - s->low > 1;
        }
    }
    return begun;
}

/* Puts into a dict the leading blocks of the prompt that each table holds, by its item of the tuple `ids`; tables with
   none are left out. -1, and Python's error is set: as of `name_blocks`. */
EXPORT int group_match(Group *g, Prompt *p, Object *tokens, Object *ids, Object *depths) {
    int found = search(g, p, tokens);
    for (int i = 0; i < found; i++) {
        Object *id = PyTuple_GetItem(ids, g->searches[i].place);
        Object *depth = id ? PyLong_FromLong(g->searches[i].low) : NULL;
        int failed = !depth || PyDict_SetItem(depths, id, depth) < 0;
        if (depth) Py_DecRef(depth);
        if (failed) return -1;
    }
    return found < 0 ? -1 : 0;
}

/* The same of names that are known, a tuple. */
EXPORT int group_match_names(Group *g, Object *names, Object *ids, Object *depths) {
    ssize_t count = PyTuple_Size(names);
    if (count < 0) return -1;
    Prompt *p = malloc(sizeof *p + 8 * (size_t)count);
    if (!p) return PyErr_NoMemory(), -1;
    p->count = p->known = (uint32_t)count, p->broken = 0;
    int failed = read_names(names, 0, count, p->names) < 0 || group_match(g, p, NULL, ids, depths) < 0;
    free(p);
    return failed ? -1 : 0;
}

/* -- events, as they come over the wire (`KvEvents` of proto/pdfleet/v1/worker.proto) */

typedef struct {
    const uint8_t *at, *end;
} Bytes;

/* 0: it is not there. */
static int number(Bytes *from, uint64_t *out) {
    *out = 0;
    for (int bits = 0; bits < 63 && from->at < from->end; bits += 7) {
        uint8_t byte = *from->at++;
        *out |= (uint64_t)(byte & 127) << bits;
        if (byte < 128) return 1;
    }
    return 0;
}

/* A field of that tag and a length. 0: it is not there, and nothing was read; -1: it is longer than there are bytes. */
static int field(Bytes *from, uint8_t tag, Bytes *out) {
    uint64_t length;
    if (from->at == from->end || *from->at != tag) return 0;
    from->at++;
    if (!number(from, &length) || length > (uint64_t)(from->end - from->at)) return -1;
    *out = (Bytes){from->at, from->at + length};
    from->at += length;
    return 1;
}

static int tier_of(Bytes name) {
    static const char *const words[TIERS] = {"device", "host", "disk"};
    for (int tier = 0; tier < TIERS; tier++)
        if ((size_t)(name.end - name.at) == strlen(words[tier]) && !memcmp(name.at, words[tier], name.end - name.at))
            return tier;
    return -1;
}

/* Reads one event and, if asked to, takes it in. 0: it is none that is known here; -1: no memory. */
static int take_event(Table *t, Bytes event, int apply, int64_t *grown) {
    Bytes said, names = {0}, tier;
    int stored = field(&event, 0x0a, &said);
    if (stored < 0 || (!stored && field(&event, 0x12, &said) <= 0) || event.at != event.end) return 0;
    if (field(&said, 0x0a, &names) < 0 || field(&said, 0x12, &tier) <= 0 || said.at != said.end) return 0;
    size_t length = (size_t)(names.end - names.at);
    int place = tier_of(tier);
    if (place < 0 || length % 8) return 0;
    if (!apply || !length) return 1;
    int64_t found = stored ? store(t->sets + place, names.at, length / 8) : drop(t->sets + place, names.at, length / 8);
    if (found < 0) return -1;
    *grown += stored ? found : -found;
    return 1;
}

#define REFUSED INT64_MIN

/* Takes in a message from its number on, if it is written as usual, has that number and says only what was stored and
   dropped. By how many blocks there are more; REFUSED, and nothing has changed: it is another one, or, with Python's
   error, there is no memory, and some is taken in. */
EXPORT int64_t table_follow(Table *t, const uint8_t *data, int64_t start, int64_t length, uint64_t expected) {
    int64_t grown = 0;
    for (int apply = 0; apply < 2; apply++) {
        Bytes from = {data + start, data + length}, event;
        uint64_t sequence;
        int more;
        if (start >= length || *from.at++ != 0x18 || !number(&from, &sequence) || sequence != expected) return REFUSED;
        while ((more = field(&from, 0x22, &event)) > 0) {
            int taken = take_event(t, event, apply, &grown);
            if (taken < 0) PyErr_NoMemory();
            if (taken <= 0) return REFUSED;
        }
        if (more < 0 || from.at != from.end) return REFUSED;
    }
    return grown;
}
