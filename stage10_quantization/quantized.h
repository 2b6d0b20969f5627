/* A matrix of whole numbers as kernels read it (kernels.py lays it out), and x as they round it.

   A panel holds 64 outputs, one group of inputs after the other. A group has its 64 scales, its 64
   minimums if there are any, and its codes, with 4 inputs of an output side by side: (steps, 64, 4)
   bytes. With 4 bits a byte holds two codes: (steps / 2, 64, 4), input k of 8 in the lower half and
   k + 4 in the upper. Codes are stored without a sign, `offset` above their value. */

#pragma once

#include "../stage09_kernels/number.h"

#define SMALLEST 0x1p-119f /* a group of x with smaller numbers alone has codes of 0 */

struct group { /* of a row of x */
    float scale, total; /* total: of the numbers that the codes stand for */
    int32_t sum;        /* of the codes */
};

struct quantized {
    const uint8_t *panels;
    int64_t row_bytes;    /* of a row of x in `scratch`: its codes, or floats, and its groups */
    int64_t count, group; /* groups, and inputs in one */
    int64_t bits, offset; /* bits: 4 or 8 */
    int64_t scale_bytes;  /* 2: float16, or 4 */
    int64_t minimum;      /* whether there are minimums */
    int64_t floats;       /* x is not rounded */
};

/* Steps of 4 inputs in a group, which is padded with zeros to a multiple of 8. */
static inline int64_t steps_of(const struct quantized *q) { return (q->group + 7) / 8 * 2; }

/* What is known of a row of x. */
static inline int8_t *x_codes(const struct linear *l, int64_t row) {
    return (int8_t *)l->scratch + row * ((const struct quantized *)l->format)->row_bytes;
}
static inline struct group *x_groups(const struct linear *l, int64_t row) { /* at its end */
    return (struct group *)x_codes(l, row + 1) - ((const struct quantized *)l->format)->count;
}

/* Group g of a panel. */
static inline const uint8_t *group_of(const struct quantized *q, int64_t panel, int64_t g) {
    int64_t codes = steps_of(q) * q->bits / 2, scales = (1 + q->minimum) * q->scale_bytes;
    return q->panels + (panel * q->count + g) * PANEL * (codes + scales);
}

static inline const uint8_t *codes_of(const struct quantized *q, const uint8_t *group) {
    return group + (1 + q->minimum) * q->scale_bytes * PANEL;
}

/* Scale or minimum i of those at p, float32 or float16. */
static inline float load_scale(const struct quantized *q, const uint8_t *p, int64_t i) {
    if (q->scale_bytes == 4) return ((const float *)p)[i];
    uint32_t half = ((const uint16_t *)p)[i];
    float size = (union word){.bits = (half & 0x7fff) << 13}.number * 0x1p112f;
    return half >> 15 ? -size : size;
}

/* The code of output n for input k of a group. */
static inline int32_t code(const struct quantized *q, const uint8_t *codes, int64_t n, int64_t k) {
    if (q->bits == 8) return codes[k / 4 * PANEL * 4 + n * 4 + k % 4] - (int32_t)q->offset;
    int32_t two = codes[k / 8 * PANEL * 4 + n * 4 + k % 4];
    return (k % 8 < 4 ? two & 15 : two >> 4) - (int32_t)q->offset;
}

/* Row n of a table of embeddings: what it stands for, in the float32 of `dequantized`. */
void read_row(const struct quantized *q, int64_t n, real *out) {
    for (int64_t g = 0; g < q->count; g++) {
        const uint8_t *group = group_of(q, n / PANEL, g), *codes = codes_of(q, group);
        const float scale = load_scale(q, group, n % PANEL);
        for (int64_t k = 0; k < q->group; k++) {
            volatile float x = scale * (float)code(q, codes, n % PANEL, k); /* rounded: no FMA */
            if (q->minimum) x += load_scale(q, group + PANEL * q->scale_bytes, n % PANEL);
            *out++ = x;
        }
    }
}
