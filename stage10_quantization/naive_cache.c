/* Attention over a cache of codes, one number at a time: stage 09's naive.c with these functions in
   the place of its own. fast/cache.c computes the same numbers. */

#include "codes.h"

/* The scale is rounded first: a code is the number over the scale that readers will multiply by. */
static uint16_t quantize(const real *x, int64_t D, cached *codes) {
    real largest = 0;
    for (int64_t d = 0; d < D; d++) /* once NaN, it stays NaN */
        if (!(fabs(x[d]) <= largest) && !isnan(largest)) largest = fabs(x[d]);
    uint16_t scale = scale_for(largest);
    real s = scale_from(scale);
    for (int64_t d = 0; d < D; d++) {
        real code = s > 0 ? rint(x[d] / s) : 0; /* 0 for a scale of 0 or NaN */
        codes[d] = code > 127 ? 127 : code < -127 ? -127 : code;
    }
    return scale;
}

static void store_kv(const struct operation *o, int64_t token) {
    const struct attention *a = &o->of.attention;
    const struct share *s = share_of(o->pass, token);
    int64_t position = s->position + token - s->row, D = a->head_dim;
    int64_t block = o->pass->tables[s->table + position / a->block];
    for (int64_t h = 0; h < a->heads; h++)
        store_codes(a, block, position % a->block, h, a->k + token * a->k_stride + h * D,
                    a->v + token * a->v_stride + h * D);
}

static void attend(const struct operation *o, int64_t row) {
    const struct attention *a = &o->of.attention;
    int64_t token = o->rows == ALL_ROWS ? row : o->pass->out_rows[row], D = a->head_dim;
    const struct share *s = share_of(o->pass, token);
    const int32_t *table = o->pass->tables + s->table;
    int64_t position = s->position + token - s->row;
    for (int64_t h = 0; h < a->heads * a->group; h++) {
        const real *q = a->q + token * a->q_stride + h * D;
        real scores[position + 1], result[MAX_HEAD_DIM] = {0}, max = -INFINITY, sum = 0;
        for (int64_t t = 0; t <= position; t++) {
            const cached *keys = keys_of(a, table[t / a->block], h / a->group);
            real score = 0;
            for (int64_t d = 0; d < D; d++)
                score += q[d] * (real)a->scale * keys[d * padded(a->block) + t % a->block];
            scores[t] = score * scale_from(scales_of(a, keys)[t % a->block]);
            max = scores[t] > max ? scores[t] : max;
        }
        for (int64_t t = 0; t <= position; t++) {
            const cached *keys = keys_of(a, table[t / a->block], h / a->group);
            const cached *values = values_of(a, table[t / a->block], h / a->group);
            real weight = exp(scores[t] - max);
            sum += weight;
            weight *= scale_from(scales_of(a, keys)[padded(a->block) + t % a->block]);
            for (int64_t d = 0; d < D; d++)
                result[d] += weight * values[t % a->block * padded(D) + d];
        }
        for (int64_t d = 0; d < D; d++)
            store(a->out, row * a->out_stride + h * D + d, WEIGHT, result[d] / sum);
    }
}

#include "../stage09_kernels/naive.c"
