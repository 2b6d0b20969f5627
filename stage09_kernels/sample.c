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

/* The weights that may be drawn: all of a row, or a copy of them once few are left. */
struct left {
    const real *weights;
    int64_t count, copied;
    real copies[ROOM];
    int32_t places[ROOM]; /* where in the row the copies come from */
};

/* Keep only the weights above `limit`, which are at most ROOM. */
static void leave(struct left *l, real limit) {
    int64_t many = 0;
    for (int64_t t = 0; t < l->count; t += BESIDE * LANES) {
        masks more = {0};
        for (int i = 0; i < BESIDE; i++) {
            int64_t at = t + i * LANES;
            more |= some(l->weights + at, l->count - at, 0) > limit;
        }
        int64_t any[BYTES / 8], found = 0;
        memcpy(any, &more, BYTES);
        for (int i = 0; i < BYTES / 8; i++) found |= any[i];
        for (int64_t i = t; found && i < t + BESIDE * LANES && i < l->count; i++)
            if (l->weights[i] > limit) {
                l->copies[many] = l->weights[i];
                l->places[many++] = i;
            }
    }
    l->weights = l->copies;
    l->count = many;
    l->copied = 1;
}

/* The largest limit, from `limit` up, with at least `fewest` weights above it whose sum is at least
   `lightest`. Numbers of one sign sort like their bits, so the binary search runs over bits, until
   one weight is left between its ends. */
static real limit_of(struct left *l, int64_t fewest, double lightest, real limit) {
    real one = 1, middle;
    integer low, high, bits;
    int64_t many = l->count, few = 0, number; /* weights above low and above high */
    memcpy(&low, &limit, sizeof(real));
    memcpy(&high, &one, sizeof(real));
    while (high - low > 1 && many - few > 1) {
        bits = low + (high - low) / 2;
        memcpy(&middle, &bits, sizeof(real));
        double weight = above(l->weights, l->count, middle, &number);
        if (number >= fewest && weight >= lightest) {
            low = bits, many = number;
            if (!l->copied && many <= ROOM) leave(l, middle);
        } else high = bits, few = number;
    }
    memcpy(&limit, &low, sizeof(real));
    return limit;
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
        real *w = d->scores + row * d->stride, most, limit = 0;
        int64_t id = best(w, d->count, &most), number;
        d->ids[row] = id;
        if (id < 0 || d->temperatures[row] == 0) continue;
        const real cold = (real)(1 / d->temperatures[row]);
        for (int64_t t = 0; t < d->count; t += LANES) {
            lanes y = exponential((some(w + t, d->count - t, most) - most) * cold);
            put_reals(w + t, y, d->count - t);
        }
        struct left l;
        l.weights = w, l.count = d->count, l.copied = 0;
        if (d->top_ks[row] > 0) limit = limit_of(&l, d->top_ks[row], 0, limit);
        double weight = above(l.weights, l.count, limit, &number);
        if (d->top_ps[row] < 1) {
            limit = limit_of(&l, 1, d->top_ps[row] * weight, limit);
            weight = above(l.weights, l.count, limit, &number);
        }
        id = hit(l.weights, l.count, limit, d->darts[row] * weight);
        d->ids[row] = l.copied ? l.places[id] : id;
    }
}

int draw(struct draw *d, int64_t rows, parallel_for run) {
    struct loop one;
    struct loops list = {&one, 0};
    add_loop(&list, rows, 1, draw_rows, d);
    return run_all(&list, run);
}
