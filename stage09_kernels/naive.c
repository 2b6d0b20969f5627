/* The kernels of a decoder, written the obvious way: one number at a time, in one thread.

   fast/ has the same functions and computes the same sums over the same memory, so a test runs both
   and compares. Read this file first: nothing in fast/ computes anything that is not here. */

#include "operations.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* bfloat16 is the upper half of a float32. */
static real widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

static uint16_t narrow(float x) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static real same(real x) { return x; }

/* A number at p, of either type. */
#define load(p) _Generic(*(p), uint16_t: widen, default: same)(*(p))
#define store(p, x) (*(p) = _Generic(*(p), uint16_t: narrow, default: same)(x))

static void store_out(void *out, int64_t place, int64_t is_operand, real x) {
    if (is_operand) store((operand *)out + place, x);
    else ((real *)out)[place] = x;
}

static real as_cached(real x) {
    cached y;
    store(&y, x);
    return load(&y);
}

/* Store the key and value (head_dim) of the token at `position`. */
static void store_kv(const struct attention *a, const int32_t *table, int64_t position,
                     int64_t head, const real *k, const real *v) {
    int64_t block = table[position / a->block], slot = position % a->block, D = a->head_dim;
    cached *keys = keys_of(a, block, head), *values = values_of(a, block, head);
    for (int64_t d = 0; d < D + D % PAIR; d++) /* an odd channel is paired with 0 */
        store(keys + (d / PAIR * padded(a->block) + slot) * PAIR + d % PAIR, d < D ? k[d] : 0);
    for (int64_t d = 0; d < D; d++) store(values + slot * padded(D) + d, v[d]);
}

/* Attention of a query (head_dim) to the tokens up to its own. scores: room for as many. */
static void attend(const struct attention *a, const int32_t *table, int64_t position, int64_t head,
                   const real *q, real *scores, operand *out) {
    int64_t start = first_seen(a, position), end = position + 1;
    real max = -INFINITY, sum = 0;
    for (int64_t t = start; t < end; t++) {
        const cached *key = keys_of(a, table[t / a->block], head) + t % a->block * PAIR;
        scores[t] = 0;
        for (int64_t d = 0; d < a->head_dim; d++)
            scores[t] += as_cached(q[d] * (real)a->scale) *
                         load(key + d / PAIR * padded(a->block) * PAIR + d % PAIR);
        max = scores[t] > max ? scores[t] : max;
    }
    for (int64_t t = start; t < end; t++) sum += scores[t] = exp(scores[t] - max);
    for (int64_t d = 0; d < a->head_dim; d++) {
        real mean = 0;
        for (int64_t t = start; t < end; t++) {
            const cached *values = values_of(a, table[t / a->block], head);
            mean += as_cached(scores[t]) * load(values + t % a->block * padded(a->head_dim) + d);
        }
        store(out + d, mean / sum);
    }
}

/* Output n of a row before the epilogue. */
static real dot(const struct linear *l, const operand *x, int64_t n) {
    int64_t inputs = l->inputs + l->inputs % K_STEP;
    const weight *column = l->weights + n / PANEL * inputs * PANEL + n % PANEL * K_STEP;
    real sum = l->bias ? l->bias[n] : 0;
    for (int64_t k = 0; k < l->inputs; k++)
        sum += load(x + k) * load(column + k / K_STEP * PANEL * K_STEP + k % K_STEP);
    return sum;
}

static real gelu(real x) {
    return (real)0.5 * x * (1 + tanh((real)0.7978845608028654 * (x + (real)0.044715 * x * x * x)));
}

static real silu_mul(real gate, real up) { return gate / (1 + exp(-gate)) * up; }

static void linear(const struct linear *l, int64_t row, const int64_t *out_rows) {
    const operand *x = l->x + row * l->x_stride;
    for (int64_t n = 0; n < l->outputs; n++) {
        int64_t gate = n / 32 * 64 + n % 32;
        real y = l->epilogue == SILU_MUL ? silu_mul(dot(l, x, gate), dot(l, x, gate + 32))
                                         : dot(l, x, n);
        if (l->epilogue == GELU) y = gelu(y);
        int64_t residual_row = l->residual_of_all ? out_rows[row] : row;
        if (l->residual) y += l->residual[residual_row * l->residual_stride + n];
        store_out(l->out, row * l->out_stride + n, l->out_is_operand, y);
    }
}

static void norm(const struct norm *o, int64_t row, int64_t head) {
    const real *x = o->x + row * o->x_stride + head * o->width;
    real mean = 0, square = 0;
    for (int64_t i = 0; o->centred && i < o->width; i++) mean += x[i] / o->width;
    for (int64_t i = 0; i < o->width; i++) square += (x[i] - mean) * (x[i] - mean) / o->width;
    for (int64_t i = 0; i < o->width; i++) {
        real y = (x[i] - mean) / sqrt(square + o->epsilon) * o->gain[i];
        int64_t place = row * o->out_stride + head * o->width + i;
        store_out(o->out, place, o->out_is_operand, y + (o->bias ? o->bias[i] : 0));
    }
}

static void rope(real *x, const real *cosines, const real *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        real a = x[i], b = x[half + i];
        x[i] = a * cosines[i] - b * sines[i];
        x[half + i] = b * cosines[i] + a * sines[i];
    }
}

/* Keys and values of all tokens of the pass, then the outputs of those that are wanted. */
static void attention(const struct operation *o, real *scores) {
    const struct attention *a = &o->of.attention;
    const struct pass *p = o->pass;
    for (const struct share *s = p->shares; s < p->shares + p->n_shares; s++)
        for (int64_t i = 0; i < s->tokens; i++)
            for (int64_t head = 0; head < a->heads; head++)
                store_kv(a, p->tables + s->table, s->position + i, head,
                         a->k + (s->row + i) * a->k_stride + head * a->head_dim,
                         a->v + (s->row + i) * a->v_stride + head * a->head_dim);
    const struct item *items = o->rows == ALL_ROWS ? p->items : p->out_items;
    int64_t count = o->rows == ALL_ROWS ? p->n_items : p->n_out_items;
    for (const struct item *item = items; item < items + count; item++) {
        const struct share *s = p->shares + item->share;
        for (int64_t i = 0; i < item->tokens; i++)
            for (int64_t head = 0; head < a->heads * a->group; head++)
                attend(a, p->tables + s->table, s->position + item->first + i, head / a->group,
                       a->q + (s->row + item->first + i) * a->q_stride + head * a->head_dim, scores,
                       a->out + (item->out_row + i) * a->out_stride + head * a->head_dim);
    }
}

/* Run `count` operations, one after the other. Returns -1 for no memory. */
int step(struct operation *operations, int64_t count, const struct pass *p, void *threads) {
    int64_t longest = 0;
    (void)threads;
    for (const struct share *s = p->shares; s < p->shares + p->n_shares; s++)
        longest = s->position + s->tokens > longest ? s->position + s->tokens : longest;
    real *scores = malloc((longest + 1) * sizeof(real));
    if (!scores) return -1;
    for (struct operation *o = operations; o < operations + count; o++) {
        o->pass = p;
        if (o->kind == ATTEND) attention(o, scores);
        else for (int64_t row = 0; row < rows_of(o); row++) {
            const struct rope *r = &o->of.rope;
            int64_t half = r->head_dim / 2;
            if (o->kind == LINEAR) linear(&o->of.linear, row, p->out_rows);
            else if (o->kind == NORM)
                for (int64_t h = 0; h < o->of.norm.heads; h++) norm(&o->of.norm, row, h);
            else
                for (int64_t h = 0; h < r->heads; h++)
                    rope(r->x + row * r->stride + h * r->head_dim, p->cosines + row * half,
                         p->sines + row * half, half);
        }
    }
    free(scores);
    return 0;
}
