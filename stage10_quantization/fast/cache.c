/* Attention over a cache of codes, read in place: stage 09's kernels, with these functions where
   attention.c meets a cached number.

   A code becomes a float as it is read, which is exact, and is multiplied by the query, or by the
   softmax's weight, in one instruction. The scale is not needed there: a key's multiplies its score
   once, and a value's the weight. So a code costs one conversion more than a number, and half or a
   quarter of the bytes. */

#include "../../stage09_kernels/fast/vec.h"

#include "../codes.h"

typedef int8_t codes_vec __attribute__((vector_size(LANES), aligned(1)));

/* The codes at p as numbers. */
static inline vec load_cached(const cached *p) {
#if BYTES == 64 && REAL == 4 /* as below, which gcc 12 splits into many instructions */
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
#endif
    return __builtin_convertvector(*(const codes_vec *)p, vec);
}

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
    for (int64_t i = item->first; i < item->first + item->tokens; i++) {
        int64_t position = share->position + i, place = head * a->head_dim, row = share->row + i;
        int64_t block = o->pass->tables[share->table + position / a->block];
        store_codes(a, block, position % a->block, head, a->k + row * a->k_stride + place,
                    a->v + row * a->v_stride + place);
    }
}

/* The scales of a vector of keys, and of their values. */
static inline void load_scales(const struct attention *a, const cached *keys, int64_t slot,
                               real *of_keys, real *of_values) {
    const uint16_t *scales = scales_of(a, keys) + slot;
    for (int t = 0; t < LANES; t++) of_keys[t] = scale_from(scales[t]);
    for (int t = 0; t < LANES; t++) of_values[t] = scale_from(scales[padded(a->block) + t]);
}

#include "../../stage09_kernels/fast/step.c"
