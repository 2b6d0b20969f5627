/* Number types of the kernels: one to compute with, and those of stored weights and caches.

   REAL, WEIGHT and CACHE are sizes in bytes. REAL is 4 or 8; WEIGHT and CACHE equal REAL, or are 2
   for bfloat16 if REAL is 4. A vector is one processor register: 64 bytes with AVX-512, 32 with
   AVX2, otherwise 16. In memory, rows are padded to 16 numbers, so the layout is the same for all
   of them. Sums are added in the order that the source gives (no -ffast-math), so any number of
   threads produces the same bits. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define ROUND 16 /* rows in memory are padded to a multiple of it */
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES (BYTES / REAL) /* numbers in a vector */

#if REAL == 8
typedef double real;
typedef int64_t integer;
#else
typedef float real;
typedef int32_t integer;
#endif
typedef real lanes __attribute__((vector_size(BYTES), aligned(sizeof(real))));
typedef integer masks __attribute__((vector_size(BYTES), aligned(sizeof(real))));

static inline lanes choose(masks where, lanes yes, lanes no) {
    return (lanes)((where & (masks)yes) | (~where & (masks)no));
}

/* a > b ? a : b, and a < b ? a : b, number by number. For AVX-512, gcc compiles
   `choose` to four instructions where one is enough. */
static inline lanes larger(lanes a, lanes b) {
#if BYTES == 64 && REAL == 4
    return (lanes)_mm512_max_ps((__m512)a, (__m512)b);
#endif
    return choose(a > b, a, b);
}
static inline lanes smaller(lanes a, lanes b) {
#if BYTES == 64 && REAL == 4
    return (lanes)_mm512_min_ps((__m512)a, (__m512)b);
#endif
    return choose(a < b, a, b);
}

static inline int64_t padded(int64_t count) { return (count + ROUND - 1) / ROUND * ROUND; }

/* The vector at p: its first `left` numbers, and `rest` in place of the others. */
static inline lanes some(const real *p, int64_t left, real rest) {
    if (left >= LANES) return *(const lanes *)p;
    lanes x = (lanes){0} + rest;
    if (left > 0) memcpy(&x, p, left * sizeof(real));
    return x;
}

static inline void put_reals(real *p, lanes x, int64_t left) {
    if (left >= LANES) *(lanes *)p = x;
    else memcpy(p, &x, left * sizeof(real));
}

/* Store the numbers of x where `which` is set, without gaps; returns how many. All of x must fit. */
static inline int64_t compress(real *p, lanes x, masks which) {
#if BYTES == 64 && REAL == 4
    __mmask16 bits = _mm512_test_epi32_mask((__m512i)which, (__m512i)which);
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(bits, (__m512)x));
    return __builtin_popcount(bits);
#endif
    int64_t put = 0;
    for (int t = 0; t < LANES; t++) p[put] = x[t], put -= which[t];
    return put;
}

static inline lanes add_reals(lanes sum, lanes a, real b) { return sum + a * b; }

#if REAL == 4
/* bfloat16 is the upper half of a float32. Numbers to multiply in bfloat16 lie in pairs: each place
   of a vector holds two of them, as the instruction for bfloat16 products expects. */
typedef uint32_t pairs __attribute__((vector_size(BYTES), aligned(2)));
typedef uint16_t halves __attribute__((vector_size(BYTES / 2), aligned(2)));

/* Store x rounded to nearest, ties to even; NaN stays NaN. */
static inline void put_halves(uint16_t *p, lanes x, int64_t left) {
    pairs bits = (pairs)x, wrong = (pairs)(x != x);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    halves y = __builtin_convertvector((wrong & 0x7fc0) | (~wrong & bits), halves);
    if (left >= LANES) *(halves *)p = y;
    else memcpy(p, &y, left * sizeof(uint16_t));
}

/* The same for numbers that `add_pairs` will read: subnormal ones may become 0. */
static inline void put_factors(uint16_t *p, lanes x, int64_t left) {
#if defined(__AVX512BF16__)
    halves y = (halves)_mm512_cvtneps_pbh((__m512)x);
    if (left >= LANES) *(halves *)p = y;
    else memcpy(p, &y, left * sizeof(uint16_t));
#else
    put_halves(p, x, left);
#endif
}

/* The LANES numbers at p, in the lower halves of a vector's places. */
static inline pairs lower(const uint16_t *p) {
#if BYTES == 64 /* as the return below, which gcc 12 splits into two halves */
    return (pairs)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
#endif
    return __builtin_convertvector(*(const halves *)p, pairs);
}

/* `sum` plus both products of each pair. The instruction treats subnormal numbers as 0. */
static inline lanes add_pairs(lanes sum, pairs a, uint32_t b) {
    pairs both = (pairs){0} + b;
#if defined(__AVX512BF16__)
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)both);
#endif
    sum += (lanes)(a << 16) * (lanes)(both << 16);
    return sum + (lanes)(a & 0xffff0000u) * (lanes)(both & 0xffff0000u);
}

/* Chosen by the type that is stored or multiplied: bfloat16 or real. */
#define put(p, x, left) _Generic((p), real *: put_reals, uint16_t *: put_halves)(p, x, left)
#define feed(p, x, left) _Generic((p), real *: put_reals, uint16_t *: put_factors)(p, x, left)
#define add(sum, a, b) _Generic((b), real: add_reals, uint32_t: add_pairs)(sum, a, b)
#else
#define put put_reals
#define feed put_reals
#define add add_reals
#endif

/* Types of weights, of a product's input and of cached numbers; of the vectors of them that are
   multiplied, and of the factors that multiply these. */
#if WEIGHT == 2
typedef uint16_t weight, input;
typedef pairs weight_lanes;
typedef uint32_t weight_factor;
#else
typedef real weight, input, weight_factor;
typedef lanes weight_lanes;
#endif
#if CACHE == 2
typedef uint16_t cached;
typedef pairs cached_lanes;
typedef uint32_t cached_factor;
#else
typedef real cached, cached_factor;
typedef lanes cached_lanes;
#endif

/* exp(x) for x <= 87, number by number; NaN stays NaN. In float32 the result is 0 below -87. */
static inline lanes exponential(lanes x) {
#if REAL == 8
    for (int i = 0; i < LANES; i++) x[i] = exp(x[i]);
    return x;
#else
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds, into the last bits */
    lanes turns = x * 1.44269504f + magic, n = turns - magic;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f; /* x - n * ln 2 */
    lanes y = (lanes){0} + 1.9875691500e-4f; /* the polynomial of Cephes' expf */
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    y *= (lanes)(((masks)turns + 127) << 23); /* 2^n */
#if BYTES == 64
    __mmask16 low = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87), _CMP_LT_OQ);
    return (lanes)_mm512_maskz_mov_ps(~low, (__m512)y);
#endif
    return (lanes)((masks)y & ~(x < -87.0f));
#endif
}

/* x / (1 + exp(-y)), number by number. */
static inline lanes opened(lanes x, lanes y) {
    const lanes most = (lanes){0} + 87;
    return x / (1 + exponential(smaller(most, -y)));
}
