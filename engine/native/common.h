/* What all kernels share: a step's layout as Python hands it over, numbers and their conversions. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && \
    defined(__linux__)
#include <immintrin.h>
#define AMX 1
#else
#define AMX 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

typedef uint16_t bf16;
typedef float f16v __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16v __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t h16v __attribute__((vector_size(32), aligned(2), may_alias));

/* Mirrors `Step` of library.py: the same fields in the same order. */
typedef struct {
    char *pool;             /* of block 0 */
    const int32_t *tables;  /* [sequences, width] */
    const int32_t *lengths; /* [sequences] */
    const int32_t *starts;  /* [sequences + 1] */
    const int64_t *slots;   /* [rows] */
    int64_t block_bytes;
    int64_t layer_bytes;
    int32_t width;
    int32_t sequences;
    int32_t decodes;
    int32_t rows;
    int32_t heads;
    int32_t kv_heads;
    int32_t dim;
    int32_t block_size;
} Step;

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float wide_bf16(bf16 value) { return from_bits((uint32_t)value << 16); }

/* To the nearest, ties to even. */
INLINE bf16 narrow_bf16(float value) {
    uint32_t bits = to_bits(value);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float wide_f32(float value) { return value; }
INLINE float narrow_f32(float value) { return value; }

INLINE f16v load16_f32(const float *at) { return *(const f16v *)at; }

INLINE f16v load16_bf16(const bf16 *at) {
    return (f16v)(__builtin_convertvector(*(const h16v *)at, u16v) << 16);
}

/* exp by Cody and Waite's reduction and Cephes' polynomial: 2 ulp; below -87 it is 1e-38, not 0. */
INLINE float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * from_bits((to_bits(shifted) + 127) << 23);
}

/* (e^2x - 1) / (e^2x + 1), saturating. */
INLINE float fast_tanh(float x) {
    x = x > 15.0f ? 15.0f : x < -15.0f ? -15.0f : x;
    float e = fast_exp(2.0f * x);
    return (e - 1.0f) / (e + 1.0f);
}

/* Memory of this thread that grows and stays, so that steps do not fault pages in. NULL: there is none. */
#define SCRATCHES 6
INLINE void *scratch(int which, size_t bytes) {
    static __thread void *kept[SCRATCHES];
    static __thread size_t sizes[SCRATCHES];
    if (sizes[which] < bytes) {
        free(kept[which]);
        size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        kept[which] = aligned_alloc(4096, size);
        sizes[which] = kept[which] ? size : 0;
    }
    return kept[which];
}
