/* Vectors of numbers: one processor register, 64 bytes with AVX-512, 32 with AVX2, otherwise 16.

   gcc and clang map the types below to whatever registers the processor has; intrinsics stand only
   where gcc compiles several instructions for one. Sums are added in the order that the source
   gives (no -ffast-math), so any number of threads produces the same bits. */

#pragma once

#include "../number.h" /* before its `store` becomes that of vectors */

#include <math.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES (BYTES / REAL) /* numbers in a vector */

#if REAL == 8
typedef int64_t integer;
#else
typedef int32_t integer;
#endif
typedef real vec __attribute__((vector_size(BYTES), aligned(sizeof(real))));
typedef integer mask __attribute__((vector_size(BYTES), aligned(sizeof(real))));

static inline vec blend(mask where, vec yes, vec no) {
    return (vec)((where & (mask)yes) | (~where & (mask)no));
}

static inline vec vmax(vec a, vec b) { return blend(a > b, a, b); }
static inline vec vmin(vec a, vec b) { return blend(a < b, a, b); }

static inline real hsum(vec x) { /* in halves */
#if BYTES == 64 && REAL == 4
    return _mm512_reduce_add_ps((__m512)x);
#endif
    for (int half = LANES / 2; half; half /= 2)
        for (int t = 0; t < half; t++) x[t] += x[t + half];
    return x[0];
}

static inline real hmax(vec x, real max) { /* the largest of x and max */
#if BYTES == 64 && REAL == 4
    const real top = _mm512_reduce_max_ps((__m512)x);
    return top > max ? top : max;
#endif
    for (int t = 0; t < LANES; t++) max = x[t] > max ? x[t] : max;
    return max;
}

/* The vector at p: its first `left` numbers, and `rest` in place of the others. */
static inline vec load_partial(const real *p, int64_t left, real rest) {
    if (left >= LANES) return *(const vec *)p;
    vec x = (vec){0} + rest;
    if (left > 0) memcpy(&x, p, left * sizeof(real));
    return x;
}

/* Store the first `left` numbers of x. */
static inline void store_real(real *p, vec x, int64_t left) {
    if (left >= LANES) *(vec *)p = x;
    else memcpy(p, &x, left * sizeof(real));
}

/* Store the numbers of x where `which` is set, without gaps; returns how many. There must be
   room for all of x. */
static inline int64_t compress(real *p, vec x, mask which) {
#if BYTES == 64 && REAL == 4
    __mmask16 bits = _mm512_test_epi32_mask((__m512i)which, (__m512i)which);
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(bits, (__m512)x));
    return __builtin_popcount(bits);
#endif
    int64_t stored = 0;
    for (int t = 0; t < LANES; t++) p[stored] = x[t], stored -= which[t];
    return stored;
}

static inline vec madd_real(vec sum, vec a, real b) { return sum + a * b; }

#if REAL == 4
/* bfloat16 is the upper half of a float32. Numbers to multiply in bfloat16 lie in pairs: each place
   of a vector holds two of them, as the instruction for bfloat16 products expects. */
typedef uint32_t pairs __attribute__((vector_size(BYTES), aligned(2)));
typedef uint16_t halves __attribute__((vector_size(BYTES / 2), aligned(2)));

/* Store x rounded to nearest, ties to even; NaN stays NaN. */
static inline void store_bf16(uint16_t *p, vec x, int64_t left) {
    pairs bits = (pairs)x, nan = (pairs)(x != x);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    halves y = __builtin_convertvector((nan & 0x7fc0) | (~nan & bits), halves);
    if (left >= LANES) *(halves *)p = y;
    else memcpy(p, &y, left * sizeof(uint16_t));
}

/* The same for numbers that `madd_pairs` will read: subnormal ones may become 0. */
static inline void store_bf16_operand(uint16_t *p, vec x, int64_t left) {
#if defined(__AVX512BF16__)
    halves y = (halves)_mm512_cvtneps_pbh((__m512)x);
    if (left >= LANES) *(halves *)p = y;
    else memcpy(p, &y, left * sizeof(uint16_t));
#else
    store_bf16(p, x, left);
#endif
}

/* The LANES numbers at p, in the lower halves of a vector's places. */
static inline pairs load_low(const uint16_t *p) {
#if BYTES == 64 /* as the return below, which gcc 12 splits into two halves */
    return (pairs)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
#endif
    return __builtin_convertvector(*(const halves *)p, pairs);
}

/* `sum` plus both products of each pair. The instruction treats subnormal numbers as 0.
   Gain: bfloat16 1.80x. */
static inline vec madd_pairs(vec sum, pairs a, uint32_t b) {
    pairs both = (pairs){0} + b;
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)both);
#endif
    sum += (vec)(a << 16) * (vec)(both << 16);
    return sum + (vec)(a & 0xffff0000u) * (vec)(both & 0xffff0000u);
}

/* Chosen by the type that is stored or multiplied: bfloat16 or real. */
#define store(p, x, left) _Generic((p), real *: store_real, uint16_t *: store_bf16)(p, x, left)
#define store_operand(p, x, left) \
    _Generic((p), real *: store_real, uint16_t *: store_bf16_operand)(p, x, left)
#define madd(sum, a, b) _Generic((b), real: madd_real, uint32_t: madd_pairs)(sum, a, b)
#else
#define store store_real
#define store_operand store_real
#define madd madd_real
#endif

/* Vectors of weights and of cached numbers, and the factors that multiply these. */
#if WEIGHT == 2 && defined(__AVX512BF16__)
typedef pairs weight_vec;
typedef uint32_t weight_factor;
#else
typedef vec weight_vec;
typedef real weight_factor;
#endif
#if CACHE == 2
typedef pairs cached_vec;
typedef uint32_t cached_factor;
#else
typedef vec cached_vec;
typedef real cached_factor;
#endif

/* exp(x) for x <= 87, number by number; NaN stays NaN. In float32 the result is 0 below -87. */
static inline vec vexp(vec x) {
#if REAL == 8
    for (int i = 0; i < LANES; i++) x[i] = exp(x[i]);
    return x;
#else
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds, into the last bits */
    vec turns = x * 1.44269504f + magic, n = turns - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f; /* x - n * ln 2 */
    vec y = (vec){0} + 1.9875691500e-4f; /* the polynomial of Cephes' expf */
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    y *= (vec)(((mask)turns + 127) << 23); /* 2^n */
    return (vec)((mask)y & ~(x < -87.0f));
#endif
}

/* x / (1 + exp(-y)), number by number. */
static inline vec mul_sigmoid(vec x, vec y) {
    const vec limit = (vec){0} + 87;
    return x / (1 + vexp(vmin(limit, -y)));
}

static inline vec gelu(vec x) { /* 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)) */
    return mul_sigmoid(x, x * (real)1.5957691216057308 * ((real)0.044715 * x * x + 1));
}

static inline vec silu_mul(vec gate, vec up) { return mul_sigmoid(gate * up, gate); }
