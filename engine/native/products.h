/* Products of rows with a matrix, [m, k] x [n, k]^T: bf16 by bf16, and rows of 15 bits by int8. By matrix tiles, or
   where there are none by dot instructions (dots.h).

   Weights are laid out once in the order in which they are read, one stream from begin to end: panels of 32
   outputs; in a panel, step by step along k, two tiles of 16 outputs. A tile has 16 rows of 64 bytes; row r
   holds for each of its 16 outputs the 4 bytes of k that belong together (2 bf16, or 4 int8). */

/* Rows a pass: with more of them, they would not stay in a second level cache while the panels go by. */
#define ROWS 512

EXPORT void pack_bf16(const bf16 *from, bf16 *to, int64_t n, int64_t k) {
    for (int64_t panel = 0; panel < n; panel += 32)
        for (int64_t at = 0; at < k; at += 32)
            for (int64_t tile = panel; tile < panel + 32; tile += 16)
                for (int64_t row = 0; row < 16; row++)
                    for (int64_t out = tile; out < tile + 16; out++, to += 2)
                        memcpy(to, from + out * k + at + 2 * row, 4);
}

EXPORT void pack_int8(const int8_t *from, int8_t *to, int64_t n, int64_t k) {
    for (int64_t panel = 0; panel < n; panel += 32)
        for (int64_t at = 0; at < k; at += 64)
            for (int64_t tile = panel; tile < panel + 32; tile += 16)
                for (int64_t row = 0; row < 16; row++)
                    for (int64_t out = tile; out < tile + 16; out++, to += 4)
                        memcpy(to, from + out * k + at + 4 * row, 4);
}

#if AMX
/* Tiles 0-3 sums (2 by 2), 4 and 5 rows, 6 and 7 weights. */
INLINE void product_tiles(int64_t above, int64_t below) {
    Tiles tiles = {.palette = 1};
    for (int i = 0; i < 2; i++) {
        set_tile(&tiles, i, above, 64);
        if (below) set_tile(&tiles, 2 + i, below, 64);
        set_tile(&tiles, 6 + i, 16, 64);
    }
    set_tile(&tiles, 4, above, 64);
    if (below) set_tile(&tiles, 5, below, 64);
    _tile_loadconfig(&tiles);
}

INLINE void prefetch_tiles(const char *at) {
    for (int i = 0; i < 32; i++) _mm_prefetch(at + 64 * i, _MM_HINT_T0);
}

/* sums [rows, 32] of at most 32 rows and a panel, for tiles that are set for as many. */
INLINE void tile_rows_bf16(const bf16 *x, int64_t rows, const char *at, int64_t k, float *sums) {
    const char *rows0 = (const char *)x, *rows1 = rows0 + 32 * k;
    _tile_zero(0);
    _tile_zero(1);
    if (rows > 16) {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < k; i += 32, at += 2048) {
            _tile_loadd(4, rows0 + 2 * i, 2 * k);
            _tile_loadd(6, at, 64);
            _tile_loadd(7, at + 1024, 64);
            _tile_loadd(5, rows1 + 2 * i, 2 * k);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, sums + 16 * 32, 128);
        _tile_stored(3, sums + 16 * 32 + 16, 128);
    } else
        for (int64_t i = 0; i < k; i += 32, at += 2048) {
            prefetch_tiles(at + AHEAD);
            _tile_loadd(4, rows0 + 2 * i, 2 * k);
            _tile_loadd(6, at, 64);
            _tile_loadd(7, at + 1024, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
}

/* The same in int8, of at most 16 rows in their two parts, `m` rows in all. */
INLINE void tile_rows_int8(const char *high, const char *low, const char *at, int64_t k, int64_t m, int32_t *sums_high,
                           int32_t *sums_low) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < k; i += 64, at += 2048) {
        if (m <= 16) prefetch_tiles(at + AHEAD);
        _tile_loadd(4, high + i, k);
        _tile_loadd(6, at, 64);
        _tile_loadd(7, at + 1024, 64);
        _tile_loadd(5, low + i, k);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums_high, 128);
    _tile_stored(1, sums_high + 16, 128);
    _tile_stored(2, sums_low, 128);
    _tile_stored(3, sums_low + 16, 128);
}
#endif

/* 32 floats, as 32 bf16 or as they are. */
INLINE void put(void *out, int32_t wide, int64_t at, __m512 low, __m512 high) {
    if (wide) {
        _mm512_storeu_ps((float *)out + at, low);
        _mm512_storeu_ps((float *)out + at + 16, high);
    } else
        _mm512_storeu_si512((bf16 *)out + at, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

/* out [m, n], bf16, or float32 with `wide`; bias [n] float32 or NULL. n and k are multiples of 32. */
EXPORT void product_bf16(const bf16 *x, const bf16 *weights, const float *bias, void *out, int32_t wide, int64_t m,
                         int64_t n, int64_t k) {
    for (int64_t base = 0; base < m; base += ROWS) {
        int64_t end = base + ROWS < m ? base + ROWS : m;
#pragma omp parallel
        {
            float sums[32 * 32] __attribute__((aligned(64)));
            int64_t above = 0, below = 0; /* rows that tiles are set for */
            (void)above, (void)below;
#pragma omp for schedule(static)
            for (int64_t panel = 0; panel < n / 32; panel++) {
                const char *from = (const char *)(weights + panel * 32 * k);
                __m512 bias0 = bias ? _mm512_loadu_ps(bias + panel * 32) : _mm512_setzero_ps();
                __m512 bias1 = bias ? _mm512_loadu_ps(bias + panel * 32 + 16) : _mm512_setzero_ps();
                for (int64_t row = base, rows; row < end; row += rows) {
#if AMX
                    if (amx_allowed) {
                        rows = end - row < 32 ? end - row : 32;
                        int64_t upper = rows < 16 ? rows : 16, lower = rows - upper;
                        if (upper != above || lower != below) product_tiles(above = upper, below = lower);
                        tile_rows_bf16(x + row * k, rows, from, k, sums);
                    } else
#endif
                    {
                        rows = even_share(end - row, MOST_ROWS);
                        dot_rows_bf16((const char *)(x + row * k), 2 * k, rows, from, 2048, 1024, k / 32, 1, sums, 32);
                    }
                    for (int64_t i = 0; i < rows; i++)
                        put(out, wide, (row + i) * n + panel * 32,
                            _mm512_add_ps(_mm512_load_ps(sums + i * 32), bias0),
                            _mm512_add_ps(_mm512_load_ps(sums + i * 32 + 16), bias1));
                }
            }
#if AMX
            if (above) _tile_release();
#endif
        }
    }
}

/* Rows as 128 * high + low times a scale of each row: 15 bits and a sign. Without `signs`, high is 128 and low 64
   more. */
INLINE void split_row(const bf16 *x, int8_t *high, int8_t *low, float *scale, int64_t k, int signs) {
    float most = 0.0f;
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < k; j++) {
        float value = fabsf(wide_bf16(x[j]));
        most = value > most ? value : most;
    }
    /* Not a number stays one: it must be seen, not become a wrong token. */
    for (int64_t j = 0; j < k; j++)
        if ((x[j] & 0x7f80) == 0x7f80) most = NAN;
    float factor = most > 0.0f ? 16256.0f / most : 0.0f;
    *scale = most / 16256.0f;
    int32_t more_high = signs ? 0 : 128, more_low = signs ? 0 : 64;
    for (int64_t j = 0; j < k; j++) {
        int32_t value = (int32_t)(wide_bf16(x[j]) * factor + 32768.5f) - 32768;
        int32_t upper = (value + 64) >> 7;
        high[j] = (int8_t)(upper + more_high);
        low[j] = (int8_t)(value - 128 * upper + more_low);
    }
}

/* The same with int8 weights, whose outputs have scales [n], and sums over k in `totals` [n]. k is a multiple of 64.
   Returns 1 without memory. */
EXPORT int32_t product_int8(const bf16 *x, const int8_t *weights, const float *scales, const int32_t *totals,
                            const float *bias, void *out, int32_t wide, int64_t m, int64_t n, int64_t k) {
    if (!m) return 0;
    int64_t most = m < ROWS ? m : ROWS;
    int8_t *high = scratch(2, most * k), *low = scratch(3, most * k);
    float *factors = scratch(4, most * sizeof(float));
    if (!high || !low || !factors) return 1;
    int signs = 0;
#if AMX
    signs = amx_allowed; /* tiles have signs on both sides */
#endif
    for (int64_t base = 0; base < m; base += ROWS) {
        int64_t end = base + ROWS < m ? base + ROWS : m;
#pragma omp parallel
        {
#pragma omp for schedule(static)
            for (int64_t i = base; i < end; i++) {
                int64_t at = (i - base) * k;
                split_row(x + i * k, high + at, low + at, factors + (i - base), k, signs);
            }
            int32_t sums[2][16 * 32] __attribute__((aligned(64)));
            int64_t above = 0; /* rows that tiles are set for */
            (void)above;
#pragma omp for schedule(static)
            for (int64_t panel = 0; panel < n / 32; panel++) {
                const char *from = (const char *)(weights + panel * 32 * k);
                __m512 scale0 = _mm512_loadu_ps(scales + panel * 32), scale1 = _mm512_loadu_ps(scales + panel * 32 + 16);
                __m512 bias0 = bias ? _mm512_loadu_ps(bias + panel * 32) : _mm512_setzero_ps();
                __m512 bias1 = bias ? _mm512_loadu_ps(bias + panel * 32 + 16) : _mm512_setzero_ps();
                for (int64_t row = base, rows; row < end; row += rows) {
                    const char *rows0 = (const char *)high + (row - base) * k, *rows1 = (const char *)low + (row - base) * k;
#if AMX
                    if (amx_allowed) {
                        rows = end - row < 16 ? end - row : 16;
                        if (rows != above) product_tiles(above = rows, rows);
                        tile_rows_int8(rows0, rows1, from, k, m, sums[0], sums[1]);
                    } else
#endif
                    {
                        rows = even_share(end - row, MOST_ROWS_INT8);
                        dot_rows_int8(rows0, rows1, k, rows, from, k / 64, totals + panel * 32, sums[0], sums[1]);
                    }
                    for (int64_t i = 0; i < rows; i++) {
                        __m512 factor = _mm512_set1_ps(factors[row - base + i]), step = _mm512_set1_ps(128.0f);
                        __m512 both[2];
                        for (int half = 0; half < 2; half++) {
                            __m512 upper = _mm512_cvtepi32_ps(_mm512_load_si512(sums[0] + i * 32 + 16 * half));
                            __m512 lower = _mm512_cvtepi32_ps(_mm512_load_si512(sums[1] + i * 32 + 16 * half));
                            both[half] = _mm512_mul_ps(_mm512_fmadd_ps(upper, step, lower), factor);
                        }
                        put(out, wide, (row + i) * n + panel * 32, _mm512_fmadd_ps(both[0], scale0, bias0),
                            _mm512_fmadd_ps(both[1], scale1, bias1));
                    }
                }
            }
#if AMX
            if (above) _tile_release();
#endif
        }
    }
    return 0;
}
