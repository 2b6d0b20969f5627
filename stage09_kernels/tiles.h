/* What a tile instruction (AMX) computes, one number at a time: for naive.c, and for tests of the
   loops in fast/ on processors without tiles, which compile them with EMULATE_TILES. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AMX_BF16__) || defined(EMULATE_TILES)
#define TILES 1
#else
#define TILES 0
#endif
#define UNIT 32 /* numbers in bfloat16 in a row of a tile */

/* bfloat16 as float32, and a sum in float32: numbers too small to be normal count as 0. */
static inline float tile_number(uint16_t x) {
    uint32_t bits = (uint32_t)(x & 0x7f80 ? x : x & 0x8000) << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}
static inline float tile_flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

/* `sum` plus the products of UNIT numbers in bfloat16: those at even places and those at odd ones
   are added up apart, from 0 on, each by a fused multiply-add, and then together to the sum. */
static inline float tile_sum(float sum, const uint16_t *x, const uint16_t *w) {
    float part[2] = {0, 0};
    for (int i = 0; i < UNIT; i++)
        part[i % 2] = tile_flushed(fmaf(tile_number(x[i]), tile_number(w[i]), part[i % 2]));
    return tile_flushed(sum + tile_flushed(part[0] + part[1]));
}
