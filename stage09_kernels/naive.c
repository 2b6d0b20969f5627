/* The kernels of a decoder, written the obvious way: one number at a time, in one thread.

   fast/ has the same functions and computes the same sums over the same memory, so a test runs both
   and compares. Read this file first: nothing in fast/ computes anything that is not here. */

#include "number.h"
#include "tiles.h"

#if CACHE != 1 /* otherwise a later stage's file has these */
/* Store the key and value of a token for each KV head. */
static void store_kv(const struct operation *o, int64_t token) {
    const struct attention *a = &o->of.attention;
    const struct share *s = share_of(o->pass, token);
    int64_t position = s->position + token - s->row, slot = position % a->block, D = a->head_dim;
    int64_t block = o->pass->tables[s->table + position / a->block];
    for (int64_t h = 0; h < a->heads; h++) {
        const real *k = a->k + token * a->k_stride + h * D;
        const real *v = a->v + token * a->v_stride + h * D;
        cached *key = keys_of(a, block, h) + slot * PAIR;
        cached *value = values_of(a, block, h) + slot * padded(D);
        for (int64_t d = 0; d < D + D % PAIR; d++) /* an odd channel is paired with 0 */
            store(key, d / PAIR * padded(a->block) * PAIR + d % PAIR, CACHE, d < D ? k[d] : 0);
        for (int64_t d = 0; d < D; d++) store(value, d, CACHE, v[d]);
    }
}

/* Attention of a token's query heads to the tokens up to its own. */
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
            const cached *key = keys_of(a, table[t / a->block], h / a->group) + t % a->block * PAIR;
            scores[t] = 0;
            for (int64_t d = 0; d < D; d++)
                scores[t] += as_cached(q[d] * (real)a->scale) *
                             load(key, d / PAIR * padded(a->block) * PAIR + d % PAIR, CACHE);
            max = scores[t] > max ? scores[t] : max;
        }
        for (int64_t t = 0; t <= position; t++) {
            const cached *values = values_of(a, table[t / a->block], h / a->group);
            real weight = exp(scores[t] - max);
            sum += weight;
            for (int64_t d = 0; d < D; d++)
                result[d] += as_cached(weight) * load(values, t % a->block * padded(D) + d, CACHE);
        }
        for (int64_t d = 0; d < D; d++)
            store(a->out, row * a->out_stride + h * D + d, WEIGHT, result[d] / sum);
    }
}
#endif

#if TILES && WEIGHT == 2
/* The same sum in the order of the processor's tile instruction (tiles.h). */
static real dot_of_tiles(const operand *x, const weight *column, int64_t inputs) {
    real sum = 0;
    for (int64_t first = 0; first < inputs; first += UNIT) {
        uint16_t a[UNIT] = {0}, b[UNIT] = {0};
        for (int64_t i = 0; i < UNIT && first + i < inputs; i++) {
            a[i] = x[first + i];
            b[i] = column[(first + i) / K_STEP * PANEL * K_STEP + i % K_STEP];
        }
        sum = tile_sum(sum, a, b);
    }
    return sum;
}
#endif

/* Output n of a row before the epilogue. */
static real dot(const struct linear *l, int64_t row, int64_t n) {
    real (*product)(const struct linear *, int64_t, int64_t) = l->product;
    if (product) return product(l, row, n);
    const operand *x = l->x + row * l->x_stride;
    const weight *column = l->weights + n / PANEL * padded_inputs(l->inputs) * PANEL +
                           n % PANEL * K_STEP;
#if TILES && WEIGHT == 2
    return dot_of_tiles(x, column, l->inputs) + (l->bias ? l->bias[n] : 0);
#endif
    real sum = l->bias ? l->bias[n] : 0;
    for (int64_t k = 0; k < l->inputs; k++)
        sum += load(x, k, WEIGHT) * load(column, k / K_STEP * PANEL * K_STEP + k % K_STEP, WEIGHT);
    return sum;
}

static real gelu(real x) {
    return (real)0.5 * x * (1 + tanh((real)0.7978845608028654 * (x + (real)0.044715 * x * x * x)));
}

static real silu_mul(real gate, real up) { return gate / (1 + exp(-gate)) * up; }

static void linear(const struct operation *o, int64_t row) {
    const struct linear *l = &o->of.linear;
    int64_t residual_row = l->residual_of_all ? o->pass->out_rows[row] : row;
    for (int64_t n = 0; n < l->outputs; n++) {
        int64_t gate = n / 32 * 64 + n % 32;
        real y = dot(l, row, l->epilogue == SILU_MUL ? gate : n);
        if (l->epilogue == SILU_MUL) y = silu_mul(y, dot(l, row, gate + 32));
        if (l->epilogue == GELU) y = gelu(y);
        if (l->residual) y += l->residual[residual_row * l->residual_stride + n];
        store(l->out, row * l->out_stride + n, l->out_is_operand ? WEIGHT : REAL, y);
    }
}

static void embed(const struct operation *o, int64_t row) {
    const struct embed *e = &o->of.embed;
    int64_t id = o->pass->ids[row], position = position_of(o->pass, row);
    void (*read_row)(const void *, int64_t, real *) = e->read_row;
    real *out = e->out + row * e->out_stride;
    if (read_row) read_row(e->format, id, out);
    for (int64_t i = 0; i < e->width; i++) {
        if (e->table) out[i] = load(e->table, id * e->width + i, WEIGHT);
        out[i] = as_weight(out[i]);
        if (e->positions)
            out[i] = as_weight(out[i] + load(e->positions, position * e->width + i, WEIGHT));
    }
}

static void norm(const struct operation *o, int64_t row) {
    const struct norm *n = &o->of.norm;
    for (int64_t h = 0; h < n->heads; h++) {
        const real *x = n->x + row * n->x_stride + h * n->width;
        int64_t out = row * n->out_stride + h * n->width;
        real mean = 0, square = 0;
        for (int64_t i = 0; n->centred && i < n->width; i++) mean += x[i] / n->width;
        for (int64_t i = 0; i < n->width; i++) square += (x[i] - mean) * (x[i] - mean) / n->width;
        for (int64_t i = 0; i < n->width; i++) {
            real y = (x[i] - mean) / sqrt(square + n->epsilon) * n->gain[i];
            if (n->bias) y += n->bias[i];
            store(n->out, out + i, n->out_is_operand ? WEIGHT : REAL, y);
        }
    }
}

static void rope(const struct operation *o, int64_t row) {
    const struct rope *r = &o->of.rope;
    int64_t half = r->head_dim / 2, place = position_of(o->pass, row) * half;
    const real *cosines = o->pass->cosines + place, *sines = o->pass->sines + place;
    for (int64_t h = 0; h < r->heads; h++)
        for (int64_t i = 0; i < half; i++) {
            real *x = r->x + row * r->x_stride + h * r->head_dim + i, a = x[0], b = x[half];
            x[0] = a * cosines[i] - b * sines[i];
            x[half] = b * cosines[i] + a * sines[i];
        }
}

/* Run `count` operations, one after the other. */
int step(struct operation *operations, int64_t count, const struct pass *p, void *threads) {
    (void)threads;
    for (struct operation *o = operations; o < operations + count; o++) {
        o->pass = p;
        if (o->kind == ATTEND) /* the tokens of a prompt read each other's keys and values */
            for (int64_t token = 0; token < p->n_rows; token++) store_kv(o, token);
        for (int64_t row = 0; row < rows_of(o); row++)
            if (o->kind == ATTEND) attend(o, row);
            else if (o->kind == LINEAR) linear(o, row);
            else if (o->kind == NORM) norm(o, row);
            else if (o->kind == EMBED) embed(o, row);
            else rope(o, row);
    }
    return 0;
}
