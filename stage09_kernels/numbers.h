/* Numbers of the kernels: one type to compute with, and what weights and caches are stored as.

   REAL, WEIGHT and CACHE are bytes: REAL 4 or 8, WEIGHT and CACHE 2 (bfloat16) or as REAL. A vector
   is one register of the processor: 64 bytes with AVX-512, 32 with AVX2, else 16. In memory rows
   are padded to 16 numbers, so that the layout is the same for all. Sums are made in the order that
   the source says: no -ffast-math, and the same bits for any number of threads. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define ROUND 16 /* numbers that a row in memory is padded to */
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
typedef real lanes __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real))));
typedef integer masks __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real))));
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2)));
typedef uint32_t wholes __attribute__((vector_size(LANES * 4), aligned(2))); /* also two bfloat16 */

typedef void (*body)(int64_t, int64_t, void *);
typedef int (*parallel_for)(int64_t, int64_t, int64_t, body, void *); /* PyTorch's own loop */

/* bfloat16 is the upper half of a float32. */
static inline lanes floats(wholes bits) {
#if REAL == 8
    typedef float singles __attribute__((vector_size(LANES * 4)));
    return __builtin_convertvector((singles)bits, lanes);
#else
    return (lanes)bits;
#endif
}

static inline lanes widen(const uint16_t *p) {
#if REAL == 4 && BYTES == 64 /* what the next line means, which gcc 12 takes for two halves */
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16);
#endif
    return floats(__builtin_convertvector(*(const halves *)p, wholes) << 16);
}

/* Rounded to nearest, ties to even; a NaN stays one. */
static inline uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* load_rows: two rows of LANES numbers, `row` from each other or, if PAIR is 2, in each other. */
#if CACHE == 2
#define PAIR 2
typedef uint16_t cached;
static inline void load_rows(const cached *p, int64_t row, lanes *a, lanes *b) {
    (void)row;
    wholes both = *(const wholes *)p;
    *a = floats(both << 16);
    *b = floats(both & 0xffff0000u);
}
static inline cached to_cached(real x) { return narrow((float)x); }
static inline lanes load_cached(const cached *p) { return widen(p); }
#else
#define PAIR 1
typedef real cached;
static inline void load_rows(const cached *p, int64_t row, lanes *a, lanes *b) {
    *a = *(const lanes *)p;
    *b = *(const lanes *)(p + row);
}
static inline cached to_cached(real x) { return x; }
static inline lanes load_cached(const cached *p) { return *(const lanes *)p; }
#endif

#if WEIGHT == 2
typedef uint16_t weight;
#else
typedef real weight;
#endif

static inline lanes choose(masks where, lanes yes, lanes no) {
    return (lanes)((where & (masks)yes) | (~where & (masks)no));
}

static inline int64_t padded(int64_t count) { return (count + ROUND - 1) / ROUND * ROUND; }

/* exp(x) for x <= 0, number by number; a NaN stays one. In float32 it is 0 below -87. */
static inline lanes exponential(lanes x) {
#if REAL == 8
    for (int i = 0; i < LANES; i++) x[i] = exp(x[i]);
    return x;
#else
    const float magic = 12582912.0f; /* 1.5 * 2^23: its last bits hold a rounded integer */
    const lanes least = (lanes){0} - 87.0f;
    lanes bounded = choose(x < least, least, x);
    lanes turns = bounded * 1.44269504f + magic, n = turns - magic;
    lanes r = bounded - n * 0.693359375f + n * 2.12194440e-4f; /* bounded - n * ln 2 */
    lanes y = (lanes){0} + 1.9875691500e-4f; /* the polynomial of Cephes' expf */
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    lanes power = (lanes)(((masks)turns + 127) << 23); /* 2^n */
    return choose(x < least, (lanes){0}, y * power);
#endif
}

/* 1 / (1 + exp(-x)), number by number. */
static inline lanes sigmoid(lanes x) {
    const lanes zero = {0};
    lanes e = exponential(choose(x > zero, -x, x));
    return choose(x > zero, zero + 1, e) / (e + 1);
}
