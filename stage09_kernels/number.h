/* One number in memory, as naive.c and fast/step.c read and write it: real, or bfloat16, which is
   the upper half of a float32. `size` is REAL, WEIGHT or CACHE: the bytes that a number takes. */

#pragma once

#include "operations.h"

#include <math.h>

union word {
    float number;
    uint32_t bits;
};

/* Number i of those at p. */
static inline real load(const void *p, int64_t i, int size) {
    if (size != 2) return ((const real *)p)[i];
    return (union word){.bits = (uint32_t)((const uint16_t *)p)[i] << 16}.number;
}

/* bfloat16 is rounded to nearest, ties to even; NaN stays NaN. */
static inline void store(void *p, int64_t i, int size, real x) {
    uint32_t bits = (union word){x}.bits;
    if (size != 2) ((real *)p)[i] = x;
    else ((uint16_t *)p)[i] = isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* x with the digits of a weight. */
static inline real as_weight(real x) {
    weight y;
    store(&y, 0, WEIGHT, x);
    return load(&y, 0, WEIGHT);
}

/* x as it comes back from the cache. */
static inline real as_cached(real x) {
    cached y;
    store(&y, 0, CACHE, x);
    return load(&y, 0, CACHE);
}
