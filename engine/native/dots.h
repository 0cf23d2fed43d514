/* Products by dot instructions of 512 bits, where there are no matrix tiles: the same layouts, the same sums.

   A line of 64 bytes holds 4 bytes of k for each of 16 outputs; a tile is 16 lines, and a step of k two tiles. */

#define MOST_ROWS 14 /* whose two sums of 16 stay in registers */
#define MOST_ROWS_INT8 7

/* Rows of a pass, so that the last one is not a lone one; at most `most`. */
INLINE int64_t even_share(int64_t left, int64_t most) {
    int64_t passes = (left + most - 1) / most;
    return (left + passes - 1) / passes;
}

INLINE __m512i spread_pair(const char *at) {
    int32_t bits;
    memcpy(&bits, at, 4);
    return _mm512_set1_epi32(bits);
}

/* Weights in the order in which they lie: some processors read memory three times as fast so. With more rows two
   tiles share what is spread of a row, which is then dearer than memory, and memory is asked for in its order. */
INLINE int in_order(int count) { return count <= 4; }

INLINE void some_rows_bf16(const char *rows, int64_t stride, const int count, const char *right, int64_t next,
                           int64_t beside, int64_t steps, int ahead, float *out, int64_t out_stride) {
    __m512 sums[MOST_ROWS][2];
    for (int r = 0; r < count; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < steps; i++, rows += 64, right += next) {
        if (in_order(count))
            for (int t = 0; t < 2; t++)
                for (int p = 0; p < 16; p++) {
                    __m512bh weights = (__m512bh)_mm512_loadu_si512(right + t * beside + 64 * p);
                    for (int r = 0; r < count; r++)
                        sums[r][t] = _mm512_dpbf16_ps(sums[r][t], (__m512bh)spread_pair(rows + r * stride + 4 * p),
                                                      weights);
                }
        else
            for (int p = 0; p < 16; p++) {
                if (ahead) {
                    _mm_prefetch(right + AHEAD + 128 * p, _MM_HINT_T0);
                    _mm_prefetch(right + AHEAD + 128 * p + 64, _MM_HINT_T0);
                }
                __m512bh first = (__m512bh)_mm512_loadu_si512(right + 64 * p);
                __m512bh second = (__m512bh)_mm512_loadu_si512(right + beside + 64 * p);
                for (int r = 0; r < count; r++) {
                    __m512bh pair = (__m512bh)spread_pair(rows + r * stride + 4 * p);
                    sums[r][0] = _mm512_dpbf16_ps(sums[r][0], pair, first);
                    sums[r][1] = _mm512_dpbf16_ps(sums[r][1], pair, second);
                }
            }
    }
    for (int r = 0; r < count; r++) {
        _mm512_storeu_ps(out + r * out_stride, sums[r][0]);
        _mm512_storeu_ps(out + r * out_stride + 16, sums[r][1]);
    }
}

/* out [count, 32] = rows [count, 32 * steps] times a panel: right tiles `next` bytes apart from step to step, and the
   second 16 outputs' `beside` bytes further. count is at most MOST_ROWS. */
static void dot_rows_bf16(const char *rows, int64_t stride, int64_t count, const char *right, int64_t next,
                          int64_t beside, int64_t steps, int ahead, float *out, int64_t out_stride) {
#define ROWS_CASE(n) \
    case n: some_rows_bf16(rows, stride, n, right, next, beside, steps, ahead, out, out_stride); break;
    switch (count) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6) ROWS_CASE(7)
        ROWS_CASE(8) ROWS_CASE(9) ROWS_CASE(10) ROWS_CASE(11) ROWS_CASE(12) ROWS_CASE(13)
        default: some_rows_bf16(rows, stride, MOST_ROWS, right, next, beside, steps, ahead, out, out_stride);
    }
#undef ROWS_CASE
}

/* Rows in two parts, whose numbers are those of `split_row` plus 128 and 64: this instruction's left side has no
   signs. `totals` are the sums of each output's weights, by which the sums are then too large. */
INLINE void some_rows_int8(const char *high, const char *low, int64_t stride, const int count, const char *right,
                           int64_t steps, const int32_t *totals, int32_t *sums_high, int32_t *sums_low) {
    __m512i upper[MOST_ROWS_INT8][2], lower[MOST_ROWS_INT8][2];
    for (int t = 0; t < 2; t++) {
        __m512i total = _mm512_loadu_si512(totals + 16 * t);
        for (int r = 0; r < count; r++) {
            upper[r][t] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(total, 7));
            lower[r][t] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(total, 6));
        }
    }
    for (int64_t i = 0; i < steps; i++, high += 64, low += 64, right += 2048) {
        if (in_order(count))
            for (int t = 0; t < 2; t++)
                for (int p = 0; p < 16; p++) {
                    __m512i weights = _mm512_loadu_si512(right + 1024 * t + 64 * p);
                    for (int r = 0; r < count; r++) {
                        int64_t at = r * stride + 4 * p;
                        upper[r][t] = _mm512_dpbusd_epi32(upper[r][t], spread_pair(high + at), weights);
                        lower[r][t] = _mm512_dpbusd_epi32(lower[r][t], spread_pair(low + at), weights);
                    }
                }
        else
            for (int p = 0; p < 16; p++) {
                _mm_prefetch(right + AHEAD + 128 * p, _MM_HINT_T0);
                _mm_prefetch(right + AHEAD + 128 * p + 64, _MM_HINT_T0);
                __m512i first = _mm512_loadu_si512(right + 64 * p), second = _mm512_loadu_si512(right + 1024 + 64 * p);
                for (int r = 0; r < count; r++) {
                    int64_t at = r * stride + 4 * p;
                    __m512i above = spread_pair(high + at), below = spread_pair(low + at);
                    upper[r][0] = _mm512_dpbusd_epi32(upper[r][0], above, first);
                    upper[r][1] = _mm512_dpbusd_epi32(upper[r][1], above, second);
                    lower[r][0] = _mm512_dpbusd_epi32(lower[r][0], below, first);
                    lower[r][1] = _mm512_dpbusd_epi32(lower[r][1], below, second);
                }
            }
    }
    for (int r = 0; r < count; r++)
        for (int t = 0; t < 2; t++) {
            _mm512_storeu_si512(sums_high + 32 * r + 16 * t, upper[r][t]);
            _mm512_storeu_si512(sums_low + 32 * r + 16 * t, lower[r][t]);
        }
}

static void dot_rows_int8(const char *high, const char *low, int64_t stride, int64_t count, const char *right,
                          int64_t steps, const int32_t *totals, int32_t *sums_high, int32_t *sums_low) {
#define ROWS_CASE(n) \
    case n: some_rows_int8(high, low, stride, n, right, steps, totals, sums_high, sums_low); break;
    switch (count) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
        default: some_rows_int8(high, low, stride, MOST_ROWS_INT8, right, steps, totals, sums_high, sums_low);
    }
#undef ROWS_CASE
}

/* The sum of each of 16 vectors, as one vector. */
INLINE __m512 sums16(__m512 *v) {
    for (int i = 0; i < 8; i++)
        v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
        v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int n = 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
    return v[0];
}

INLINE void some_scores(const bf16 *keys, int64_t tokens, const int64_t dim, const bf16 *queries, const int lanes,
                        float *scores) {
    for (int64_t t = 0; t < tokens; t += 16 / lanes) {
        __m512 parts[16];
        for (int j = 0; j < 16; j++) {
            const bf16 *key = keys + (t + j / lanes) * dim, *query = queries + j % lanes * dim;
            parts[j] = _mm512_setzero_ps();
            if (t + j / lanes < tokens)
                for (int64_t d = 0; d < dim; d += 32)
                    parts[j] = _mm512_dpbf16_ps(parts[j], (__m512bh)_mm512_loadu_si512(key + d),
                                                (__m512bh)_mm512_loadu_si512(query + d));
        }
        _mm512_storeu_ps(scores + t * lanes, sums16(parts));
    }
}

/* Queries as `dot_scores` wants them, [lanes, dim]; NULL where they cannot be had so. */
INLINE const float *pad_queries_f32(const float *queries, int64_t count, int64_t lanes, int64_t dim) {
    (void)queries, (void)count, (void)lanes, (void)dim;
    return NULL;
}
INLINE void dot_scores_f32(const float *keys, int64_t tokens, int64_t dim, const float *queries, int lanes,
                           float *scores) {
    (void)keys, (void)tokens, (void)dim, (void)queries, (void)lanes, (void)scores;
}

INLINE const bf16 *pad_queries_bf16(const bf16 *queries, int64_t count, int64_t lanes, int64_t dim) {
    if (dim % 32) return NULL;
    bf16 *padded = scratch(6, lanes * dim * sizeof(bf16));
    if (!padded) return NULL;
    memcpy(padded, queries, count * dim * sizeof(bf16));
    memset(padded + count * dim, 0, (lanes - count) * dim * sizeof(bf16));
    return padded;
}

/* scores[t * lanes + q] = queries[q] . keys[t], for queries [lanes, dim]. Writes up to 15 numbers more than that:
   there is room. */
static void dot_scores_bf16(const bf16 *keys, int64_t tokens, int64_t dim, const bf16 *queries, int lanes,
                            float *scores) {
#define LANES_CASES(d) \
    switch (lanes) { \
        case 1: some_scores(keys, tokens, d, queries, 1, scores); break; \
        case 2: some_scores(keys, tokens, d, queries, 2, scores); break; \
        case 4: some_scores(keys, tokens, d, queries, 4, scores); break; \
        case 8: some_scores(keys, tokens, d, queries, 8, scores); break; \
        default: some_scores(keys, tokens, d, queries, 16, scores); \
    }
    if (dim == 64)
        LANES_CASES(64)
    else if (dim == 128)
        LANES_CASES(128)
    else
        LANES_CASES(dim)
#undef LANES_CASES
}

/* Weights of tokens two by two, in place: [tokens, lanes] float to [tokens / 2, lanes] pairs of bf16. Reads and writes
   whole 32s of numbers: there is room. */
static void pair_weights(float *weights, int64_t tokens, int lanes) {
    uint16_t places[32];
    for (int d = 0; d < 16; d++) {
        places[2 * d] = (uint16_t)(2 * (d / lanes) * lanes + d % lanes);
        places[2 * d + 1] = (uint16_t)(places[2 * d] + lanes);
    }
    __m512i order = _mm512_loadu_si512(places);
    for (int64_t j = 0; j < tokens * lanes; j += 32) {
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights + j + 16), _mm512_loadu_ps(weights + j));
        _mm512_storeu_si512(weights + j / 2, _mm512_permutexvar_epi16(order, both));
    }
}

/* Where column j of 32 is in sums of `some_pairs`. */
INLINE int64_t place_pairs(int64_t j) { return j % 8 / 4 * 16 + j / 8 * 4 + j % 4; }

INLINE void some_pairs(const bf16 *values, int64_t tokens, int64_t dim, const uint32_t *pairs, int lanes,
                       const int count, const int lines, float *acc) {
    __m512 sum[4][4];
    for (int q = 0; q < count; q++)
        for (int k = 0; k < 2 * lines; k++) sum[q][k] = _mm512_loadu_ps(acc + q * dim + 16 * k);
    for (int64_t t = 0; t < tokens; t += 2) {
        int lone = t + 1 == tokens;
        __m512i first[2], second[2];
        for (int k = 0; k < lines; k++) {
            __m512i a = _mm512_loadu_si512(values + t * dim + 32 * k);
            __m512i b = lone ? _mm512_setzero_si512() : _mm512_loadu_si512(values + (t + 1) * dim + 32 * k);
            first[k] = _mm512_unpacklo_epi16(a, b);
            second[k] = _mm512_unpackhi_epi16(a, b);
        }
        for (int q = 0; q < count; q++) {
            uint32_t bits = pairs[t / 2 * lanes + q];
            __m512bh weight = (__m512bh)_mm512_set1_epi32((int32_t)(lone ? bits & 0xffff : bits));
            for (int k = 0; k < lines; k++) {
                sum[q][2 * k] = _mm512_dpbf16_ps(sum[q][2 * k], weight, (__m512bh)first[k]);
                sum[q][2 * k + 1] = _mm512_dpbf16_ps(sum[q][2 * k + 1], weight, (__m512bh)second[k]);
            }
        }
    }
    for (int q = 0; q < count; q++)
        for (int k = 0; k < 2 * lines; k++) _mm512_storeu_ps(acc + q * dim + 16 * k, sum[q][k]);
}

/* acc[q] += sum over t of weight * values[t], dim a multiple of 32; each 32 columns in the order of `place_pairs`. */
static void mix_pairs_bf16(const bf16 *values, int64_t tokens, int64_t dim, const float *weights, int lanes,
                           int64_t count, float *acc) {
    for (int64_t column = 0; column < dim; column += 64)
        for (int64_t q = 0; q < count; q += 4) {
            const bf16 *from = values + column;
            const uint32_t *pairs = (const uint32_t *)weights + q;
            float *to = acc + q * dim + column;
#define COUNT_CASES(lines) \
    switch (count - q) { \
        case 1: some_pairs(from, tokens, dim, pairs, lanes, 1, lines, to); break; \
        case 2: some_pairs(from, tokens, dim, pairs, lanes, 2, lines, to); break; \
        case 3: some_pairs(from, tokens, dim, pairs, lanes, 3, lines, to); break; \
        default: some_pairs(from, tokens, dim, pairs, lanes, 4, lines, to); \
    }
            if (dim - column < 64)
                COUNT_CASES(1)
            else
                COUNT_CASES(2)
#undef COUNT_CASES
        }
}
INLINE void mix_pairs_f32(const float *values, int64_t tokens, int64_t dim, const float *weights, int lanes,
                          int64_t count, float *acc) {
    (void)values, (void)tokens, (void)dim, (void)weights, (void)lanes, (void)count, (void)acc;
}
