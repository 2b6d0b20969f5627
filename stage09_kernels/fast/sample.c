/* The next token of each row of scores that is drawn at random.

   Temperature, min_p, top_k, top_p and the draw are those of stage 01's sampling.py, in that order,
   so a seed gives the same tokens. But nothing is sorted: a binary search finds the limit between
   the tokens kept and those dropped. A row that is drawn has its scores overwritten with weights.
   Gain over stage 04's sampler, 32 rows of 50,257 scores: 3x with a temperature, 7x with top_p (on
   an Intel Xeon 1.6x and 2.7x), which is a tenth or more of such a decode step in bfloat16. */

#include "pool.h"
#include "vec.h"

#define BLOCK 256 /* weights to add up in `real`; longer sums are in double */
/* Weights: when no more are left, they are copied. Gain: top_p 1.7x, with top_k too 3.8x. */
#define COPIES 2048
#define UNROLL 4  /* sums at a time, because an addition takes several cycles */

typedef double doubles __attribute__((vector_size(LANES * 8)));

struct draw {
    real *scores;                         /* (rows, count) */
    const double *temperatures;           /* 0: the best token */
    const double *min_ps, *top_ps;        /* 0 and 1: all */
    const double *darts;                  /* between 0 and 1: where the drawn token lies */
    const int64_t *top_ks;                /* 0: all */
    int64_t *ids;                         /* the best tokens, then those drawn; -1: none */
    int64_t count, stride;                /* numbers in a row; from one row to the next */
};

/* The sum of the weights above `limit`; their number in `number`. */
static double tail_sum(const real *w, int64_t count, real limit, int64_t *number) {
    const vec least = (vec){0} + limit;
    doubles weight = {0};
    mask counts[UNROLL] = {0};
    for (int64_t block = 0; block < count; block += BLOCK) {
        vec parts[UNROLL] = {0};
        int64_t end = block + BLOCK < count ? block + BLOCK : count;
        for (int64_t t = block; t < end; t += UNROLL * LANES)
            for (int i = 0; i < UNROLL; i++) {
                const real *p = w + t + i * LANES;
                vec y = end == block + BLOCK ? *(const vec *)p : load_partial(p, w + end - p, 0);
                mask more = y > least;
                parts[i] += (vec)((mask)y & more);
                counts[i] -= more;
            }
        for (int i = 1; i < UNROLL; i++) parts[0] += parts[i];
        weight += __builtin_convertvector(parts[0], doubles);
    }
    double sum = 0;
    *number = 0;
    for (int t = 0; t < LANES; t++) {
        sum += weight[t];
        for (int i = 0; i < UNROLL; i++) *number += counts[i][t];
    }
    return sum;
}

/* The weights of a row that may be drawn: those above `limit`, their number, and their sum. */
struct kept {
    real limit;
    int64_t number;
    double sum;
};

/* The next number below the smallest of x, which are not negative; 0 stays 0. */
static real below(vec x) {
    const real smallest = -hmax(-x, -INFINITY);
    return REAL == 4 ? nextafterf(smallest, 0) : nextafter(smallest, 0);
}

/* Copy the weights above `low` and up to `high`; returns their number. */
static int64_t between(const real *w, int64_t count, real low, real high, real *copies) {
    int64_t copied = 0;
    for (int64_t t = 0; t < count; t += LANES) {
        vec y = load_partial(w + t, count - t, 0);
        copied += compress(copies + copied, y, (y > low) & ~(y > high));
    }
    return copied;
}

/* Keep the largest weights: as few as make at least `fewest` and sum to at least `lightest`.
   Numbers of one sign sort like their bits, so the binary search runs over bits, until one weight
   is left between its ends. Once at max COPIES are, it goes on with a copy of them. */
static struct kept threshold(
    const real *w, int64_t count, struct kept now, int64_t fewest, double lightest
) {
    real copies[COPIES + LANES];
    struct kept over = {1, 0, 0}, beside = {0, 0, 0}; /* above the upper end; above all copies */
    const real *from = w;
    integer low, high, bits;
    memcpy(&low, &now.limit, sizeof(real));
    memcpy(&high, &over.limit, sizeof(real));
    while (high - low > 1 && now.number - over.number > 1) {
        if (from == w && now.number - over.number <= COPIES) {
            count = between(w, count, now.limit, over.limit, copies);
            from = copies;
            beside = over;
        }
        struct kept tried;
        bits = low + (high - low) / 2;
        memcpy(&tried.limit, &bits, sizeof(real));
        tried.sum = beside.sum + tail_sum(from, count, tried.limit, &tried.number);
        tried.number += beside.number;
        if (tried.number >= fewest && tried.sum >= lightest) low = bits, now = tried;
        else high = bits, over = tried;
    }
    return now;
}

/* Of the weights above `limit`, laid end to end: the one at `distance` from the start, or the last
   of them if rounding carries `distance` past their end. */
static int64_t pick(const real *w, int64_t count, real limit, double distance) {
    int64_t last = count - 1, number;
    double before = 0;
    for (int64_t block = 0; block < count; block += BLOCK) {
        int64_t size = count - block < BLOCK ? count - block : BLOCK;
        double part = tail_sum(w + block, size, limit, &number), sum = before;
        before += part;
        if (before <= distance) continue;
        for (int64_t t = block; t < block + size; t++)
            if (w[t] > limit && (sum += w[t]) > distance) return t;
    }
    while (last > 0 && !(w[last] > limit)) last--;
    return last;
}

static void draw_rows(int64_t first, int64_t last, void *context) {
    const struct draw *d = context;
    for (int64_t row = first; row < last; row++) {
        if (d->ids[row] < 0 || d->temperatures[row] == 0) continue;
        real *w = d->scores + row * d->stride, max = w[d->ids[row]];
        const real cold = (real)(1 / d->temperatures[row]);
        vec least = (vec){0} + 1;
        for (int64_t t = 0; t < d->count; t += LANES) {
            vec y = vexp((load_partial(w + t, d->count - t, max) - max) * cold);
            store_real(w + t, y, d->count - t);
            least = vmin(least, y);
        }
        struct kept now = {below(vmax(least, (vec){0} + (real)d->min_ps[row])), 0, 0};
        now.sum = tail_sum(w, d->count, now.limit, &now.number);
        if (d->top_ks[row] > 0) now = threshold(w, d->count, now, d->top_ks[row], 0);
        if (d->top_ps[row] < 1) now = threshold(w, d->count, now, 1, d->top_ps[row] * now.sum);
        d->ids[row] = pick(w, d->count, now.limit, d->darts[row] * now.sum);
    }
}

int draw(struct draw *d, int64_t rows, parallel_for run) {
    struct loop loop;
    struct loops list = {&loop, 0};
    add_loop(&list, rows, draw_rows, d);
    return run_all(&list, run);
}
