/* A forward pass as one call: a list of operations, run by PyTorch's threads.

   The list is built once per model (program.py). An operation begins when the one before is done,
   because it reads what all threads wrote. */

#include <stdlib.h>

#include "attention.c"
#include "linear.c"

#define FEW 6144 /* numbers that one thread finishes before another could begin */

enum { NORM, LINEAR, TURN, ATTEND };
enum { ALL, WANTED, PICKED }; /* over all tokens; over the rows whose logits are wanted; over
                                 these, while the residual has a row for each token */

struct norm { /* (x - mean) / deviation * gain + bias, or x / rms * gain, for each head of a row */
    const real *x;
    void *out;
    const real *gain, *bias;
    int64_t x_stride, out_stride, width, heads, rows, centred;
    int64_t feeds; /* as in struct linear */
    double epsilon;
};

struct turn { /* rotary positions, in place: pairs (i, i + width / 2) of `heads` heads */
    real *x;
    const real *cosines, *sines; /* (rows, width / 2) */
    int64_t stride, width, heads, rows;
};

struct operation {
    int64_t kind, over;
    union {
        struct norm norm;
        struct linear linear;
        struct turn turn;
        struct attention attention;
    } of;
};

static real sum_of(const real *x, int64_t count, real mean, int squared) {
    lanes total = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        lanes part = some(x + i, count - i, mean) - mean;
        total += squared ? part * part : part;
    }
    real sum = 0;
    for (int t = 0; t < LANES; t++) sum += total[t];
    return sum;
}

static void norm_rows(int64_t first, int64_t last, void *context) {
    const struct norm *n = context;
    for (int64_t item = first; item < last; item++) {
        int64_t row = item / n->heads, place = item % n->heads * n->width;
        const real *x = n->x + row * n->x_stride + place;
        int64_t to = row * n->out_stride + place;
        real mean = n->centred ? sum_of(x, n->width, 0, 0) / n->width : 0;
        real scale = 1 / sqrt(sum_of(x, n->width, mean, 1) / n->width + n->epsilon);
        for (int64_t i = 0; i < n->width; i += LANES) {
            int64_t left = n->width - i;
            lanes y = (some(x + i, left, 0) - mean) * scale * some(n->gain + i, left, 0);
            if (n->bias) y += some(n->bias + i, left, 0);
            if (n->feeds) feed((input *)n->out + to + i, y, left);
            else put((real *)n->out + to + i, y, left);
        }
    }
}

static void turn_rows(int64_t first, int64_t last, void *context) {
    const struct turn *t = context;
    int64_t half = t->width / 2;
    for (int64_t item = first; item < last; item++) {
        int64_t row = item / t->heads;
        real *x = t->x + row * t->stride + item % t->heads * t->width;
        const real *c = t->cosines + row * half, *s = t->sines + row * half;
        for (int64_t i = 0; i < half; i++) {
            real a = x[i], b = x[half + i];
            x[i] = a * c[i] - b * s[i];
            x[half + i] = b * c[i] + a * s[i];
        }
    }
}

/* Run `count` operations over `tokens` tokens, of which `wanted` rows get logits. `pass` holds the
   fields of attention that all layers share. Returns 0, the parallel loop's error, or -1 for no
   memory. */
int step(struct operation *operations, int64_t count, const struct attention *pass, int64_t shares,
         int64_t items, const real *cosines, const real *sines, const int64_t *chosen,
         int64_t tokens, int64_t wanted, parallel_for run) {
    struct loops list = {malloc(2 * count * sizeof(struct loop)), 0};
    if (!list.all) return -1;
    for (struct operation *o = operations; o < operations + count; o++) {
        int64_t rows = o->over ? wanted : tokens;
        switch (o->kind) {
            case NORM: {
                struct norm *n = &o->of.norm;
                n->rows = rows;
                add_loop(&list, rows * n->heads, 1 + FEW / n->width, norm_rows, n);
                break;
            }
            case LINEAR:
                o->of.linear.rows = rows;
                o->of.linear.chosen = o->over == PICKED ? chosen : 0;
                add_linear(&list, &o->of.linear);
                break;
            case TURN: {
                struct turn *t = &o->of.turn;
                t->rows = rows;
                t->cosines = cosines;
                t->sines = sines;
                add_loop(&list, rows * t->heads, 1 + FEW / t->width, turn_rows, t);
                break;
            }
            case ATTEND: {
                struct attention *a = &o->of.attention;
                a->shares = pass->shares;
                a->items = pass->items;
                a->tables = pass->tables;
                a->asked = pass->asked;
                a->asks = o->over ? pass->asks : -1;
                add_attention(&list, a, shares, items);
                break;
            }
        }
    }
    int failed = run_all(&list, run);
    free(list.all);
    return failed;
}
