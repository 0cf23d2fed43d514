/* Attention over pages, norms, rotary positions and activations, for float32 and bfloat16. */
#include "common.h"

/* Weights exp(score - highest) in place over [tokens, lanes], and the sum of each lane; lanes: 1, 2, 4, 8, 16. */
static void softmax(float *scores, int64_t tokens, int64_t lanes, float scale, float cap, float *sums) {
    int64_t n = tokens * lanes, j = 0;
    float high[16], total[16] = {0};
    for (int k = 0; k < 16; k++) high[k] = -INFINITY;
    if (cap > 0)
        for (int64_t i = 0; i < n; i++) scores[i] = cap * fast_tanh(scores[i] * scale / cap);
    else
        for (int64_t i = 0; i < n; i++) scores[i] *= scale;
    for (; j + 16 <= n; j += 16)
        for (int k = 0; k < 16; k++) high[k] = scores[j + k] > high[k] ? scores[j + k] : high[k];
    for (int k = 0; j + k < n; k++) high[k] = scores[j + k] > high[k] ? scores[j + k] : high[k];
    for (int k = 0; k < lanes; k++) {
        for (int m = k + lanes; m < 16; m += lanes) high[k] = high[m] > high[k] ? high[m] : high[k];
    }
    for (int k = lanes; k < 16; k++) high[k] = high[k - lanes];
    for (j = 0; j + 16 <= n; j += 16)
        for (int k = 0; k < 16; k++) {
            float weight = fast_exp(scores[j + k] - high[k]);
            scores[j + k] = weight;
            total[k] += weight;
        }
    for (int k = 0; j + k < n; k++) total[k] += scores[j + k] = fast_exp(scores[j + k] - high[k]);
    for (int k = 0; k < lanes; k++) {
        sums[k] = total[k];
        for (int m = k + lanes; m < 16; m += lanes) sums[k] += total[m];
    }
}

#if AMX
#include "amx.h"
#endif

#define T float
#define LOAD16 load16_f32
#define WIDE wide_f32
#define NARROW narrow_f32
#define NAME(name) name##_f32
#include "typed.h"
#undef T
#undef LOAD16
#undef WIDE
#undef NARROW
#undef NAME

#define T bf16
#define LOAD16 load16_bf16
#define WIDE wide_bf16
#define NARROW narrow_bf16
#define NAME(name) name##_bf16
#include "typed.h"

/* Whether the kernels for AMX are in and the system lets this process use it. */
EXPORT int32_t has_amx(void) {
#if AMX
    return allow_amx();
#else
    return 0;
#endif
}
