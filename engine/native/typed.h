/* Kernels for one type of element: included once for each, with T, NAME and the
   conversions defined. */

/* Root-mean-square norm of rows [n, width], scaled by weight + offset; with a residual, rows are added to it
   first, in place. */
EXPORT void NAME(rms_norm)(const T *rows, T *residual, const T *weight, T *out, int64_t n, int64_t width,
                           float epsilon, float offset) {
#pragma omp parallel for schedule(static) if (n > 15)
    for (int64_t i = 0; i < n; i++) {
        const T *x = rows + i * width;
        if (residual) {
            T *sum = residual + i * width;
            int64_t j = 0;
            for (; j + 16 <= width; j += 16) STORE16(sum + j, LOAD16(sum + j) + LOAD16(x + j));
            for (; j < width; j++) sum[j] = NARROW(WIDE(sum[j]) + WIDE(x[j]));
            x = sum;
        }
        f16v parts = {0};
        float squares = 0.0f;
        int64_t j = 0;
        for (; j + 16 <= width; j += 16) parts += LOAD16(x + j) * LOAD16(x + j);
        for (; j < width; j++) squares += WIDE(x[j]) * WIDE(x[j]);
        for (int k = 0; k < 16; k++) squares += parts[k];
        float factor = 1.0f / sqrtf(squares / (float)width + epsilon);
        T *to = out + i * width;
        for (j = 0; j + 16 <= width; j += 16) STORE16(to + j, LOAD16(x + j) * factor * (LOAD16(weight + j) + offset));
        for (; j < width; j++) to[j] = NARROW(WIDE(x[j]) * factor * (WIDE(weight[j]) + offset));
    }
}

/* Turns [n, heads, dim] in place, rows `stride` elements apart; cosine and sine are [n, dim / 2], rows
   `table_stride` apart. */
EXPORT void NAME(rotary)(T *x, const T *cosine, const T *sine, int64_t n, int64_t heads, int64_t dim,
                         int64_t stride, int64_t table_stride) {
    int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (n > 15)
    for (int64_t i = 0; i < n; i++) {
        const T *c = cosine + i * table_stride, *s = sine + i * table_stride;
        for (int64_t h = 0; h < heads; h++) {
            T *first = x + i * stride + h * dim, *second = first + half;
            int64_t j = 0;
            for (; j + 16 <= half; j += 16) {
                f16v a = LOAD16(first + j), b = LOAD16(second + j), co = LOAD16(c + j), si = LOAD16(s + j);
                STORE16(first + j, a * co - b * si);
                STORE16(second + j, b * co + a * si);
            }
            for (; j < half; j++) {
                float a = WIDE(first[j]), b = WIDE(second[j]), co = WIDE(c[j]), si = WIDE(s[j]);
                first[j] = NARROW(a * co - b * si);
                second[j] = NARROW(b * co + a * si);
            }
        }
    }
}

/* [n, 2 * width] to [n, width]: silu of the first half, or with `gelu` its tanh form, times the second. */
EXPORT void NAME(gated)(const T *x, T *out, int64_t n, int64_t width, int32_t gelu) {
#pragma omp parallel for schedule(static) if (n > 15)
    for (int64_t i = 0; i < n; i++) {
        const T *gate = x + i * 2 * width, *up = gate + width;
        T *to = out + i * width;
        int64_t j = 0;
        for (; j + 16 <= width; j += 16) {
            f16v g = LOAD16(gate + j);
            STORE16(to + j, (gelu ? gelu_tanh(g) : silu(g)) * LOAD16(up + j));
        }
        for (; j < width; j++) {
            f16v g = spread(WIDE(gate[j]));
            to[j] = NARROW((gelu ? gelu_tanh(g) : silu(g))[0] * WIDE(up[j]));
        }
    }
}

/* Stores keys and values of each row, [rows, 2 * kv_heads, dim], rows `stride` elements apart. */
EXPORT void NAME(write_kv)(const Step *step, int32_t layer, const T *from, int64_t stride) {
    int64_t size = step->block_size, dim = step->dim;
    for (int64_t i = 0; i < step->rows; i++) {
        int64_t block = step->slots[i] / size, offset = step->slots[i] % size;
        T *to = (T *)(step->pool + block * step->block_bytes + layer * step->layer_bytes) + offset * dim;
        for (int64_t h = 0; h < 2 * step->kv_heads; h++)
            memcpy(to + h * size * dim, from + i * stride + h * dim, dim * sizeof(T));
    }
}

/* acc[q] += sum of p[t * lanes + q] * values[t], for 64 columns and `count` queries (at most 4); acc holds each
   32 columns in the order of LOAD32. */
INLINE void NAME(mix64)(const T *values, int64_t tokens, int64_t dim, const float *p, int lanes, int count,
                        float *acc, int64_t acc_stride) {
    f16v sum[4][4];
    for (int q = 0; q < count; q++)
        for (int k = 0; k < 4; k++) sum[q][k] = load16_f32(acc + q * acc_stride + 16 * k);
    for (int64_t t = 0; t < tokens; t++) {
        f16v v0, v1, v2, v3;
        LOAD32(values + t * dim, &v0, &v1);
        LOAD32(values + t * dim + 32, &v2, &v3);
        for (int q = 0; q < count; q++) {
            float weight = p[t * lanes + q];
            sum[q][0] += weight * v0;
            sum[q][1] += weight * v1;
            sum[q][2] += weight * v2;
            sum[q][3] += weight * v3;
        }
    }
    for (int q = 0; q < count; q++)
        for (int k = 0; k < 4; k++) store16_f32(acc + q * acc_stride + 16 * k, sum[q][k]);
}

INLINE void NAME(mix)(const T *values, int64_t tokens, int64_t dim, const float *p, int lanes, int count,
                      float *acc) {
    int64_t column = 0;
    for (; column + 64 <= dim; column += 64)
        for (int q = 0; q < count; q += 4) {
            const T *from = values + column;
            float *to = acc + q * dim + column;
            switch (count - q) {
                case 1: NAME(mix64)(from, tokens, dim, p + q, lanes, 1, to, dim); break;
                case 2: NAME(mix64)(from, tokens, dim, p + q, lanes, 2, to, dim); break;
                case 3: NAME(mix64)(from, tokens, dim, p + q, lanes, 3, to, dim); break;
                default: NAME(mix64)(from, tokens, dim, p + q, lanes, 4, to, dim);
            }
        }
    for (int64_t t = 0; column < dim && t < tokens; t++)
        for (int q = 0; q < count; q++)
            for (int64_t j = column; j < dim; j++) acc[q * dim + j] += p[t * lanes + q] * WIDE(values[t * dim + j]);
}

/* scores[t * lanes + q] = queries[q] . keys[t]; queries are [count, dim] float. */
INLINE void NAME(dots)(const T *keys, int64_t tokens, int64_t dim, const float *queries, int lanes, int count,
                       float *scores) {
    for (int64_t t = 0; t < tokens; t++)
        for (int q = 0; q < count; q++) {
            float sum = 0.0f;
            int64_t j = 0;
            if (dim >= 16) {
                f16v parts = {0};
                for (; j + 16 <= dim; j += 16) parts += LOAD16(keys + t * dim + j) * *(const f16v *)(queries + q * dim + j);
                for (int k = 0; k < 16; k++) sum += parts[k];
            }
            for (; j < dim; j++) sum += WIDE(keys[t * dim + j]) * queries[q * dim + j];
            scores[t * lanes + q] = sum;
        }
}

/* Attention of the leading `decodes` rows, one a sequence: queries [rows, heads, dim], rows `stride` elements
   apart, to out [rows, heads, dim]. window 0: none; cap 0: none. Returns 0, or 1 without memory. */
EXPORT int32_t NAME(decode_attention)(const Step *step, int32_t layer, const T *queries, int64_t stride, T *out,
                                      float scale, int32_t window, float cap) {
    int64_t size = step->block_size, dim = step->dim, shared = step->heads / step->kv_heads;
    int64_t groups = (shared + 15) / 16; /* of at most 16 queries that share a KV head */
    int64_t each = (shared + groups - 1) / groups;
    int64_t lanes = each > 8 ? 16 : each > 4 ? 8 : each > 2 ? 4 : each;
    int64_t page = size * dim * (int64_t)sizeof(T) < 4096 ? size * dim * (int64_t)sizeof(T) : 4096;
    int32_t failed = 0;
#pragma omp parallel for schedule(dynamic) collapse(3) if (step->decodes * step->kv_heads > 1)
    for (int64_t i = 0; i < step->decodes; i++)
        for (int64_t kv = 0; kv < step->kv_heads; kv++)
            for (int64_t group = 0; group < groups; group++) {
                int64_t from = group * each, count = shared - from < each ? shared - from : each;
                int64_t end = step->lengths[i], begin = window && window < end ? end - window : 0;
                int64_t first = begin - begin % 16; /* tiles want whole 16s of a page */
                int64_t tokens = end - first;
                const int32_t *table = step->tables + i * step->width;
                const T *base = (const T *)(step->pool + layer * step->layer_bytes) + kv * size * dim;
                int64_t to_values = step->kv_heads * size * dim, block = step->block_bytes / sizeof(T);
                float *scores = scratch(0, (size_t)(tokens + 32) * lanes * sizeof(float));
                float *wide = scratch(1, (size_t)16 * dim * sizeof(float) * 2 + 64);
                if (!scores || !wide) {
#pragma omp atomic write
                    failed = 1;
                    continue;
                }
                float *mixed = wide + 16 * dim;
                const T *asked = queries + i * stride + (kv * shared + from) * dim;
                for (int64_t j = 0; j < count * dim; j++) wide[j] = WIDE(asked[j]);
                memset(mixed, 0, count * dim * sizeof(float));
#if AMX
                int tiled = NAME(begin_tiles)(asked, count, lanes, dim, size);
#else
                int tiled = 0;
#endif
#if DOTS
                const T *padded = tiled ? NULL : NAME(pad_queries)(asked, count, lanes, dim);
#endif
                for (int64_t t = first; t < end;) {
                    int64_t offset = t % size, some = size - offset < end - t ? size - offset : end - t;
                    const T *keys = base + table[t / size] * block + offset * dim;
                    if (t / size + 2 < step->width) prefetch(base + table[t / size + 2] * block, page);
                    float *to = scores + (t - first) * lanes;
#if AMX
                    if (tiled)
                        NAME(tile_dots)(keys, some, dim, lanes, to);
                    else
#endif
#if DOTS
                    if (padded)
                        NAME(dot_scores)(keys, some, dim, padded, lanes, to);
                    else
#endif
                        NAME(dots)(keys, some, dim, wide, lanes, count, to);
                    t += some;
                }
#if AMX
                if (tiled) _tile_release();
#endif
                float sums[16], *seen = scores + (begin - first) * lanes;
                softmax(seen, end - begin, lanes, scale, cap, sums);
#if DOTS
                int pairs = padded && size % 2 == 0; /* of tokens of the same page */
                if (pairs) {
                    if (begin % 2) {
                        begin--, seen -= lanes;
                        memset(seen, 0, lanes * sizeof(float));
                    }
                    pair_weights(seen, end - begin, lanes);
                }
#endif
                for (int64_t t = begin; t < end;) {
                    int64_t offset = t % size, some = size - offset < end - t ? size - offset : end - t;
                    const T *values = base + table[t / size] * block + offset * dim + to_values;
                    if (t / size + 2 < step->width) prefetch(base + table[t / size + 2] * block + to_values, page);
#if DOTS
                    if (pairs)
                        NAME(mix_pairs)(values, some, dim, seen + (t - begin) / 2 * lanes, lanes, count, mixed);
                    else
#endif
                        NAME(mix)(values, some, dim, seen + (t - begin) * lanes, lanes, count, mixed);
                    t += some;
                }
                T *to = out + (i * step->heads + kv * shared + from) * dim;
                int64_t paired = dim - dim % 64;
                for (int64_t q = 0; q < count; q++)
                    for (int64_t j = 0; j < dim; j++) {
                        int64_t at = j < paired ? j - j % 32 + PLACE(j % 32) : j;
#if DOTS
                        if (pairs) at = j - j % 32 + place_pairs(j % 32);
#endif
                        to[q * dim + j] = NARROW(mixed[q * dim + at] / sums[q]);
                    }
            }
    return failed;
}
