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
#endif
#if DOTS
#include "dots.h"
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

/* log of positive normal numbers, by Cephes' polynomial: 2 ulp. */
INLINE f16v fast_log(f16v x) {
    u16v bits = (u16v)x - 0x3f3504f3; /* from the root of 1/2 on, so that what is left is near 1 */
    f16v n = __builtin_convertvector((i16v)bits >> 23, f16v);
    f16v r = (f16v)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f, square = r * r;
    f16v p = r * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * r + 1.1676998740e-1f;
    p = p * r - 1.2420140846e-1f;
    p = p * r + 1.4249322787e-1f;
    p = p * r - 1.6668057665e-1f;
    p = p * r + 2.0000714765e-1f;
    p = p * r - 2.4999993993e-1f;
    p = p * r + 3.3333331174e-1f;
    return n * 0.693359375f + (r - 0.5f * square + (p * r * square - n * 2.12194440e-4f));
}

INLINE u16v mix_bits(u16v bits) {
    bits = (bits ^ (bits >> 16)) * 0x21F0AAADu;
    bits = (bits ^ (bits >> 15)) * 0xD35A2D97u;
    return bits ^ (bits >> 15);
}

/* Column of the largest (x - best) / heat plus the noise of engine/noise.py, among those not below `least`.
   Most columns lie so far down that no noise could lift them: for those none is made. */
EXPORT int64_t draw(const float *x, int64_t width, float best, float heat, float least, int32_t key, int32_t other) {
    const float most_noise = 16.64f; /* -log(-log(1 - 2^-24)) */
    float top = -INFINITY;
    int64_t winner = 0;
    u16v count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t j = 0; j < width; j += 16) {
        f16v value;
        if (j + 16 <= width)
            value = load16_f32(x + j);
        else
            for (int k = 0; k < 16; k++) value[k] = j + k < width ? x[j + k] : -INFINITY;
        value = (value - best) / heat;
        float near = (top - most_noise) > least ? top - most_noise : least;
        i16v maybe = value >= near;
#if AVX512
        if (!_mm512_movepi32_mask((__m512i)maybe)) continue;
#else
        int some = 0;
        for (int k = 0; k < 16; k++) some |= maybe[k];
        if (!some) continue;
#endif
        u16v bits = mix_bits(((uint32_t)j + count) * 0x9E3779B1u + (uint32_t)key) ^ (uint32_t)other;
        f16v uniform = __builtin_convertvector((i16v)(mix_bits(bits) >> 9), f16v) + 0.5f;
        value -= fast_log(-fast_log(uniform * 0x1p-23f));
        for (int k = 0; k < 16; k++)
            if (maybe[k] && value[k] > top) top = value[k], winner = j + k;
    }
    return winner;
}

/* Whether products and attention of prompts are in. */
EXPORT int32_t has_products(void) { return DOTS; }

/* Whether they use matrix tiles: the processor has them, and the system lets this process use them. */
EXPORT int32_t has_amx(void) {
#if AMX
    return allow_amx();
#else
    return 0;
#endif
}
