/* Attention over a cache of codes, read in place: stage 09's kernels, with these functions where
   attention.c meets a cached number.

   A code becomes a float as it is read, which is exact, and is multiplied by the query, or by the
   softmax's weight, in one instruction. The scale is not needed there: a key's multiplies its score
   once, and a value's the weight. So a code costs one conversion more than a number, and half or a
   quarter of the bytes. */

#include "../../stage09_kernels/fast/vec.h"

#include "../codes.h"

typedef int8_t codes_vec __attribute__((vector_size(LANES), aligned(1)));
typedef uint16_t scales_vec __attribute__((vector_size(2 * LANES), aligned(1)));
typedef float floats_vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits_vec __attribute__((vector_size(4 * LANES)));

/* The codes at p as numbers. */
static inline vec load_cached(const cached *p) {
#if BYTES == 64 && REAL == 4 /* as below, which gcc 12 splits into many instructions */
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
#endif
    return __builtin_convertvector(*(const codes_vec *)p, vec);
}

/* Round D numbers to codes, with zeros up to a whole vector, and return their scale. */
static uint16_t quantize(const real *x, int64_t D, cached *codes) {
    const real magic = REAL == 4 ? 0x1.8p23 : 0x1.8p52; /* adding it rounds to whole numbers */
    const vec limit = (vec){0} + 127;
    vec top = {0}, check = {0};
    for (int64_t d = 0; d < D; d += LANES) {
        vec y = load_partial(x + d, D - d, 0);
        top = vmax(vmax(y, -y), top);
        check += y * 0; /* NaN for NaN and infinity */
    }
    uint16_t scale = scale_for(hmax(top, 0) + hsum(check));
    real s = scale_from(scale);
    for (int64_t d = 0; d < D; d += LANES) {
        vec y = (vec){0};
        if (s > 0) y = load_partial(x + d, D - d, 0) / s + magic - magic;
        y = vmax(vmin(y, limit), -limit);
        *(codes_vec *)(codes + d) = __builtin_convertvector(y, codes_vec);
    }
    return scale;
}

/* Store the keys and values of an item's tokens for one head. */
static void store_kv(const struct operation *o, const struct item *item, int64_t head) {
    const struct attention *a = &o->of.attention;
    const struct share *share = o->pass->shares + item->share;
    const int32_t *table = o->pass->tables + share->table;
    int64_t line = padded(a->block), D = a->head_dim;
    for (int64_t i = item->first; i < item->first + item->tokens; i++) {
        int64_t position = share->position + i, slot = position % a->block;
        cached *keys = keys_of(a, table[position / a->block], head), codes[MAX_HEAD_DIM];
        cached *value = values_of(a, table[position / a->block], head) + slot * padded(D);
        uint16_t *scales = scales_of(a, keys);
        scales[slot] = quantize(a->k + (share->row + i) * a->k_stride + head * D, D, codes);
        for (int64_t d = 0; d < D; d++) keys[d * line + slot] = codes[d];
        scales[line + slot] = quantize(a->v + (share->row + i) * a->v_stride + head * D, D, codes);
        memcpy(value, codes, D);
    }
}

static inline vec load_scales_at(const uint16_t *p) {
    bits_vec bits = __builtin_convertvector(*(const scales_vec *)p, bits_vec) << 16;
    return __builtin_convertvector((floats_vec)bits, vec);
}

/* The scales of a vector of keys, and of their values. */
static inline void load_scales(const struct attention *a, const cached *keys, int64_t slot,
                               real *of_keys, real *of_values) {
    const uint16_t *scales = scales_of(a, keys) + slot;
    *(vec *)of_keys = load_scales_at(scales);
    *(vec *)of_values = load_scales_at(scales + padded(a->block));
}

#include "../../stage09_kernels/fast/step.c"
