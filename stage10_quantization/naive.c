/* Products with a matrix of whole numbers, one number at a time.

   Stage 09's naive.c calls `product` for each output of a layer in this format. fast/ computes the
   same numbers, to the last bit: sums of whole numbers are exact in any order, and what follows
   them has one order. */

#include "quantized.h"

/* x as it is stored: the compiler must not add the product before it is rounded (FMA). */
static float rounded(float x) {
    volatile float stored = x;
    return stored;
}

/* Output n of a row before the epilogue. */
real product(const struct linear *l, int64_t row, int64_t n) {
    const struct quantized *q = l->format;
    const int size = l->x_is_operand ? WEIGHT : REAL;
    const char *x = (const char *)l->x + row * l->x_stride * size;
    float y = 0;
    for (int64_t g = 0; g < q->count; g++, x += q->group * size) {
        const uint8_t *group = group_of(q, n / PANEL, g), *codes = codes_of(q, group);
        float largest = 0, scale = load_scale(q, group, n % PANEL), total = 0, sum = 0;
        for (int64_t k = 0; k < q->group; k++) {
            float magnitude = fabsf((float)load(x, k, size));
            if (magnitude > largest || isnan(magnitude)) largest = magnitude;
        }
        int usable = largest >= SMALLEST && isfinite(largest);
        if (q->floats) {
            for (int64_t k = 0; k < q->group; k++) {
                total += (float)load(x, k, size);
                sum += (float)load(x, k, size) * (float)code(q, codes, n % PANEL, k);
            }
        } else {
            int32_t whole_sum = 0, whole_total = 0;
            for (int64_t k = 0; k < q->group && usable; k++) {
                int32_t rounded_x = (int32_t)rintf((float)load(x, k, size) * (127 / largest));
                whole_total += rounded_x;
                whole_sum += rounded_x * code(q, codes, n % PANEL, k);
            }
            float x_scale = usable ? largest / 127 : isfinite(largest) ? 0 : NAN;
            sum = whole_sum;
            total = rounded(whole_total * x_scale);
            scale = rounded(scale * x_scale);
        }
        y += rounded(sum * scale);
        if (q->minimum)
            y += rounded(load_scale(q, group + PANEL * q->scale_bytes, n % PANEL) * total);
    }
    return l->bias ? y + (float)l->bias[n] : y; /* float32, also where the model is float64 */
}
