/* Attention over keys and values in blocks, read in place.

   A block holds B tokens of one layer. For each head it stores the keys as D rows of B numbers and
   the values as B rows of D numbers, so both are read forwards, a vector at a time: with AVX-512,
   16 keys give 16 scores of one query, and 16 numbers of a value give a part of its output. In
   bfloat16, numbers are multiplied in pairs (vec.h): two rows of keys are interleaved in memory, and
   the values of two tokens are interleaved as they are read. Queries and softmax weights are rounded
   to bfloat16, too.

   The order of a query's sums depends on its position alone: over the width of a key, over keys in
   tiles of 256 counted from position 0, and over tiles in order. So its bits do not depend on the
   number of threads, on its neighbours in the pass, on how its prompt was cut, or on the size of a
   block.

   In a model whose query heads share KV heads (GQA), the queries of a group are one item, so keys
   are read once for all of them. */

#include "pool.h"
#include "vec.h"

#define KEY_TILE 256 /* keys in one round of the online softmax */
#ifndef MAX_QUERIES  /* the benchmark sets these three, to measure what they gain */
#define MAX_QUERIES 8 /* that share one read of keys and values; gain: 1.13x, bfloat16 1.10x */
#endif
#ifndef UNROLL
/* Vectors of keys at a time, at most: an addition takes 4 cycles. Gain: 1.20x, bfloat16 1.01x. */
#define UNROLL 4
#endif
#ifndef PREFETCH
#define PREFETCH (CACHE <= 2) /* gain: bfloat16 1.09x */
#endif
#if BYTES == 64
#define ACCUMULATORS 16 /* sums to keep in registers */
#else
#define ACCUMULATORS 8
#endif

#if CACHE != 1 /* otherwise a later stage's file has these */
static inline cached_vec load_cached(const cached *p) { return *(const cached_vec *)p; }

/* Store the keys and values of an item's tokens for one head. */
static void store_kv(const struct operation *o, const struct item *item, int64_t head) {
    const struct attention *a = &o->of.attention;
    const struct share *share = o->pass->shares + item->share;
    const int32_t *table = o->pass->tables + share->table;
    int64_t line = padded(a->block), row = padded(a->head_dim), D = a->head_dim;
    for (int64_t i = item->first; i < item->first + item->tokens; i++) {
        int64_t position = share->position + i, slot = position % a->block;
        cached *keys = keys_of(a, table[position / a->block], head), key[MAX_HEAD_DIM];
        cached *value = values_of(a, table[position / a->block], head) + slot * row;
        const real *k = a->k + (share->row + i) * a->k_stride + head * D;
        const real *v = a->v + (share->row + i) * a->v_stride + head * D;
        for (int64_t d = 0; d < row; d += LANES)
            store(key + d, load_partial(k + d, D - d, 0), LANES);
        for (int64_t d = 0; d < D; d += PAIR)
            memcpy(keys + d * line + slot * PAIR, key + d, PAIR * sizeof(cached));
        for (int64_t d = 0; d < D; d += LANES)
            store(value + d, load_partial(v + d, D - d, 0), D - d);
    }
}

/* The scales of a vector of keys, and of their values. */
static inline void load_scales(const struct attention *a, const cached *keys, int64_t slot,
                               real *of_keys, real *of_values) {
    (void)a, (void)keys, (void)slot, (void)of_keys, (void)of_values;
}
#endif

/* Keys `start` to `end` of a tile that begins with key `first`. */
struct tile {
    int64_t first, start, end;
    cached *blocks[KEY_TILE + 1]; /* that hold them: the keys of one head */
};

/* A vector of keys, and where its scores go among those of a tile. */
struct key_vec {
    const cached *keys;
    int64_t place;
};

/* Queries that share their keys: tokens of one share, heads of one group. */
struct queries {
    const int32_t *table;
    int64_t head;
    const real *q[MAX_QUERIES];
    operand *out[MAX_QUERIES];
    int64_t positions[MAX_QUERIES];
};

/* Of one query. The vector with the first key may begin before the tile does. */
typedef real scores_of[KEY_TILE + 2 * PAD];
typedef factor weights_of[KEY_TILE + 2 * PAD];

static inline cached_factor factor_at(const factor *p) { /* from a query, or a weight */
    cached_factor number;
    memcpy(&number, p, sizeof number);
    return number;
}

/* Prefetch a cache line of a block that is read soon: the processor's own guesses end with each
   block. In float32 blocks are twice as large, and this gains nothing. */
#define prefetch(p) (PREFETCH ? __builtin_prefetch(p) : (void)0)

/* The scores of `count` queries with `unroll` vectors of keys. */
static inline __attribute__((always_inline)) void
score(const struct attention *a, const struct key_vec *vectors, const factor (*query)[MAX_HEAD_DIM],
      scores_of *scores, const int count, const int unroll) {
    const int64_t line = padded(a->block);
    vec sums[MAX_QUERIES][UNROLL];
    for (int i = 0; i < count; i++)
        for (int u = 0; u < unroll; u++) sums[i][u] = (vec){0};
    for (int64_t d = 0; d < a->head_dim; d += PAIR)
        for (int u = 0; u < unroll; u++) {
            cached_vec keys = load_cached(vectors[u].keys + d * line);
            prefetch(vectors[u + unroll].keys + d * line);
            for (int i = 0; i < count; i++)
                sums[i][u] = madd(sums[i][u], keys, factor_at(query[i] + d));
        }
    for (int i = 0; i < count; i++)
        for (int u = 0; u < unroll; u++) *(vec *)(scores[i] + PAD + vectors[u].place) = sums[i][u];
}

/* A vector of one token's values; in bfloat16 of two tokens, one of which may be `nothing`. */
static const cached nothing[MAX_HEAD_DIM];
static inline cached_vec load_values(const cached *even, const cached *odd) {
#if CACHE == 2
    return load_low(even) | load_low(odd) << 16;
#else
    (void)odd;
    return load_cached(even);
#endif
}

/* Sum `wide` vectors of values from channel `d` on, each token's times its weight. Tokens pair by
   position, so a pair may lie in two blocks. */
static inline __attribute__((always_inline)) void
weigh_values(const struct attention *a, const struct tile *tile, int64_t d,
             const weights_of *weights, real (*sums_out)[MAX_HEAD_DIM], const int count,
             const int wide) {
    const int64_t row = padded(a->head_dim), keys = values_of(a, 0, 0) - keys_of(a, 0, 0);
    vec sums[MAX_QUERIES][ACCUMULATORS];
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) sums[i][j] = (vec){0};
    int64_t key = tile->start - tile->start % PAIR, begin = tile->start - tile->start % a->block;
    for (int64_t b = 0; key < tile->end; b++) { /* begin: the first key of block b */
        const cached *values = tile->blocks[b] + keys + d - begin * row;
        int64_t stop = begin + a->block < tile->end ? begin + a->block : tile->end;
        const cached *next = tile->blocks[stop < tile->end ? b + 1 : b] + keys + d - begin * row;
        for (; key < stop; key += PAIR) {
            const cached *even = key < tile->start ? nothing : values + key * row, *odd = nothing;
            if (key + 1 < stop) odd = values + (key + 1) * row;
            else if (PAIR == 2 && key + 1 < tile->end) odd = tile->blocks[b + 1] + keys + d;
            for (int j = 0; j < wide; j++) {
                cached_vec value = load_values(even + j * LANES, odd + j * LANES);
                if (j * LANES * sizeof(cached) % 64 == 0) {
                    prefetch(next + key * row + j * LANES);
                    prefetch(next + (key + 1) * row + j * LANES);
                }
                for (int i = 0; i < count; i++)
                    sums[i][j] = madd(sums[i][j], value,
                                      factor_at(weights[i] + PAD + key - tile->first));
            }
        }
        begin += a->block;
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) *(vec *)(sums_out[i] + d + j * LANES) = sums[i][j];
}

/* The output of `count` queries that share their keys, by an online softmax: the largest score so
   far is subtracted from all, and what was summed with a smaller one is scaled down. */
static inline __attribute__((always_inline)) void
attend(const struct attention *a, const struct queries *group, const int count) {
    const int64_t row = padded(a->head_dim);
    const int unroll = ACCUMULATORS / count < UNROLL ? ACCUMULATORS / count : UNROLL;
    factor query[MAX_QUERIES][MAX_HEAD_DIM];
    real result[MAX_QUERIES][MAX_HEAD_DIM], weighed[MAX_QUERIES][MAX_HEAD_DIM];
    scores_of scores[MAX_QUERIES], key_scales, value_scales;
    weights_of weights[MAX_QUERIES];
    real max[MAX_QUERIES], sum[MAX_QUERIES];
    int64_t end = 0, begin = INT64_MAX; /* keys that some query sees */
    for (int i = 0; i < count; i++) {
        int64_t position = group->positions[i], first = first_seen(a, position);
        for (int64_t d = 0; d < row; d += LANES)
            store_operand(
                query[i] + d,
                load_partial(group->q[i] + d, a->head_dim - d, 0) * (real)a->scale, LANES);
        memset(result[i], 0, sizeof(real) * row);
        max[i] = -INFINITY;
        sum[i] = 0;
        if (position + 1 > end) end = position + 1;
        if (first < begin) begin = first;
    }
    for (int64_t first = begin / KEY_TILE * KEY_TILE; first < end; first += KEY_TILE) {
        struct tile tile;
        tile.first = first;
        tile.start = first > begin ? first : begin;
        tile.end = first + KEY_TILE < end ? first + KEY_TILE : end;
        struct key_vec vectors[KEY_TILE + 1 + UNROLL]; /* the last ones only for `prefetch` */
        int n_vectors = 0;
        int64_t key = tile.start - tile.start % a->block;
        for (int64_t b = 0; key < tile.end; b++, key += a->block) {
            tile.blocks[b] = keys_of(a, group->table[key / a->block], group->head);
            for (int64_t slot = 0; slot < a->block; slot += LANES)
                if (key + slot < tile.end && key + slot + LANES > tile.start) {
                    int64_t place = key + slot - first;
                    load_scales(a, tile.blocks[b], slot, key_scales + PAD + place,
                                value_scales + PAD + place);
                    vectors[n_vectors++] = (struct key_vec){tile.blocks[b] + slot * PAIR, place};
                }
        }
        for (int u = 0; u < unroll; u++) vectors[n_vectors + u].keys = tile.blocks[0];
        int v = 0;
        for (; v + unroll <= n_vectors; v += unroll)
            score(a, vectors + v, query, scores, count, unroll);
        for (; v < n_vectors; v++) score(a, vectors + v, query, scores, count, 1);
        /* Softmax of this tile. Keys that a query does not see get weight 0. */
        real decay[MAX_QUERIES];
        for (int i = 0; i < count; i++) {
            real *s = scores[i] + PAD;
            int64_t low = first_seen(a, group->positions[i]) - first;
            int64_t high = group->positions[i] + 1 - first, size = padded(tile.end - first);
            const real *scale = key_scales + PAD;
            for (int64_t t = 0; CACHE == 1 && t < size; t += LANES)
                *(vec *)(s + t) *= *(const vec *)(scale + t);
            for (int64_t t = 0; t < low && t < size; t++) s[t] = -INFINITY;
            for (int64_t t = high > 0 ? high : 0; t < size; t++) s[t] = -INFINITY;
            vec top = (vec){0} - INFINITY, total = {0};
            for (int64_t t = 0; t < size; t += LANES) top = vmax(*(vec *)(s + t), top);
            real now = hmax(top, max[i]);
            decay[i] = now > max[i] ? (real)exp(max[i] - now) : 1;
            max[i] = now;
            real shift = now == -INFINITY ? 0 : now;
            factor *weight = weights[i] + PAD;
            scale = value_scales + PAD;
            for (int64_t t = 0; t < size; t += LANES) {
                vec w = vexp(*(vec *)(s + t) - shift);
                total += w;
                if (CACHE == 1) w *= *(const vec *)(scale + t);
                store_operand(weight + t, w, LANES);
            }
            /* Not left to the compiler, which fuses it for some numbers of queries only. */
            sum[i] = (real)fma(sum[i], decay[i], hsum(total));
        }
        /* Values. Those before `start` or past `end` may be anything, even NaN: not read. */
        for (int64_t d = 0, wide; d < row; d += wide * LANES) {
            wide = (row - d) / LANES < ACCUMULATORS / count ? (row - d) / LANES
                                                            : ACCUMULATORS / count;
            if (wide >= 8) weigh_values(a, &tile, d, weights, weighed, count, wide = 8);
            else if (wide >= 4) weigh_values(a, &tile, d, weights, weighed, count, wide = 4);
            else if (wide >= 2) weigh_values(a, &tile, d, weights, weighed, count, wide = 2);
            else weigh_values(a, &tile, d, weights, weighed, count, wide = 1);
        }
        for (int i = 0; i < count; i++)
            for (int64_t d = 0; d < row; d += LANES) {
                vec *r = (vec *)(result[i] + d);
                *r = *r * decay[i] + *(vec *)(weighed[i] + d);
            }
    }
    for (int i = 0; i < count; i++)
        for (int64_t d = 0; d < a->head_dim; d += LANES)
            store_operand(group->out[i] + d, *(vec *)(result[i] + d) / sum[i], a->head_dim - d);
}

/* Whether each share is one item whose output is wanted: then no item reads what another writes. */
static inline int is_single(const struct operation *o) {
    const struct pass *p = o->pass;
    return (o->rows == ALL_ROWS || p->out_items == p->items) && p->n_items == p->n_shares;
}

static void store_items(int64_t first, int64_t last, void *context) {
    const struct operation *o = context;
    for (int64_t n = first; n < last; n++)
        store_kv(o, o->pass->items + n % o->pass->n_items, n / o->pass->n_items);
}

/* Attend for items `first` to `last`: each is tokens of a share, with one KV head. If each share is
   one item, the heads of an item follow each other, as in memory. Otherwise the items of a head do:
   they read the same keys, which are then in the processor's cache, and threads get equal work,
   although a prompt's first tokens see few. */
static void attend_items(int64_t first, int64_t last, void *context) {
    const struct operation *o = context;
    const struct attention *a = &o->of.attention;
    const struct pass *p = o->pass;
    const struct item *items = o->rows == ALL_ROWS ? p->items : p->out_items;
    int64_t n_items = o->rows == ALL_ROWS ? p->n_items : p->n_out_items;
    for (int64_t n = first; n < last; n++) {
        const struct item *item = items + (is_single(o) ? n / a->heads : n % n_items);
        const struct share *share = p->shares + item->share;
        struct queries group = {.table = p->tables + share->table};
        group.head = is_single(o) ? n % a->heads : n / n_items;
        if (is_single(o)) store_kv(o, item, group.head);
        int64_t total = item->tokens * a->group;
        for (int64_t done = 0; done < total;) {
            int64_t left = total - done < MAX_QUERIES ? total - done : MAX_QUERIES;
            int count = left == 7 ? 6 : left == 5 ? 4 : (int)left;
            for (int i = 0; i < count; i++) {
                int64_t token = (done + i) / a->group;
                int64_t head = group.head * a->group + (done + i) % a->group;
                int64_t row = share->row + item->first + token, out_row = item->out_row + token;
                group.q[i] = a->q + row * a->q_stride + head * a->head_dim;
                group.out[i] = a->out + out_row * a->out_stride + head * a->head_dim;
                group.positions[i] = share->position + item->first + token;
            }
            switch (count) { /* a constant number of queries keeps their sums in registers */
                case 1: attend(a, &group, 1); break;
                case 2: attend(a, &group, 2); break;
                case 3: attend(a, &group, 3); break;
                case 4: attend(a, &group, 4); break;
                case 6: attend(a, &group, 6); break;
                case 8: attend(a, &group, 8); break;
            }
            done += count;
        }
    }
}

/* Store the new keys and values of all tokens, then attend. */
static void add_attention(struct loops *list, struct operation *o) {
    int64_t heads = o->of.attention.heads;
    if (!is_single(o)) add_loop(list, o->pass->n_items * heads, 16, store_items, o);
    int64_t n_items = o->rows == ALL_ROWS ? o->pass->n_items : o->pass->n_out_items;
    add_loop(list, n_items * heads, 1, attend_items, o);
}
