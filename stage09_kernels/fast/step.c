/* A forward pass as one call: a list of operations, run by PyTorch's threads.

   The list is built once per model (program.py). An operation begins when the one before is done,
   because it reads what all threads wrote. */

#include <stdlib.h>

#include "attention.c"
#include "linear.c"

static void embed(int64_t first, int64_t last, void *context) { /* rows */
    const struct operation *o = context;
    const struct embed *e = &o->of.embed;
    void (*read_row)(const void *, int64_t, real *) = e->read_row;
    for (int64_t row = first; row < last; row++) {
        int64_t id = o->pass->ids[row], position = position_of(o->pass, row);
        real *out = e->out + row * e->out_stride;
        if (read_row) read_row(e->format, id, out);
        for (int64_t i = 0; i < e->width; i++) {
            real y = as_weight(e->table ? load(e->table, id * e->width + i, WEIGHT) : out[i]);
            if (e->positions)
                y = as_weight(y + load(e->positions, position * e->width + i, WEIGHT));
            out[i] = y;
        }
    }
}

/* Four sums at a time, because an addition takes 4 cycles. */
static real sum_of(const real *x, int64_t count, real mean, int squared) {
    vec totals[4] = {0};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int u = 0; u < 4; u++) {
            vec y = *(const vec *)(x + i + u * LANES) - mean;
            totals[u] += squared ? y * y : y;
        }
    for (; i < count; i += LANES) {
        vec y = load_partial(x + i, count - i, mean) - mean;
        totals[0] += squared ? y * y : y;
    }
    return hsum(totals[0] + totals[1] + (totals[2] + totals[3]));
}

/* Numbers i to i + LANES of a normed row, of which `left` exist. */
static inline void norm_vector(const struct norm *n, const real *x, int64_t out, int64_t i,
                               int64_t left, real mean, real scale) {
    vec y = (load_partial(x + i, left, 0) - mean) * scale * load_partial(n->gain + i, left, 0);
    if (n->bias) y += load_partial(n->bias + i, left, 0);
    if (n->out_is_operand) store_operand((operand *)n->out + out + i, y, left);
    else store_real((real *)n->out + out + i, y, left);
}

static void norm(int64_t first, int64_t last, void *context) { /* heads of rows */
    const struct norm *n = &((const struct operation *)context)->of.norm;
    for (int64_t item = first; item < last; item++) {
        int64_t row = item / n->heads, place = item % n->heads * n->width, i = 0;
        const real *x = n->x + row * n->x_stride + place;
        int64_t out = row * n->out_stride + place;
        real mean = n->centred ? sum_of(x, n->width, 0, 0) / n->width : 0;
        real scale = 1 / sqrt(sum_of(x, n->width, mean, 1) / n->width + n->epsilon);
        for (; i + LANES <= n->width; i += LANES) norm_vector(n, x, out, i, LANES, mean, scale);
        if (i < n->width) norm_vector(n, x, out, i, n->width - i, mean, scale);
    }
}

static void rope(int64_t first, int64_t last, void *context) { /* heads of rows */
    const struct operation *o = context;
    const struct rope *r = &o->of.rope;
    int64_t half = r->head_dim / 2;
    for (int64_t item = first; item < last; item++) {
        int64_t row = item / r->heads, place = position_of(o->pass, row) * half;
        real *x = r->x + row * r->x_stride + item % r->heads * r->head_dim;
        const real *c = o->pass->cosines + place, *s = o->pass->sines + place;
        for (int64_t i = 0; i < half; i++) {
            real a = x[i], b = x[half + i];
            x[i] = a * c[i] - b * s[i];
            x[half + i] = b * c[i] + a * s[i];
        }
    }
}

/* Run `count` operations, one after the other. Returns 0, the parallel loop's error, or -1 for no
   memory. */
int step(struct operation *operations, int64_t count, const struct pass *pass, parallel_for run) {
    struct loops list = {malloc(2 * count * sizeof(struct loop)), 0};
    if (!list.all) return -1;
    for (struct operation *o = operations; o < operations + count; o++) {
        o->pass = pass;
        if (o->kind == ATTEND) add_attention(&list, o);
        else if (o->kind == LINEAR) add_linear(&list, o);
        else if (o->kind == EMBED) add_loop(&list, rows_of(o), embed, o);
        else if (o->kind == NORM) add_loop(&list, rows_of(o) * o->of.norm.heads, norm, o);
        else add_loop(&list, rows_of(o) * o->of.rope.heads, rope, o);
    }
    int failed = run_all(&list, run);
    free(list.all);
    return failed;
}
