/* Attention over pages, norms, rotary positions and activations, for float32 and bfloat16. */
#include "common.h"

/* Weights exp(score - highest) in place over [tokens, lanes], and the sum of each lane; lanes: 1, 2, 4, 8, 16. */
static void softmax(float *scores, int64_t tokens, int64_t lanes, float scale, float cap, float *sums) {
    int64_t n = tokens * lanes, whole = n - n % 16;
    f16v high = spread(-INFINITY), total = {0};
    for (int64_t j = n; j < whole + 16; j++) scores[j] = -INFINITY; /* there is room */
    n = n > whole ? whole + 16 : whole;
    for (int64_t j = 0; j < n; j += 16) {
        f16v value = load16_f32(scores + j) * scale;
        if (cap > 0) value = cap * fast_tanh(value * (1.0f / cap));
        if (j == whole)
            for (int k = 0; k < 16; k++)
                if (j + k >= tokens * lanes) value[k] = -INFINITY;
        store16_f32(scores + j, value);
        high = larger(value, high);
    }
    for (int64_t k = 0; k < lanes; k++) {
        for (int64_t m = k + lanes; m < 16; m += lanes) high[k] = high[m] > high[k] ? high[m] : high[k];
        for (int64_t m = k + lanes; m < 16; m += lanes) high[m] = high[k];
    }
    for (int64_t j = 0; j < n; j += 16) {
        f16v weight = fast_exp(load16_f32(scores + j) - high);
        store16_f32(scores + j, weight);
        total += weight;
    }
    for (int64_t k = 0; k < lanes; k++) {
        sums[k] = total[k];
        for (int64_t m = k + lanes; m < 16; m += lanes) sums[k] += total[m];
    }
}

#if AMX
#include "amx.h"
#include "products.h"
#include "chunk.h"
#endif

#define T float
#define LOAD16 load16_f32
#define LOAD32 load32_f32
#define PLACE place_f32
#define STORE16 store16_f32
#define WIDE wide_f32
#define NARROW narrow_f32
#define NAME(name) name##_f32
#include "typed.h"
#undef T
#undef LOAD16
#undef LOAD32
#undef PLACE
#undef STORE16
#undef WIDE
#undef NARROW
#undef NAME

#define T bf16
#define LOAD16 load16_bf16
#define LOAD32 load32_bf16
#define PLACE place_bf16
#define STORE16 store16_bf16
#define WIDE wide_bf16
#define NARROW narrow_bf16
#define NAME(name) name##_bf16
#include "typed.h"

/* Of each row of [n, width] the largest number and the first place of it; not a number, where there is one. */
EXPORT void highest(const float *x, int64_t n, int64_t width, float *most, int64_t *place) {
#pragma omp parallel for schedule(static) if (n > 1)
    for (int64_t i = 0; i < n; i++) {
        const float *row = x + i * width;
        f16v high = spread(-INFINITY), strange = {0};
        int64_t j = 0;
        for (; j + 16 <= width; j += 16) {
            f16v value = load16_f32(row + j);
            high = larger(value, high);
            strange += value * 0.0f; /* 0, or not a number: of infinities too, which are looked at below */
        }
        float best = -INFINITY, sum = 0.0f;
        for (int k = 0; k < 16; k++) best = high[k] > best ? high[k] : best, sum += strange[k];
        for (; j < width; j++) best = row[j] > best ? row[j] : best, sum += row[j] * 0.0f;
        if (sum != sum) /* -inf is a number here: a constraint puts it where it forbids a token */
            for (j = 0; j < width; j++)
                if (row[j] != row[j]) best = NAN;
        most[i] = best;
        place[i] = 0;
        for (j = 0; j < width; j++)
            if (row[j] == best) {
                place[i] = j;
                break;
            }
    }
}

/* Whether the kernels for AMX are in and the system lets this process use it. */
EXPORT int32_t has_amx(void) {
#if AMX
    return allow_amx();
#else
    return 0;
#endif
}
