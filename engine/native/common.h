/* What all kernels share: a step's layout as Python hands it over, numbers and their conversions. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && \
    defined(__linux__)
#define AMX 1
#else
#define AMX 0
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define AVX512 1
#else
#define AVX512 0
#endif
/* Dot products of bf16 and int8 in 512 bits; whatever has tiles has them. */
#if AVX512 && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define DOTS 1
#else
#define DOTS 0
#endif

/* Bytes that weights are asked for ahead of their use, where few rows make memory the limit. */
#define AHEAD 4096

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

typedef uint16_t bf16;
typedef float f16v __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16v __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16v __attribute__((vector_size(64), aligned(4), may_alias));
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
INLINE void store16_f32(float *at, f16v values) { *(f16v *)at = values; }

INLINE f16v load16_bf16(const bf16 *at) {
#if AVX512 /* what gcc makes of the other line takes twice the instructions */
    return (f16v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16);
#else
    return (f16v)(__builtin_convertvector(*(const h16v *)at, u16v) << 16);
#endif
}

/* 32 numbers as two vectors, the cheapest way for the type: for bf16 even and odd ones. Number j of them is at
   `place` j of the two. */
INLINE void load32_f32(const float *at, f16v *first, f16v *second) {
    *first = load16_f32(at);
    *second = load16_f32(at + 16);
}
INLINE int64_t place_f32(int64_t j) { return j; }

INLINE void load32_bf16(const bf16 *at, f16v *first, f16v *second) {
    u16v both = *(const u16v *)at;
    *first = (f16v)(both << 16);
    *second = (f16v)(both & 0xffff0000u);
}
INLINE int64_t place_bf16(int64_t j) { return j % 2 * 16 + j / 2; }

INLINE void store16_bf16(bf16 *at, f16v values) {
#if DOTS
    _mm256_storeu_si256((__m256i *)at, (__m256i)_mm512_cvtneps_pbh((__m512)values));
#else
    u16v bits = (u16v)values;
    *(h16v *)at = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, h16v);
#endif
}

INLINE f16v spread(float value) { return value - (f16v){0}; }

INLINE f16v larger(f16v a, f16v b) {
#if AVX512
    return (f16v)_mm512_max_ps((__m512)a, (__m512)b);
#else
    u16v mask = (u16v)(a > b);
    return (f16v)(((u16v)a & mask) | ((u16v)b & ~mask));
#endif
}

INLINE f16v smaller(f16v a, f16v b) {
#if AVX512
    return (f16v)_mm512_min_ps((__m512)a, (__m512)b);
#else
    u16v mask = (u16v)(a < b);
    return (f16v)(((u16v)a & mask) | ((u16v)b & ~mask));
#endif
}

/* The nearest in [low, high]. Not a number stays one, as the second operand of both does. */
INLINE f16v within(float low, f16v x, float high) { return smaller(spread(high), larger(spread(low), x)); }

/* exp by Cody and Waite's reduction and Cephes' polynomial: 2 ulp; below -87 it is 1e-38, not 0. */
INLINE f16v fast_exp(f16v x) {
    x = within(-87.0f, x, 88.0f);
    f16v shifted = x * 1.44269504f + 12582912.0f;
    f16v n = shifted - 12582912.0f;
    f16v r = x - n * 0.693359375f + n * 2.12194440e-4f;
    f16v p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (f16v)(((u16v)shifted + 127) << 23);
}

/* (e^2x - 1) / (e^2x + 1), saturating. */
INLINE f16v fast_tanh(f16v x) {
    f16v e = fast_exp(2.0f * within(-15.0f, x, 15.0f));
    return (e - 1.0f) / (e + 1.0f);
}

INLINE f16v silu(f16v x) { return x / (1.0f + fast_exp(-x)); }

INLINE f16v gelu_tanh(f16v x) {
    return 0.5f * x * (1.0f + fast_tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

/* A page that is needed soon: pages lie scattered, so the processor cannot guess which. */
INLINE void prefetch(const void *at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)at + i, 0, 2);
}

/* Memory of this thread that grows and stays, so that steps do not fault pages in. NULL: there is none. */
#define SCRATCHES 7
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
