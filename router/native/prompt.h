/* Names of a prompt's blocks (fleet/block_hash.py), worked out as far as they are looked at.

   BLAKE2b (RFC 7693), keyed, of all tokens up to each block's end: one chain over the prompt, and from it for each
   block one last step, which depends on no other block's, so that four are taken side by side. */

#pragma once

#include "objects.h"

#define BLOCK_BYTES 128
#define LANES 4

typedef uint64_t Lanes __attribute__((vector_size(8 * LANES)));

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

#define TURN(x, n) ((x) >> (n) | (x) << (64 - (n)))
/* The mixing step; on vectors, of as many columns. */
#define MIX(a, b, c, d, x, y)                                                                                        \
    a += b + (x), d = TURN(d ^ a, 32), c += d, b = TURN(b ^ c, 24), a += b + (y), d = TURN(d ^ a, 16), c += d,        \
                                                                                  b = TURN(b ^ c, 63)
#define ROUNDS(one, v, m)                                                                                            \
    one(v, m, 0); one(v, m, 1); one(v, m, 2); one(v, m, 3); one(v, m, 4); one(v, m, 5);                              \
    one(v, m, 6); one(v, m, 7); one(v, m, 8); one(v, m, 9); one(v, m, 0); one(v, m, 1)

#ifdef __clang__
#define PERMUTED(x, i, j, k, l) __builtin_shufflevector(x, x, i, j, k, l)
#else
#define PERMUTED(x, i, j, k, l) __builtin_shuffle(x, (Lanes){i, j, k, l})
#endif
#define FOUR(m, r, i) (Lanes){m[SIGMA[r][i]], m[SIGMA[r][i + 2]], m[SIGMA[r][i + 4]], m[SIGMA[r][i + 6]]}

/* Of one digest: the four columns side by side, then the four diagonals, turned to columns and back. */
#define ROUND(v, m, r)                                                                                               \
    MIX(v[0], v[1], v[2], v[3], FOUR(m, r, 0), FOUR(m, r, 1));                                                       \
    v[1] = PERMUTED(v[1], 1, 2, 3, 0), v[2] = PERMUTED(v[2], 2, 3, 0, 1), v[3] = PERMUTED(v[3], 3, 0, 1, 2);          \
    MIX(v[0], v[1], v[2], v[3], FOUR(m, r, 8), FOUR(m, r, 9));                                                       \
    v[1] = PERMUTED(v[1], 3, 0, 1, 2), v[2] = PERMUTED(v[2], 2, 3, 0, 1), v[3] = PERMUTED(v[3], 1, 2, 3, 0)

/* `bytes`: how many went in, those of this block with them. */
static void compress(uint64_t h[8], const uint8_t block[BLOCK_BYTES], uint64_t bytes) {
    uint64_t m[16];
    Lanes v[4], before[2];
    memcpy(m, block, BLOCK_BYTES);
    memcpy(before, h, sizeof before);
    v[0] = before[0], v[1] = before[1];
    memcpy(v + 2, IV, sizeof IV);
    v[3] ^= (Lanes){bytes, 0, 0, 0};
    ROUNDS(ROUND, v, m);
    before[0] ^= v[0] ^ v[2], before[1] ^= v[1] ^ v[3];
    memcpy(h, before, sizeof before);
}

/* Of as many digests as lanes. */
#define LANES_ROUND(v, m, r)                                                                                         \
    MIX(v[0], v[4], v[8], v[12], m[SIGMA[r][0]], m[SIGMA[r][1]]);                                                    \
    MIX(v[1], v[5], v[9], v[13], m[SIGMA[r][2]], m[SIGMA[r][3]]);                                                    \
    MIX(v[2], v[6], v[10], v[14], m[SIGMA[r][4]], m[SIGMA[r][5]]);                                                   \
    MIX(v[3], v[7], v[11], v[15], m[SIGMA[r][6]], m[SIGMA[r][7]]);                                                   \
    MIX(v[0], v[5], v[10], v[15], m[SIGMA[r][8]], m[SIGMA[r][9]]);                                                   \
    MIX(v[1], v[6], v[11], v[12], m[SIGMA[r][10]], m[SIGMA[r][11]]);                                                 \
    MIX(v[2], v[7], v[8], v[13], m[SIGMA[r][12]], m[SIGMA[r][13]]);                                                  \
    MIX(v[3], v[4], v[9], v[14], m[SIGMA[r][14]], m[SIGMA[r][15]])

/* Last steps that wait until there are as many as lanes. */
typedef struct {
    Lanes h[8], m[16], bytes;
    uint64_t *names[LANES];
    int waiting;
} Last;

static void end_lanes(Last *last) {
    Lanes v[16];
    for (int i = 0; i < 8; i++) v[i] = last->h[i], v[8 + i] = IV[i] - (Lanes){0};
    v[12] ^= last->bytes;
    v[14] = ~v[14];
    ROUNDS(LANES_ROUND, v, last->m);
    v[0] ^= last->h[0] ^ v[8];
    for (int lane = 0; lane < last->waiting; lane++) *last->names[lane] = v[0][lane];
    last->waiting = 0;
}

static void end_one(Last *last, const uint64_t h[8], const uint8_t block[BLOCK_BYTES], uint64_t bytes, uint64_t *name) {
    int lane = last->waiting;
    uint64_t m[16];
    memcpy(m, block, BLOCK_BYTES);
    for (int i = 0; i < 8; i++) last->h[i][lane] = h[i];
    for (int i = 0; i < 16; i++) last->m[i][lane] = m[i];
    last->bytes[lane] = bytes;
    last->names[lane] = name;
    if (++last->waiting == LANES) end_lanes(last);
}

typedef struct {
    uint64_t h[8];
    uint64_t bytes;
    /* Of the key and the tokens, taken in before those in `tail`. */
    uint8_t tail[BLOCK_BYTES];
    /* What follows them: the last block of a digest is told as such, so one that is full waits. Zeros behind. */
    uint32_t filled;
    /* Bytes of it. */
    uint32_t size;
    /* Tokens in a block. */
    uint32_t count, known;
    uint32_t broken;
    uint64_t names[];
} Prompt;

static void feed(Prompt *p, const uint8_t *data, size_t length) {
    while (length) {
        if (p->filled == BLOCK_BYTES) {
            p->bytes += BLOCK_BYTES;
            compress(p->h, p->tail, p->bytes);
            memset(p->tail, 0, BLOCK_BYTES);
            p->filled = 0;
        }
        size_t some = BLOCK_BYTES - p->filled;
        if (some > length) some = length;
        memcpy(p->tail + p->filled, data, some);
        p->filled += some, data += some, length -= some;
    }
}

#define AT_ONCE 1024
/* Tokens that are read together. */

/* Works out the names of so many blocks of `tokens`, a tuple, the same each time. -1, and Python's error is set: they
   are too few, or no tokens; the prompt is of no use then. */
static int name_blocks(Prompt *p, Object *tokens, uint32_t upto) {
    uint32_t read[AT_ONCE];
    Last last;
    last.waiting = 0;
    if (upto > p->count) upto = p->count;
    if (p->broken) return PyErr_SetString(PyExc_OverflowError, "a token was no number of 32 bits"), -1;
    while (p->known < upto) {
        uint64_t from = (uint64_t)p->known * p->size, left = (uint64_t)(upto - p->known) * p->size, into = 0;
        while (left) {
            uint32_t some = left < AT_ONCE ? (uint32_t)left : AT_ONCE;
            if (read_tokens(tokens, (ssize_t)from, some, read) < 0) return p->broken = 1, -1;
            for (uint32_t at = 0; at < some;) {
                uint64_t step = p->size - into;
                if (step > some - at) step = some - at;
                feed(p, (uint8_t *)(read + at), 4 * step);
                at += step, into += step;
                if (into == p->size) {
                    end_one(&last, p->h, p->tail, p->bytes + p->filled, p->names + p->known++);
                    into = 0;
                }
            }
            from += some, left -= some;
        }
    }
    if (last.waiting) end_lanes(&last);
    return 0;
}

/* `root`: the key, 32 bytes. NULL: no memory. */
EXPORT Prompt *prompt_new(uint32_t count, uint32_t size, const uint8_t *root) {
    Prompt *p = calloc(1, sizeof *p + 8 * (size_t)count);
    if (!p) return NULL;
    memcpy(p->h, IV, sizeof IV);
    p->h[0] ^= 0x01010000 ^ 32 << 8 ^ 32;  /* no tree, a key of 32 bytes, a digest of 32 bytes */
    memcpy(p->tail, root, 32);
    p->filled = BLOCK_BYTES;
    p->count = count, p->size = size;
    return p;
}

EXPORT void prompt_free(Prompt *p) { free(p); }

/* Where the names are, of which the first `upto` are worked out. NULL, and Python's error is set: see above. */
EXPORT uint64_t *prompt_names(Prompt *p, Object *tokens, uint32_t upto) {
    return name_blocks(p, tokens, upto) < 0 ? NULL : p->names;
}
