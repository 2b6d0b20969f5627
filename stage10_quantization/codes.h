/* Keys and values in a cache of codes: whole numbers from -127 to 127, with a scale for each token
   and head, one for its key and one for its value.

   A head of a block has its keys and values as in stage 09, a byte for each number, and behind them
   the scales of its keys and then those of its values: (2, padded block) in bfloat16. So a
   block's scales are part of its bytes: what copies, swaps or poisons these has the scales, too. */

#pragma once

#include "../stage09_kernels/number.h"

#include <string.h>

/* The scales of a head's keys; those of its values follow, `padded(a->block)` further on. */
static inline uint16_t *scales_of(const struct attention *a, const cached *keys) {
    return (uint16_t *)(keys + (values_of(a, 0, 0) - keys_of(a, 0, 0)) +
                        a->block * padded(a->head_dim));
}

/* The scale of a vector whose largest size is this, rounded to bfloat16, ties to even. NaN for what
   is not finite, so that it shows. */
static inline uint16_t scale_for(real largest) {
    uint32_t bits = (union word){(float)(largest / 127)}.bits;
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return bits < 0x7f80 ? bits : 0x7fc0;
}

static inline real scale_from(uint16_t scale) { return load(&scale, 0, 2); }

/* Round D numbers to codes, perhaps with zeros up to a whole vector, and return their scale. */
static uint16_t quantize(const real *x, int64_t D, cached *codes);

/* Store the key k and the value v of a token for one head, in a slot of a block. */
static void store_codes(const struct attention *a, int64_t block, int64_t slot, int64_t head,
                        const real *k, const real *v) {
    int64_t line = padded(a->block), D = a->head_dim;
    cached *keys = keys_of(a, block, head), codes[MAX_HEAD_DIM];
    uint16_t *scales = scales_of(a, keys);
    scales[slot] = quantize(k, D, codes);
    for (int64_t d = 0; d < D; d++) keys[d * line + slot] = codes[d];
    scales[line + slot] = quantize(v, D, codes);
    memcpy(values_of(a, block, head) + slot * padded(D), codes, D);
}
