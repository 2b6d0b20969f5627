/* Attention over keys and values in blocks, read in place.

   A block holds B tokens of one layer. For each head it stores the keys as D rows of B numbers and
   the values as B rows of D numbers, so both are read forwards, a vector at a time: with AVX-512,
   16 keys give 16 scores of one query, and 16 numbers of a value give a part of its output. In
   bfloat16, numbers are multiplied in pairs (numbers.h): two rows of keys are interleaved in
   memory, and the values of two tokens are interleaved as they are read. Queries and softmax
   weights are rounded to bfloat16, too.

   The order of a query's sums depends on its position alone: over the width of a key, over keys in
   chunks of 256 counted from position 0, and over chunks in order. So its bits do not depend on the
   number of threads, on its neighbours in the pass, or on how its prompt was cut into chunks.

   In a model whose query heads share KV heads (GQA), the queries of a group are one item, so keys
   are read once for all of them. */

#include "loops.h"
#include "numbers.h"

#define CHUNK 256 /* keys in one round of the softmax */
#define QUERIES 8 /* at most, that share one read of keys and values */
#define WIDEST 512
#define BESIDE 4 /* vectors of keys at a time, at most: an addition takes 4 cycles or more */
#define PAIR (CACHE == 2 ? 2 : 1) /* rows of keys that are interleaved */
#if BYTES == 64
#define ROOM 16 /* sums to keep in registers */
#else
#define ROOM 8
#endif

struct attention {
    const real *q, *k, *v;            /* a row per packed token: heads of width numbers */
    input *out;                       /* laid out like q */
    cached *cache;                    /* blocks of this layer */
    const int64_t *shares;            /* 4 each: start in tables, first position, tokens, row */
    const int64_t *items; /* 4 each: share, its first token, tokens, row of their output */
    const int64_t *asked; /* the items whose output is wanted, if `asks` is 0 or more */
    const int32_t *tables;            /* blocks of all shares */
    int64_t q_stride, k_stride, v_stride, out_stride; /* numbers from one token to the next */
    int64_t block_stride;             /* numbers from one block to the next */
    int64_t heads, group, width, block; /* KV heads; queries per KV head; numbers; tokens */
    int64_t window;                   /* tokens that a token sees, itself included; 0: all */
    int64_t asks;                     /* items in `asked`; -1: the output of all is wanted */
    int64_t single, count;            /* set by `add_attention`: is each share one item; items */
    double scale;
};

static inline int64_t key_numbers(const struct attention *c) {
    return (c->width + c->width % 2) * padded(c->block);
}

static inline cached *keys_of(const struct attention *c, int64_t block, int64_t head) {
    int64_t each = key_numbers(c) + c->block * padded(c->width);
    return c->cache + block * c->block_stride + head * each;
}

/* The first key that a query at `position` sees. */
static inline int64_t first_of(const struct attention *c, int64_t position) {
    return c->window && position >= c->window ? position - c->window + 1 : 0;
}

/* Write the keys and values of an item's tokens for one head. */
static void write_item(const struct attention *c, const int64_t *item, int64_t head) {
    const int64_t *share = c->shares + 4 * item[0];
    int64_t line = padded(c->block), row = padded(c->width), even = c->width + c->width % 2;
    for (int64_t i = item[1]; i < item[1] + item[2]; i++) {
        int64_t position = share[1] + i, slot = position % c->block;
        cached *keys = keys_of(c, c->tables[share[0] + position / c->block], head);
        cached *value = keys + key_numbers(c) + slot * row, key[WIDEST];
        const real *k = c->k + (share[3] + i) * c->k_stride + head * c->width;
        const real *v = c->v + (share[3] + i) * c->v_stride + head * c->width;
        for (int64_t d = 0; d < row; d += LANES) put(key + d, some(k + d, c->width - d, 0), LANES);
        for (int64_t d = 0; d < even; d += PAIR)
            memcpy(keys + d * line + slot * PAIR, key + d, PAIR * sizeof(cached));
        for (int64_t d = 0; d < c->width; d += LANES)
            put(value + d, some(v + d, c->width - d, 0), c->width - d);
    }
}

/* Prefetch the cache line at p: the processor's own guesses end with each block. The loop over keys
   prefetches the values of their block; the loop over values, the next keys. (A macro, because gcc
   drops calls to a function that computes nothing.) A single query in float32 reads faster
   without. */
#define fetch(p) __builtin_prefetch(p)
#define ASKS(count) (PAIR == 2 || (count) > 1)

/* Keys `start` to `end` of a chunk that begins with key `first`. */
struct part {
    int64_t first, start, end;
    cached *blocks[CHUNK + 1], *ahead[CHUNK + 1]; /* with these keys; to be read after them */
};

/* Put in `blocks` those with keys `start` to `end` of a share and head; returns how many. */
static inline int64_t blocks_of(const struct attention *c, const int64_t *share, int64_t head,
                                int64_t start, int64_t end, cached **blocks) {
    int64_t count = 0;
    for (int64_t b = start / c->block; b * c->block < end; b++)
        blocks[count++] = keys_of(c, c->tables[share[0] + b], head);
    return count;
}

/* A vector of keys, and where its scores go among those of a chunk. */
struct place {
    const cached *keys;
    int64_t at;
};

/* The queries of an item: tokens of one share, heads of one group. */
struct queries {
    const int64_t *share, *next; /* next: the share of the item that follows */
    int64_t head, next_head, next_position;
    const real *q[QUERIES];
    input *out[QUERIES];
    int64_t positions[QUERIES];
};

/* For one query. The vector with the first key may begin before the chunk does. */
typedef real scores_of[CHUNK + 2 * ROUND];
typedef cached weights_of[CHUNK + 2 * ROUND];

static inline cached_factor factor_at(const cached *p) { /* from a query, or a weight */
    cached_factor factor;
    memcpy(&factor, p, sizeof factor);
    return factor;
}

/* The scores of `count` queries with the keys at `beside` places. */
static inline __attribute__((always_inline)) void
score(const struct attention *c, const struct place *places, const cached (*query)[WIDEST],
      scores_of *scores, const int count, const int beside) {
    const int64_t line = padded(c->block), values = key_numbers(c); /* values follow keys */
    lanes sums[QUERIES][BESIDE];
    for (int i = 0; i < count; i++)
        for (int p = 0; p < beside; p++) sums[i][p] = (lanes){0};
    for (int64_t d = 0; d < c->width; d += PAIR)
        for (int p = 0; p < beside; p++) {
            const cached *keys = places[p].keys + d * line;
            cached_lanes some = *(const cached_lanes *)keys;
            if (ASKS(count)) fetch(keys + values);
            for (int i = 0; i < count; i++)
                sums[i][p] = add(sums[i][p], some, factor_at(query[i] + d));
        }
    for (int i = 0; i < count; i++)
        for (int p = 0; p < beside; p++)
            *(lanes *)(scores[i] + ROUND + places[p].at) = sums[i][p];
}

/* A vector of one token's values; in bfloat16 of two tokens, one of which may be `nothing`. */
static const cached nothing[WIDEST];
static inline cached_lanes values_of(const cached *one, const cached *other) {
#if CACHE == 2
    return lower(one) | lower(other) << 16;
#else
    (void)other;
    return *(const cached_lanes *)one;
#endif
}

/* Sum `wide` vectors of values from number `d` on, each token's times its weight. */
static inline __attribute__((always_inline)) void
mix(const struct attention *c, const struct part *p, int64_t d, const weights_of *weights,
    real (*mixed)[WIDEST], const int count, const int wide) {
    const int64_t row = padded(c->width), keys = key_numbers(c);
    lanes sums[QUERIES][ROOM];
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) sums[i][j] = (lanes){0};
    int64_t slot = p->start % c->block, key = p->start - slot; /* key: the first of a block */
    for (int64_t b = 0; key < p->end; b++, key += c->block, slot = 0) {
        const cached *values = p->blocks[b] + keys + d;
        int64_t next = p->ahead[b] - p->blocks[b] - keys;
        int64_t stop = key + c->block < p->end ? c->block : p->end - key;
        for (int64_t t = slot / PAIR * PAIR; t < stop; t += PAIR) {
            const cached *one = t < slot ? nothing : values + t * row;
            const cached *other = t + 1 < stop ? values + (t + 1) * row : nothing;
            for (int j = 0; j < wide; j++) {
                cached_lanes some = values_of(one + j * LANES, other + j * LANES);
                if (ASKS(count) && j * LANES * sizeof(cached) % 64 == 0)
                    for (int i = 0; i < PAIR; i++) fetch(values + (t + i) * row + j * LANES + next);
                for (int i = 0; i < count; i++)
                    sums[i][j] = add(sums[i][j], some,
                                     factor_at(weights[i] + ROUND + key + t - p->first));
            }
        }
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) *(lanes *)(mixed[i] + d + j * LANES) = sums[i][j];
}

/* The output of `count` queries that share their keys. */
static inline __attribute__((always_inline)) void
attend_queries(const struct attention *c, const struct queries *given, const int count) {
    const int64_t row = padded(c->width);
    const int beside = ROOM / count < BESIDE ? ROOM / count : BESIDE;
    cached query[QUERIES][WIDEST];
    real result[QUERIES][WIDEST], mixed[QUERIES][WIDEST];
    scores_of scores[QUERIES];
    weights_of weights[QUERIES];
    real most[QUERIES], sum[QUERIES];
    int64_t seen = 0, begin = INT64_MAX; /* keys that some query sees: begin to seen - 1 */
    for (int i = 0; i < count; i++) {
        int64_t position = given->positions[i], from = first_of(c, position);
        for (int64_t d = 0; d < row; d += LANES)
            feed(query[i] + d, some(given->q[i] + d, c->width - d, 0) * (real)c->scale, LANES);
        memset(result[i], 0, sizeof(real) * row);
        most[i] = -INFINITY;
        sum[i] = 0;
        if (position + 1 > seen) seen = position + 1;
        if (from < begin) begin = from;
    }
    for (int64_t chunk = begin / CHUNK * CHUNK; chunk < seen; chunk += CHUNK) {
        struct part p;
        p.first = chunk;
        p.start = chunk > begin ? chunk : begin;
        p.end = chunk + CHUNK < seen ? chunk + CHUNK : seen;
        int64_t used = blocks_of(c, given->share, given->head, p.start, p.end, p.blocks), soon = 0;
        if (p.end < seen) {
            int64_t after = p.end + CHUNK < seen ? p.end + CHUNK : seen;
            soon = blocks_of(c, given->share, given->head, p.end, after, p.ahead);
        }
        if (soon < used) {
            int64_t from = first_of(c, given->next_position), last = given->next_position + 1;
            int64_t after = from - from % c->block + (used - soon) * c->block;
            if (after > last) after = last;
            soon += blocks_of(c, given->next, given->next_head, from, after, p.ahead + soon);
        }
        for (; soon < used; soon++) p.ahead[soon] = p.blocks[soon]; /* nothing more to prefetch */
        struct place places[CHUNK + 1];
        int vectors = 0;
        for (int64_t b = 0; b < used; b++)
            for (int64_t slot = 0; slot < c->block; slot += LANES) {
                int64_t key = (p.start / c->block + b) * c->block + slot;
                if (key < p.end && key + LANES > p.start)
                    places[vectors++] = (struct place){p.blocks[b] + slot * PAIR, key - chunk};
            }
        int v = 0;
        for (; v + beside <= vectors; v += beside)
            score(c, places + v, query, scores, count, beside);
        for (; v < vectors; v++) score(c, places + v, query, scores, count, 1);
        /* Softmax of this chunk. Keys that a query does not see get weight 0. */
        real factor[QUERIES];
        for (int i = 0; i < count; i++) {
            real *own = scores[i] + ROUND;
            int64_t from = first_of(c, given->positions[i]) - chunk;
            int64_t high = given->positions[i] + 1 - chunk, size = padded(p.end - chunk);
            for (int64_t t = 0; t < from && t < size; t++) own[t] = -INFINITY;
            for (int64_t t = high > 0 ? high : 0; t < size; t++) own[t] = -INFINITY;
            lanes top = (lanes){0} - INFINITY, total = {0};
            for (int64_t t = 0; t < size; t += LANES) {
                lanes s = *(lanes *)(own + t);
                top = larger(s, top);
            }
            real now = most[i];
            for (int t = 0; t < LANES; t++) now = top[t] > now ? top[t] : now;
            factor[i] = now > most[i] ? (real)exp(most[i] - now) : 1;
            most[i] = now;
            real shift = now == -INFINITY ? 0 : now;
            cached *weight = weights[i] + ROUND;
            if (PAIR == 2) weight[-1] = weight[size] = 0; /* beside `nothing` */
            for (int64_t t = 0; t < size; t += LANES) {
                lanes each = exponential(*(lanes *)(own + t) - shift);
                feed(weight + t, each, LANES);
                total += each;
            }
            real part = 0;
            for (int t = 0; t < LANES; t++) part += total[t];
            /* Not left to the compiler, which fuses it for some numbers of queries only. */
            sum[i] = (real)fma(sum[i], factor[i], part);
        }
        /* Values. Those before `start` or past `end` may be anything, even NaN: not read. */
        for (int64_t d = 0, wide; d < row; d += wide * LANES) {
            wide = (row - d) / LANES < ROOM / count ? (row - d) / LANES : ROOM / count;
            if (wide >= 8) mix(c, &p, d, weights, mixed, count, wide = 8);
            else if (wide >= 4) mix(c, &p, d, weights, mixed, count, wide = 4);
            else if (wide >= 2) mix(c, &p, d, weights, mixed, count, wide = 2);
            else mix(c, &p, d, weights, mixed, count, wide = 1);
        }
        for (int i = 0; i < count; i++)
            for (int64_t d = 0; d < row; d += LANES) {
                lanes *place = (lanes *)(result[i] + d);
                *place = *place * factor[i] + *(lanes *)(mixed[i] + d);
            }
    }
    for (int i = 0; i < count; i++)
        for (int64_t d = 0; d < c->width; d += LANES)
            feed(given->out[i] + d, *(lanes *)(result[i] + d) / sum[i], c->width - d);
}

/* The item and head with a number. If each share is one item (`single`), the heads of an item
   follow each other, as in memory. Otherwise the items of a head do: they read the same keys, which
   are then in the cache, and threads get equal work, although a prompt's first tokens see few. */
static inline const int64_t *item_of(const struct attention *c, int64_t number, int64_t *head) {
    int64_t count = c->asks < 0 ? c->count : c->asks;
    *head = c->single ? number % c->heads : number / count;
    return (c->asks < 0 ? c->items : c->asked) +
           4 * (c->single ? number / c->heads : number % count);
}

static void write_items(int64_t first, int64_t last, void *context) {
    const struct attention *c = context;
    for (int64_t number = first; number < last; number++)
        write_item(c, c->items + 4 * (number % c->count), number / c->count);
}

/* Attend for items `first` to `last`: each is some tokens of a share, with one KV head. */
static void attend_items(int64_t first, int64_t last, void *context) {
    const struct attention *c = context;
    int64_t end = (c->asks < 0 ? c->count : c->asks) * c->heads;
    for (int64_t number = first; number < last; number++) {
        struct queries some;
        const int64_t *item = item_of(c, number, &some.head), total = item[2] * c->group;
        const int64_t *share = some.share = c->shares + 4 * item[0];
        if (c->single) write_item(c, item, some.head);
        int64_t following = number + 1 < end ? number + 1 : number;
        const int64_t *next = item_of(c, following, &some.next_head);
        some.next = c->shares + 4 * next[0];
        some.next_position = some.next[1] + next[1];
        for (int64_t i = 0; i < next[2]; i++) { /* its queries are scattered, too */
            const real *q = c->q + (some.next[3] + next[1] + i) * c->q_stride;
            q += some.next_head * c->group * c->width;
            for (int64_t d = 0; d < c->group * c->width; d += ROUND) __builtin_prefetch(q + d);
        }
        for (int64_t done = 0; done < total;) {
            int64_t left = total - done < QUERIES ? total - done : QUERIES;
            int count = left == 7 ? 6 : left == 5 ? 4 : (int)left;
            for (int i = 0; i < count; i++) {
                int64_t token = item[1] + (done + i) / c->group;
                int64_t which = some.head * c->group + (done + i) % c->group;
                int64_t to = item[3] + (done + i) / c->group;
                some.q[i] = c->q + (share[3] + token) * c->q_stride + which * c->width;
                some.out[i] = c->out + to * c->out_stride + which * c->width;
                some.positions[i] = share[1] + token;
            }
            switch (count) { /* a constant number of queries keeps their sums in registers */
                case 1: attend_queries(c, &some, 1); break;
                case 2: attend_queries(c, &some, 2); break;
                case 3: attend_queries(c, &some, 3); break;
                case 4: attend_queries(c, &some, 4); break;
                case 6: attend_queries(c, &some, 6); break;
                case 8: attend_queries(c, &some, 8); break;
            }
            done += count;
        }
    }
}

/* Write the new keys and values of all tokens, then attend. */
static void add_attention(struct loops *list, struct attention *c, int64_t shares, int64_t items) {
    c->count = items;
    c->single = items == shares && c->asks < 0; /* none reads what another writes */
    if (!c->single) add_loop(list, items * c->heads, 16, write_items, c);
    add_loop(list, (c->asks < 0 ? items : c->asks) * c->heads, 1, attend_items, c);
}

/* `run`: PyTorch's own parallel loop. */
int attend(struct attention *c, int64_t shares, int64_t items, parallel_for run) {
    struct loop two[2];
    struct loops list = {two, 0};
    add_attention(&list, c, shares, items);
    return run_all(&list, run);
}
