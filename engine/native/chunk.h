/* Attention of prompts in bf16 by matrix tiles or dot instructions: each row of a sequence over the KV before it and its own.

   For each KV head the keys and values that are seen are first laid out as right-hand tiles, once for all rows
   and heads that share them; then 32 rows at a time go over 512 tokens at a time, with the running maximum and
   sum of Milakov and Gimelshein (2018), as FlashAttention does (Dao et al., 2022). */

#define SPAN 512 /* tokens whose scores are kept: 32 rows of them stay in a second level cache */
#define LINE (SPAN + 16)

/* 16 by 16 numbers of 32 bits, rows `stride` bytes apart, turned over; rows from `rows` on are zero. */
INLINE void turn16(const char *from, int64_t stride, int64_t rows, char *to) {
    __m512i r[16], s[16];
    for (int i = 0; i < 16; i++) r[i] = i < rows ? _mm512_loadu_si512(from + i * stride) : _mm512_setzero_si512();
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        s[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        s[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        s[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(to + 64 * i, _mm512_shuffle_i32x4(s[i], s[i + 8], 0x88));
        _mm512_storeu_si512(to + 64 * (i + 8), _mm512_shuffle_i32x4(s[i], s[i + 8], 0xdd));
        _mm512_storeu_si512(to + 64 * (i + 4), _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0x88));
        _mm512_storeu_si512(to + 64 * (i + 12), _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0xdd));
    }
}

/* Rows a and b of 16 numbers each, as 16 pairs. */
INLINE void pair16(const bf16 *a, const bf16 *b, char *to) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)a));
    __m512i high = b ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)b)) : _mm512_setzero_si512();
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

/* Where token t of one head lies. */
typedef struct {
    const char *base; /* of the layer and head, in block 0 */
    const int32_t *table;
    int64_t block_bytes, size, dim;
} Pages;

INLINE const bf16 *at_token(const Pages *pages, int64_t t) {
    int64_t block = pages->table[t / pages->size];
    return (const bf16 *)(pages->base + block * pages->block_bytes) + t % pages->size * pages->dim;
}

/* Tokens [first, end) as tiles: keys [tokens / 16][dim / 32], values [tokens / 32][dim / 16]. The last 32 are
   filled with zeros. */
static void lay_out(const Pages *keys, const Pages *values, int64_t first, int64_t end, char *k_tiles, char *v_tiles) {
    int64_t dim = keys->dim;
    bf16 line[16 * 256];
    for (int64_t t = first; t < first + (end - first + 31) / 32 * 32; t += 16) {
        int64_t rows = end - t < 16 ? end - t : 16;
        if (rows < 0) rows = 0;
        const bf16 *from = line;
        if (rows && t % keys->size + rows <= keys->size)
            from = at_token(keys, t);
        else
            for (int64_t i = 0; i < rows; i++) memcpy(line + i * dim, at_token(keys, t + i), 2 * dim);
        for (int64_t j = 0; j < dim; j += 32, k_tiles += 1024) turn16((const char *)(from + j), 2 * dim, rows, k_tiles);
    }
    for (int64_t t = first; t < end; t += 32, v_tiles += 64 * dim)
        for (int64_t i = 0; i < 32; i += 2) {
            const bf16 *a = t + i < end ? at_token(values, t + i) : NULL;
            const bf16 *b = t + i + 1 < end ? at_token(values, t + i + 1) : NULL;
            for (int64_t j = 0; j < dim / 16; j++) {
                char *to = v_tiles + j * 1024 + i * 32;
                if (a)
                    pair16(a + 16 * j, b ? b + 16 * j : NULL, to);
                else
                    _mm512_storeu_si512(to, _mm512_setzero_si512());
            }
        }
}

/* out [rows, 32] = rows [32, 32 * steps], `stride` bytes apart, times right tiles `next` bytes apart from step to step,
   and the second column's `beside` bytes further. Of tiles all 32 rows are read and written. */
INLINE void panel_product(const char *above, int64_t stride, int64_t rows, const char *right, int64_t next,
                          int64_t beside, int64_t steps, float *out, int64_t out_stride) {
#if AMX
    if (amx_allowed) {
        const char *below = above + 16 * stride;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < steps; i++, above += 64, below += 64, right += next) {
            _tile_loadd(4, above, stride);
            _tile_loadd(6, right, 64);
            _tile_loadd(7, right + beside, 64);
            _tile_loadd(5, below, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, out, 4 * out_stride);
        _tile_stored(1, out + 16, 4 * out_stride);
        _tile_stored(2, out + 16 * out_stride, 4 * out_stride);
        _tile_stored(3, out + 16 * out_stride + 16, 4 * out_stride);
        return;
    }
#endif
    for (int64_t row = 0, some; row < rows; row += some) {
        some = even_share(rows - row, MOST_ROWS);
        dot_rows_bf16(above + row * stride, stride, some, right, next, beside, steps, 0, out + row * out_stride,
                      out_stride);
    }
}

/* 2^x to 4e-5, for x at most 0: far finer than the bf16 that weights become. */
INLINE __m512 exp2_near(__m512 x) {
    __m512 n = _mm512_roundscale_ps(x, 8), f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(9.6181291e-3f), _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    return _mm512_scalef_ps(_mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f)), n);
}

/* Which of 16 tokens from t on lie in [hidden, sees). */
INLINE __mmask16 seen16(int64_t t, int64_t hidden, int64_t sees) {
    if (t >= hidden && t + 16 <= sees) return 0xffff;
    uint32_t mask = t + 16 > sees ? (1u << (sees - t)) - 1 : 0xffff;
    return (__mmask16)(t < hidden ? mask & (0xffffu << (hidden - t)) : mask);
}

/* Sequences from `decodes` on; like decode_attention. dim is a multiple of 32 up to 256. */
EXPORT int32_t chunk_attention(const Step *step, int32_t layer, const bf16 *queries, int64_t stride, bf16 *out,
                               float scale, int32_t window, float cap) {
    int64_t dim = step->dim, size = step->block_size, heads = step->heads, kv_heads = step->kv_heads;
    int64_t shared = heads / kv_heads, head_bytes = 2 * size * dim;
    const char *of_layer = step->pool + layer * step->layer_bytes;
    float times = (cap > 0 ? 1.0f : scale) * 1.44269504f; /* weights are powers of two */
    int32_t failed = 0;
    for (int64_t i = step->decodes; i < step->sequences && !failed; i++) {
        int64_t row0 = step->starts[i], count = step->starts[i + 1] - row0;
        int64_t end = step->lengths[i], before = end - count;
        int64_t first = window && before + 1 > window ? before + 1 - window : 0;
        first -= first % 32;
        int64_t tokens = (end - first + 31) / 32 * 32, kv_bytes = 2 * tokens * dim;
        char *laid = scratch(5, 2 * kv_heads * kv_bytes);
        if (!laid) return 1;
#pragma omp parallel
        {
#pragma omp for schedule(static)
            for (int64_t kv = 0; kv < kv_heads; kv++) {
                const int32_t *table = step->tables + i * step->width;
                Pages keys = {of_layer + kv * head_bytes, table, step->block_bytes, size, dim};
                Pages values = {of_layer + (kv_heads + kv) * head_bytes, table, step->block_bytes, size, dim};
                lay_out(&keys, &values, first, end, laid + kv * kv_bytes, laid + (kv_heads + kv) * kv_bytes);
            }
            float *scores = scratch(0, 32 * LINE * 4), *mixed = scratch(1, 2 * 32 * 256 * 4);
            bf16 *weights = scratch(2, 32 * LINE * 2), *asked = scratch(3, 32 * 256 * 2);
            if (!scores || !mixed || !weights || !asked) {
#pragma omp atomic write
                failed = 1;
            }
#pragma omp barrier
            if (!failed) { /* the same for all threads */
                float *sum = mixed + 32 * 256;
#if AMX
                if (amx_allowed) product_tiles(16, 16);
#endif
                int64_t parts = (count + 31) / 32;
                /* The last rows look at most: they go first, so that the threads end together. */
#pragma omp for schedule(dynamic)
                for (int64_t job = 0; job < parts * heads; job++) {
                    int64_t head = job % heads, r0 = (parts - 1 - job / heads) * 32;
                    int64_t rows = count - r0 < 32 ? count - r0 : 32;
                    const char *k_tiles = laid + head / shared * kv_bytes, *v_tiles = k_tiles + kv_heads * kv_bytes;
                    const bf16 *from = queries + (row0 + r0) * stride + head * dim;
                    int64_t from_stride = stride;
                    if (rows < 32) {
                        memset(asked, 0, 32 * dim * 2);
                        for (int64_t r = 0; r < rows; r++) memcpy(asked + r * dim, from + r * stride, 2 * dim);
                        from = asked, from_stride = dim;
                    }
                    float most[32], total[32];
                    for (int r = 0; r < 32; r++) most[r] = -INFINITY, total[r] = 0.0f;
                    int64_t stop = before + r0 + rows; /* tokens that the last of these rows sees */
                    int64_t begin = window && before + r0 + 1 > window ? before + r0 + 1 - window : 0;
                    begin = begin > first ? first + (begin - first) / 32 * 32 : first;
                    for (int64_t t0 = begin; t0 < stop; t0 += SPAN) {
                        int64_t some = stop - t0 < SPAN ? stop - t0 : SPAN, wide = (some + 31) / 32 * 32;
                        for (int64_t t = 0; t < wide; t += 32)
                            panel_product((const char *)from, 2 * from_stride, rows,
                                          k_tiles + (t0 - first + t) * 2 * dim, 1024, dim * 32, dim / 32, scores + t,
                                          LINE);
                        float change[32];
                        for (int64_t r = 0; r < rows; r++) {
                            float *line = scores + r * LINE;
                            int64_t sees = before + r0 + r + 1 - t0, hidden = window ? sees - window : 0;
                            if (sees > some) sees = some;
                            if (hidden < 0) hidden = 0;
                            __m512 high = _mm512_set1_ps(-INFINITY), added = _mm512_setzero_ps();
                            int64_t from_t = hidden / 16 * 16;
                            for (int64_t t = from_t; t < sees; t += 16) {
                                f16v value = load16_f32(line + t);
                                if (cap > 0) store16_f32(line + t, value = cap * fast_tanh(value * (scale / cap)));
                                high = _mm512_mask_max_ps(high, seen16(t, hidden, sees), high, (__m512)value);
                            }
                            float peak = _mm512_reduce_max_ps(high) * times;
                            peak = peak > most[r] ? peak : most[r];
                            bf16 *to = weights + r * LINE;
                            int64_t t = 0;
                            for (; t < from_t; t += 16) store16_bf16(to + t, (f16v){0});
                            if (peak == -INFINITY) { /* nothing of this span is seen */
                                for (; t < wide; t += 16) store16_bf16(to + t, (f16v){0});
                                change[r] = 1.0f;
                                continue;
                            }
                            __m512 factor = _mm512_set1_ps(times), less = _mm512_set1_ps(peak);
                            for (; t < sees; t += 16) {
                                __m512 weight = exp2_near(_mm512_fmsub_ps(_mm512_loadu_ps(line + t), factor, less));
                                weight = _mm512_maskz_mov_ps(seen16(t, hidden, sees), weight);
                                store16_bf16(to + t, (f16v)weight);
                                added = _mm512_add_ps(added, weight);
                            }
                            for (; t < wide; t += 16) store16_bf16(to + t, (f16v){0});
                            change[r] = exp2f(most[r] - peak);
                            most[r] = peak;
                            total[r] = total[r] * change[r] + _mm512_reduce_add_ps(added);
                        }
                        for (int64_t r = rows; r < 32; r++) memset(weights + r * LINE, 0, 2 * wide);
                        for (int64_t j = 0; j < dim; j += 32)
                            panel_product((const char *)weights, 2 * LINE, rows,
                                          v_tiles + (t0 - first) * 2 * dim + j * 64, dim * 64, 1024, wide / 32, sum + j,
                                          dim);
                        for (int64_t r = 0; r < rows; r++)
                            for (int64_t j = 0; j < dim; j += 16) {
                                f16v value = load16_f32(sum + r * dim + j);
                                if (t0 > begin) value += load16_f32(mixed + r * dim + j) * change[r];
                                store16_f32(mixed + r * dim + j, value);
                            }
                    }
                    for (int64_t r = 0; r < rows; r++) {
                        bf16 *to = out + ((row0 + r0 + r) * heads + head) * dim;
                        float factor = 1.0f / total[r];
                        for (int64_t j = 0; j < dim; j += 16)
                            store16_bf16(to + j, load16_f32(mixed + r * dim + j) * factor);
                    }
                }
#if AMX
                if (amx_allowed) _tile_release();
#endif
            }
        }
    }
    return failed;
}
