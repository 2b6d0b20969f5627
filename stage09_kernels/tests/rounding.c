/* Numbers rounded to bfloat16, as naive.c does it and as fast/ does it. */
#include "../number.h"
void one_by_one(uint16_t *out, const real *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) store(out, i, 2, x[i]);
}
#include "../fast/vec.h" /* whose `store` is another one */
void by_vectors(uint16_t *out, const real *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        store_bf16(out + i, load_partial(x + i, count - i, 0), count - i);
}
