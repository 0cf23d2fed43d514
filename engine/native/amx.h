/* Advanced Matrix Extensions: products of bf16 tiles with float32 sums. A tile is 16 rows of 64 bytes. */
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    uint8_t palette, start;
    uint8_t reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) Tiles;

/* Linux gives a process the tiles' 8 KiB of state only when asked (arch_prctl, ARCH_REQ_XCOMP_PERM), and not
   where a filter of system calls or a small signal stack forbids it: then a tile instruction ends the process. */
static int32_t amx_allowed;
static int32_t allow_amx(void) { return amx_allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

INLINE void set_tile(Tiles *tiles, int index, int rows, int bytes) {
    tiles->rows[index] = (uint8_t)rows;
    tiles->bytes[index] = (uint16_t)bytes;
}

/* Decode scores: tiles 0 sums [16 tokens, lanes], 1 keys [16 tokens, 32 of dim], 2.. queries by pairs of dim.
   Keys are the left side, as they lie in the pool; the queries, a few, are what is laid out anew. */
INLINE int begin_tiles_f32(const float *queries, int64_t count, int64_t lanes, int64_t dim, int64_t size) {
    (void)queries, (void)count, (void)lanes, (void)dim, (void)size;
    return 0;
}
INLINE void tile_dots_f32(const float *keys, int64_t tokens, int64_t dim, int64_t lanes, float *to) {
    (void)keys, (void)tokens, (void)dim, (void)lanes, (void)to;
}

INLINE int begin_tiles_bf16(const bf16 *queries, int64_t count, int64_t lanes, int64_t dim, int64_t size) {
    if (!amx_allowed || dim % 32 || dim > 128 || size % 16) return 0;
    uint32_t pairs[4 * 16 * 16];
    for (int64_t k = 0; k < dim / 2; k++)
        for (int64_t q = 0; q < lanes; q++) {
            uint32_t pair = 0;
            if (q < count) memcpy(&pair, queries + q * dim + 2 * k, 4);
            pairs[k * lanes + q] = pair;
        }
    Tiles tiles = {.palette = 1};
    set_tile(&tiles, 0, 16, 4 * lanes);
    set_tile(&tiles, 1, 16, 64);
    for (int i = 0; i < dim / 32; i++) set_tile(&tiles, 2 + i, 16, 4 * lanes);
    _tile_loadconfig(&tiles);
    int64_t step = 16 * lanes;
    _tile_loadd(2, pairs, 4 * lanes);
    if (dim > 32) _tile_loadd(3, pairs + step, 4 * lanes);
    if (dim > 64) _tile_loadd(4, pairs + 2 * step, 4 * lanes);
    if (dim > 96) _tile_loadd(5, pairs + 3 * step, 4 * lanes);
    return 1;
}

/* Reads to the end of each 16 tokens, which is in the same page, and writes as many scores: `to` has room. */
INLINE void tile_dots_bf16(const bf16 *keys, int64_t tokens, int64_t dim, int64_t lanes, float *to) {
    for (int64_t t = 0; t < tokens; t += 16) {
        const bf16 *at = keys + t * dim;
        _tile_zero(0);
        _tile_loadd(1, at, 2 * dim);
        _tile_dpbf16ps(0, 1, 2);
        if (dim > 32) {
            _tile_loadd(1, at + 32, 2 * dim);
            _tile_dpbf16ps(0, 1, 3);
        }
        if (dim > 64) {
            _tile_loadd(1, at + 64, 2 * dim);
            _tile_dpbf16ps(0, 1, 4);
        }
        if (dim > 96) {
            _tile_loadd(1, at + 96, 2 * dim);
            _tile_dpbf16ps(0, 1, 5);
        }
        _tile_stored(0, to + t * lanes, 4 * lanes);
    }
}
