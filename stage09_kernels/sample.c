/* The next token of each row of scores: the best one, or one drawn at random.

   Temperature, top_k and top_p work as in stage 01's sampling.py, and in that order. But nothing is
   sorted: a binary search finds the limit between the tokens kept and those dropped. A row that is
   drawn has its scores overwritten with weights. */

#include "loops.h"
#include "numbers.h"

#define BLOCK 256 /* weights to add up in `real`; longer sums are in double */
#define ROOM 2048 /* weights: when no more are left, they are copied */
#define BESIDE 4  /* sums at a time, because an addition takes several cycles */

typedef double doubles __attribute__((vector_size(LANES * 8)));

struct draw {
    real *scores;                         /* (rows, count) */
    const double *temperatures, *top_ps;  /* temperature 0: the best token */
    const double *darts;                  /* between 0 and 1: where the drawn token lies */
    const int64_t *top_ks;                /* 0: all */
    int64_t *ids;                         /* the tokens; -1 where scores are NaN or infinite */
    int64_t count, stride;                /* numbers in a row; from one row to the next */
};

/* The first index of the largest score; -1 if there is none. */
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

/* The sum of the weights above `limit`; their number in `number`. */
static double above(const real *w, int64_t count, real limit, int64_t *number) {
    const lanes least = (lanes){0} + limit;
    doubles weight = {0};
    masks many[BESIDE] = {0};
    for (int64_t block = 0; block < count; block += BLOCK) {
        lanes parts[BESIDE] = {0};
        int64_t end = block + BLOCK < count ? block + BLOCK : count;
        for (int64_t t = block; t < end; t += BESIDE * LANES)
            for (int i = 0; i < BESIDE; i++) {
                const real *p = w + t + i * LANES;
                lanes y = end == block + BLOCK ? *(const lanes *)p : some(p, w + end - p, 0);
                masks more = y > least;
                parts[i] += (lanes)((masks)y & more);
                many[i] -= more;
            }
        for (int i = 1; i < BESIDE; i++) parts[0] += parts[i];
        weight += __builtin_convertvector(parts[0], doubles);
    }
    double sum = 0;
    *number = 0;
    for (int t = 0; t < LANES; t++) {
        sum += weight[t];
        for (int i = 0; i < BESIDE; i++) *number += many[i][t];
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
static real below(lanes x) {
    integer bits = ((masks)x)[0];
    for (int t = 1; t < LANES; t++)
        if (((masks)x)[t] < bits) bits = ((masks)x)[t];
    bits -= bits > 0;
    real limit;
    memcpy(&limit, &bits, sizeof(real));
    return limit;
}

/* Copy the weights above `low` and up to `high`; returns their number. */
static int64_t between(const real *w, int64_t count, real low, real high, real *copies) {
    int64_t found = 0;
    for (int64_t t = 0; t < count; t += LANES) {
        lanes y = some(w + t, count - t, 0);
        found += compress(copies + found, y, (y > low) & ~(y > high));
    }
    return found;
}

/* Keep the largest weights: as few as make at least `fewest` and sum to at least `lightest`. Numbers
   of one sign sort like their bits, so the binary search runs over bits, until one weight is left
   between its ends. Once at most ROOM are, it goes on with a copy of them. */
static struct kept keep(
    const real *w, int64_t count, struct kept now, int64_t fewest, double lightest
) {
    real copies[ROOM + LANES];
    struct kept over = {1, 0, 0}, beside = {0, 0, 0}; /* above the upper end; above all copies */
    const real *from = w;
    integer low, high, bits;
    memcpy(&low, &now.limit, sizeof(real));
    memcpy(&high, &over.limit, sizeof(real));
    while (high - low > 1 && now.number - over.number > 1) {
        if (from == w && now.number - over.number <= ROOM) {
            count = between(w, count, now.limit, over.limit, copies);
            from = copies;
            beside = over;
        }
        struct kept tried;
        bits = low + (high - low) / 2;
        memcpy(&tried.limit, &bits, sizeof(real));
        tried.sum = beside.sum + above(from, count, tried.limit, &tried.number);
        tried.number += beside.number;
        if (tried.number >= fewest && tried.sum >= lightest) low = bits, now = tried;
        else high = bits, over = tried;
    }
    return now;
}

/* Of the weights above `limit`, laid end to end: the one at `distance` from the start. */
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
    return last; /* past the end, by rounding */
}

static void draw_rows(int64_t first, int64_t last, void *context) {
    const struct draw *d = context;
    for (int64_t row = first; row < last; row++) {
        real *w = d->scores + row * d->stride, most;
        int64_t id = best(w, d->count, &most);
        d->ids[row] = id;
        if (id < 0 || d->temperatures[row] == 0) continue;
        const real cold = (real)(1 / d->temperatures[row]);
        lanes least = (lanes){0} + 1;
        for (int64_t t = 0; t < d->count; t += LANES) {
            lanes y = exponential((some(w + t, d->count - t, most) - most) * cold);
            put_reals(w + t, y, d->count - t);
            least = smaller(least, y);
        }
        struct kept now = {below(least), 0, 0};
        now.sum = above(w, d->count, now.limit, &now.number);
        if (d->top_ks[row] > 0) now = keep(w, d->count, now, d->top_ks[row], 0);
        if (d->top_ps[row] < 1) now = keep(w, d->count, now, 1, d->top_ps[row] * now.sum);
        d->ids[row] = hit(w, d->count, now.limit, d->darts[row] * now.sum);
    }
}

int draw(struct draw *d, int64_t rows, parallel_for run) {
    struct loop one;
    struct loops list = {&one, 0};
    add_loop(&list, rows, 1, draw_rows, d);
    return run_all(&list, run);
}
