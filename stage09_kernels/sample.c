/* The next token of each row of scores: the best one, or one that is drawn.

   Temperature, top_k and top_p do what they do in stage 01's sampling.py, and in that order. But
   nothing is sorted: the limit between what is kept and what is dropped is searched by halves. The
   scores of a row that is drawn become weights, in place. */

#include "numbers.h"

#define BLOCK 256 /* weights that are added up in `real`; sums of more are in double */

typedef double doubles __attribute__((vector_size(LANES * 8)));

struct draw {
    real *scores;                         /* (rows, count) */
    const double *temperatures, *top_ps;  /* temperature 0: the best */
    const double *darts;                  /* where, between 0 and 1, the drawn token lies */
    const int64_t *top_ks;                /* 0: all */
    int64_t *ids;                         /* of the tokens; -1 where scores are NaN or infinite */
    int64_t count;                        /* of a row */
};

/* A vector at p, of which `left` numbers belong to the row; `rest` in place of others. */
static inline lanes some(const real *p, int64_t left, real rest) {
    if (left >= LANES) return *(const lanes *)p;
    lanes x = (lanes){0} + rest;
    memcpy(&x, p, left * sizeof(real));
    return x;
}

/* The first place of the largest score; -1 where there is none. */
static int64_t best(const real *x, int64_t count, real *most) {
    lanes top = (lanes){0} - INFINITY;
    masks at = {0}, number, broken = {0};
    for (int t = 0; t < LANES; t++) number[t] = t;
    for (int64_t t = 0; t < count; t += LANES, number += LANES) {
        lanes y = some(x + t, count - t, -INFINITY);
        masks above = y > top;
        top = choose(above, y, top);
        at = (above & number) | (~above & at);
        broken |= y != y;
    }
    int64_t found = at[0], bad = broken[0];
    *most = top[0];
    for (int t = 1; t < LANES; t++) {
        if (top[t] > *most || (top[t] == *most && at[t] < found)) *most = top[t], found = at[t];
        bad |= broken[t];
    }
    return bad || isinf(*most) ? -1 : found;
}

/* What the weights above `limit` weigh together, and their number. */
static double above(const real *w, int64_t count, real limit, int64_t *number) {
    const lanes least = (lanes){0} + limit;
    doubles weight = {0};
    masks many = {0};
    for (int64_t block = 0; block < count; block += BLOCK) {
        lanes part = {0};
        int64_t end = block + BLOCK < count ? block + BLOCK : count;
        for (int64_t t = block; t < end; t += LANES) {
            lanes y = some(w + t, end - t, 0);
            masks more = y > least;
            part += (lanes)((masks)y & more);
            many -= more;
        }
        weight += __builtin_convertvector(part, doubles);
    }
    double sum = 0;
    *number = 0;
    for (int t = 0; t < LANES; t++) sum += weight[t], *number += many[t];
    return sum;
}

/* The largest limit, from `limit` on, above which there are `fewest` weights or more that weigh
   `lightest` or more. Numbers of one sign are in the order of their bits, so halves of the range of
   bits are searched until one weight is left in it. */
static real limit_of(const real *w, int64_t count, int64_t fewest, double lightest, real limit) {
    real one = 1, middle;
    integer low, high, bits;
    int64_t many = count, few = 0, number; /* above low and above high */
    memcpy(&low, &limit, sizeof(real));
    memcpy(&high, &one, sizeof(real));
    while (high - low > 1 && many - few > 1) {
        bits = low + (high - low) / 2;
        memcpy(&middle, &bits, sizeof(real));
        double weight = above(w, count, middle, &number);
        if (number >= fewest && weight >= lightest) low = bits, many = number;
        else high = bits, few = number;
    }
    memcpy(&limit, &low, sizeof(real));
    return limit;
}

/* With the weights above `limit` end to end: the one at a distance from the start. */
static int64_t hit(const real *w, int64_t count, real limit, double distance) {
    int64_t last = 0, number;
    double before = 0;
    for (int64_t block = 0; block < count; block += BLOCK) {
        int64_t size = count - block < BLOCK ? count - block : BLOCK;
        double part = above(w + block, size, limit, &number), sum = before;
        before += part;
        if (before <= distance) continue;
        for (int64_t t = block; t < block + size; t++)
            if (w[t] > limit) {
                last = t;
                if ((sum += w[t]) > distance) return t;
            }
    }
    return last; /* by rounding */
}

static void draw_rows(int64_t first, int64_t last, void *context) {
    const struct draw *d = context;
    for (int64_t row = first; row < last; row++) {
        real *w = d->scores + row * d->count, most, limit = 0;
        int64_t id = best(w, d->count, &most), number;
        d->ids[row] = id;
        if (id < 0 || d->temperatures[row] == 0) continue;
        const real cold = (real)(1 / d->temperatures[row]);
        for (int64_t t = 0; t < d->count; t += LANES) {
            lanes y = exponential((some(w + t, d->count - t, most) - most) * cold);
            memcpy(w + t, &y, sizeof(real) * (d->count - t < LANES ? d->count - t : LANES));
        }
        if (d->top_ks[row] > 0) limit = limit_of(w, d->count, d->top_ks[row], 0, limit);
        double weight = above(w, d->count, limit, &number);
        if (d->top_ps[row] < 1) {
            limit = limit_of(w, d->count, 1, d->top_ps[row] * weight, limit);
            weight = above(w, d->count, limit, &number);
        }
        d->ids[row] = hit(w, d->count, limit, d->darts[row] * weight);
    }
}

int draw(struct draw *d, int64_t rows, parallel_for run) { return run(0, rows, 1, draw_rows, d); }
