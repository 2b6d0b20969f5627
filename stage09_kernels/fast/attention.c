/* Attention over keys and values in blocks, read in place.

   A block holds B tokens of one layer. For each head it stores the keys as D rows of B numbers and
   the values as B rows of D numbers, so both are read forwards, a vector at a time: with AVX-512,
   16 keys give 16 scores of one query, and 16 numbers of a value give a part of its output. In
   bfloat16, numbers are multiplied in pairs (vec.h): two rows of keys are interleaved in memory,
   and the values of two tokens are interleaved as they are read. Queries and softmax weights are
   rounded to bfloat16, too.

   The order of a query's sums depends on its position alone: over the width of a key, over keys in
   tiles of 256 counted from position 0, and over tiles in order. So its bits do not depend on the
   number of threads, on its neighbours in the pass, on how its prompt was cut, or on the size of a
   block.

   In a model whose query heads share KV heads (GQA), the queries of a group are one item, so keys
   are read once for all of them. */

#include "pool.h"
#include "tiles.h"
#include "vec.h"
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#define KEY_TILE 256 /* keys in one round of the online softmax */
#define BY_TILES (TILES && CACHE == 2)
#define FEW_QUERIES 2 /* by vectors at a level with tiles; gain with 32 rows: 1.14x to 1.22x */
#ifndef MAX_QUERIES   /* the benchmark sets these three, to measure what they gain */
/* That share one read of keys and values; gain: 1.13x, bfloat16 1.10x. cache.py has them too. */
#define MAX_QUERIES (BY_TILES ? 32 : 8)
#endif
/* Numbers from one query to the next; no power of two, or they would share their places in L1. */
#define ROOM (MAX_HEAD_DIM + (BY_TILES ? UNIT : 0))
#ifndef UNROLL
/* Vectors of keys at a time, at most: an addition takes 4 cycles. Gain: 1.20x, bfloat16 1.01x. */
#define UNROLL 4
#endif
#ifndef PREFETCH
#define PREFETCH (CACHE <= 2) /* gain: bfloat16 1.09x */
#endif
#define SPARE (UNROLL > 4 ? UNROLL : 4) /* vectors of keys behind a tile, only to be read */
#define ACCUMULATORS (BY_TILES ? 4 : BYTES == 64 ? 16 : 8) /* sums to keep in registers */

static const cached nothing[MAX_HEAD_DIM]; /* in place of a token's values */

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

/* A vector of one token's values; in bfloat16 of two tokens. */
static inline cached_vec load_values(const cached *even, const cached *odd) {
#if CACHE == 2
    return load_low(even) | load_low(odd) << 16;
#else
    (void)odd;
    return load_cached(even);
#endif
}

/* A vector of keys, and where its scores go among those of a tile. */
struct key_vec {
    const cached *keys;
    int64_t place;
};

/* Where keys `first` to `end` of one head lie, in vectors, and the value of each. Zeros follow the
   last value, up to a whole unit and as far as prefetches go. */
struct tile {
    int64_t first, end;
    int n_vectors;
    struct key_vec vectors[KEY_TILE + 1 + SPARE];
    const cached *values[KEY_TILE + UNIT];
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
typedef factor weights_of[KEY_TILE + UNIT];

/* Prefetch a cache line of a block that is read soon: the processor's own guesses end with each
   block. In float32 blocks are twice as large, and this gains nothing. */
#define prefetch(p) (PREFETCH ? __builtin_prefetch(p) : (void)0)
#define AHEAD 16 /* tokens whose values are prefetched: a block */

#if BY_TILES
/* Queries and weights are tiles of x here: rows of whole units, zeros behind the last channel. */
#define KEYS_MADD(SUM, W, I) \
    tile_load(W, part[I], size); \
    tile_madd(SUM, X0, W);
#define SCORES_STORE(SUM, W, I) tile_store(SUM, scores[0] + PAD + of[I].place, sizeof scores[0]);

/* The scores of `count` queries with a tile's vectors of keys, 16 queries and four vectors at a
   time. 32 channels of 16 keys lie in a block as a tile of weights does. */
static void score_tiles(const struct attention *a, const struct tile *tile,
                        const factor (*query)[ROOM], scores_of *scores, int count, int *set) {
    const int64_t line = padded(a->block) * 4;
    cached last[4][UNIT / 2 * 32] = {0}; /* values, or NaN, follow a key's last channels */
    for (; count > 0; count -= TILE_ROWS, query += TILE_ROWS, scores += TILE_ROWS) {
        use_tiles(set, count);
        for (int v = 0; v < tile->n_vectors; v += 4) {
            const struct key_vec *of = tile->vectors + v;
            QUARTERS(QUARTER_ZERO)
            for (int64_t d = 0; d < a->head_dim; d += UNIT) {
                const cached *part[4];
                int64_t left = a->head_dim - d, size = left < UNIT ? 64 : line;
                for (int u = 0; u < 4; u++) {
                    part[u] = of[u].keys + d / 2 * (line / 2);
                    if (left >= UNIT) continue;
                    for (int64_t i = 0; 2 * i < left; i++)
                        memcpy(last[u] + i * 32, part[u] + i * (line / 2), 64);
                    part[u] = last[u];
                }
                memory_is_written();
                tile_load(X0, query[0] + d, sizeof query[0]);
                QUARTERS(KEYS_MADD)
            }
            QUARTERS(SCORES_STORE)
        }
    }
    memory_is_written();
}

#define VALUES_MADD(SUM, W, I) \
    tile_load(W, pairs_of + 16 * I, row * 4); \
    tile_madd(SUM, X0, W);
#define VALUES_STORE(SUM, W, I) tile_store(SUM, sums[0] + d + 16 * I, sizeof sums[0]);

/* Sum a tile's values times weights, for `count` queries. */
static void weigh_tiles(const struct attention *a, const struct tile *tile,
                        const weights_of *weights, real (*sums)[ROOM], int count, int *set) {
    const int64_t line = padded(a->head_dim), row = (line + PANEL - 1) / PANEL * PANEL;
    const int64_t keys = tile->end - tile->first;
    _Alignas(64) uint32_t values[KEY_TILE / 2 * MAX_HEAD_DIM]; /* pairs of tokens: (128, row, 2) */
    for (int64_t key = 0; key < keys || key % UNIT; key += 2) {
        uint32_t *out = values + key / 2 * row;
        for (int64_t d = 0; d < line; d += LANES)
            *(pairs *)(out + d) = load_values(tile->values[key] + d, tile->values[key + 1] + d);
        memset(out + line, 0, (row - line) * 4);
    }
    memory_is_written();
    for (; count > 0; count -= TILE_ROWS, weights += TILE_ROWS, sums += TILE_ROWS) {
        use_tiles(set, count);
        for (int64_t d = 0; d < row; d += PANEL) {
            QUARTERS(QUARTER_ZERO)
            for (int64_t key = 0; key < keys; key += UNIT) {
                const uint32_t *pairs_of = values + key / 2 * row + d;
                tile_load(X0, weights[0] + key, sizeof weights[0]);
                QUARTERS(VALUES_MADD)
            }
            QUARTERS(VALUES_STORE)
        }
    }
    memory_is_written();
}

/* One or two queries would use as many rows of 16, so they take vectors. These add in the order of
   tiles (tiles.h), and so give the same bits: even and odd numbers of a unit apart, from 0 on, and
   then both to the sum; rounding flushes (see `attend_items`). */
typedef struct { vec all, even, odd; } total;

static inline vec fused(vec sum, vec a, vec b) {
#if BYTES == 64
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#endif
    for (int t = 0; t < LANES; t++) sum[t] = fmaf(a[t], b[t], sum[t]);
    return sum;
}
static inline total add_products(total t, pairs x, uint32_t number) {
    const pairs y = (pairs){0} + number;
    t.even = fused(t.even, (vec)(x << 16), (vec)(y << 16));
    t.odd = fused(t.odd, (vec)(x & 0xffff0000u), (vec)(y & 0xffff0000u));
    return t;
}
static inline total end_unit(total t) { return (total){.all = t.all + (t.even + t.odd)}; }
static inline vec sum_in(total t) { return t.all; }
#else
#define score_tiles(...) (void)0
#define weigh_tiles(...) (void)0
typedef vec total;
#define add_products madd
#define end_unit(total) (total)
#define sum_in(total) (total)
#endif

/* Whether number `end`, out of `count`, ends a unit of a tile. */
static inline int ends_unit(int64_t end, int64_t count) {
    return BY_TILES && (end % UNIT == 0 || end >= count);
}

/* The numbers of a query, or the weights, that meet a pair. */
static inline cached_factor load_factor(const factor *p) {
    cached_factor number;
    memcpy(&number, p, sizeof number);
    return number;
}

/* The scores of `count` queries with `unroll` vectors of keys. */
static inline __attribute__((always_inline)) void
score(const struct attention *a, const struct key_vec *vectors, const factor (*query)[ROOM],
      scores_of *scores, const int count, const int unroll) {
    const int64_t line = padded(a->block);
    total sums[MAX_QUERIES][UNROLL];
    for (int i = 0; i < count; i++)
        for (int u = 0; u < unroll; u++) sums[i][u] = (total){0};
    for (int64_t d = 0; d < a->head_dim; d += PAIR) {
        for (int u = 0; u < unroll; u++) {
            cached_vec keys = load_cached(vectors[u].keys + d * line);
            prefetch(vectors[u + unroll].keys + d * line);
            for (int i = 0; i < count; i++)
                sums[i][u] = add_products(sums[i][u], keys, load_factor(query[i] + d));
        }
        if (ends_unit(d + PAIR, a->head_dim))
            for (int i = 0; i < count; i++)
                for (int u = 0; u < unroll; u++) sums[i][u] = end_unit(sums[i][u]);
    }
    for (int i = 0; i < count; i++)
        for (int u = 0; u < unroll; u++)
            *(vec *)(scores[i] + PAD + vectors[u].place) = sum_in(sums[i][u]);
}

static inline __attribute__((always_inline)) void
score_vectors(const struct attention *a, const struct tile *tile, const factor (*query)[ROOM],
              scores_of *scores, const int count) {
    const int unroll = ACCUMULATORS / count < UNROLL ? ACCUMULATORS / count : UNROLL;
    int v = 0;
    for (; v + unroll <= tile->n_vectors; v += unroll)
        score(a, tile->vectors + v, query, scores, count, unroll);
    for (; v < tile->n_vectors; v++) score(a, tile->vectors + v, query, scores, count, 1);
}

/* Sum `wide` vectors of values from channel `d` on, each token's times its weight. Tokens pair by
   position, so a pair may lie in two blocks. */
static inline __attribute__((always_inline)) void
weigh(const struct tile *tile, int64_t d, const weights_of *weights, real (*sums_out)[ROOM],
      const int count, const int wide) {
    const int64_t keys = tile->end - tile->first;
    total sums[MAX_QUERIES][ACCUMULATORS];
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) sums[i][j] = (total){0};
    for (int64_t key = 0; key < keys; key += PAIR) {
        const cached *const *of = tile->values + key;
        for (int j = 0; j < wide; j++) {
            const int64_t place = d + j * LANES;
            cached_vec value = load_values(of[0] + place, of[1] + place);
            for (int i = 0; i < PAIR && j * LANES * sizeof(cached) % 64 == 0; i++)
                prefetch(of[AHEAD + i] + place);
            for (int i = 0; i < count; i++)
                sums[i][j] = add_products(sums[i][j], value, load_factor(weights[i] + key));
        }
        if (ends_unit(key + PAIR, keys))
            for (int i = 0; i < count; i++)
                for (int j = 0; j < wide; j++) sums[i][j] = end_unit(sums[i][j]);
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) *(vec *)(sums_out[i] + d + j * LANES) = sum_in(sums[i][j]);
}

static inline __attribute__((always_inline)) void
weigh_vectors(const struct attention *a, const struct tile *tile, const weights_of *weights,
              real (*sums)[ROOM], const int count) {
    const int64_t row = padded(a->head_dim);
    for (int64_t d = 0, wide; d < row; d += wide * LANES) {
        wide = (row - d) / LANES < ACCUMULATORS / count ? (row - d) / LANES : ACCUMULATORS / count;
        if (wide >= 8) weigh(tile, d, weights, sums, count, wide = 8);
        else if (wide >= 4) weigh(tile, d, weights, sums, count, wide = 4);
        else if (wide >= 2) weigh(tile, d, weights, sums, count, wide = 2);
        else weigh(tile, d, weights, sums, count, wide = 1);
    }
}

/* Find the keys of `group` from `first` on, up to `end` or as many as a tile takes. */
static void find_tile(const struct attention *a, const struct queries *group, int64_t first,
                      int64_t end, struct tile *tile, real *key_scales, real *value_scales) {
    const int64_t row = padded(a->head_dim);
    tile->first = first;
    tile->end = end = first + KEY_TILE < end ? first + KEY_TILE : end;
    tile->n_vectors = 0;
    const cached **value = tile->values;
    for (int64_t key = first - first % a->block; key < end; key += a->block) {
        const cached *keys = keys_of(a, group->table[key / a->block], group->head);
        const cached *values = values_of(a, group->table[key / a->block], group->head);
        for (int64_t slot = 0; slot < a->block; slot += LANES)
            if (key + slot < end && key + slot + LANES > first) {
                int64_t place = key + slot - first;
                load_scales(a, keys, slot, key_scales + place, value_scales + place);
                tile->vectors[tile->n_vectors++] = (struct key_vec){keys + slot * PAIR, place};
            }
        const int64_t skipped = key < first ? first - key : 0;
        const int64_t stop = end - key < a->block ? end - key : a->block;
        for (int64_t slot = skipped; slot < stop; slot++) *value++ = values + slot * row;
    }
    for (int u = 0; u < SPARE; u++)
        tile->vectors[tile->n_vectors + u] = (struct key_vec){tile->vectors[0].keys, KEY_TILE};
    for (int i = 0; i < UNIT; i++) value[i] = nothing;
}

/* The output of `count` queries that share their keys, by an online softmax: the largest score so
   far is subtracted from all, and what was summed with a smaller one is scaled down. */
static inline __attribute__((always_inline)) void
attend(const struct attention *a, const struct queries *group, const int count, int *set) {
    const int64_t row = padded(a->head_dim);
    const int by_tiles = BY_TILES && count > FEW_QUERIES, each = BY_TILES ? 1 : count;
    _Alignas(64) factor query[MAX_QUERIES][ROOM];
    _Alignas(64) real result[MAX_QUERIES][ROOM], weighed[MAX_QUERIES][ROOM];
    _Alignas(64) scores_of scores[MAX_QUERIES], key_scales, value_scales;
    _Alignas(64) weights_of weights[MAX_QUERIES];
    real max[MAX_QUERIES], sum[MAX_QUERIES];
    int64_t end = 0; /* of the keys that some query sees */
    struct tile tile;
    for (int i = 0; i < count; i++) {
        for (int64_t d = 0; d < row; d += LANES) {
            vec q = load_partial(group->q[i] + d, a->head_dim - d, 0);
            store_operand(query[i] + d, q * (real)a->scale, LANES);
        }
        for (int64_t d = row; BY_TILES && d % UNIT; d++) query[i][d] = 0;
        memset(result[i], 0, sizeof(real) * row);
        max[i] = -INFINITY;
        sum[i] = 0;
        if (group->positions[i] >= end) end = group->positions[i] + 1;
    }
    for (int64_t first = 0; first < end; first += KEY_TILE) {
        find_tile(a, group, first, end, &tile, key_scales + PAD, value_scales + PAD);
        if (by_tiles) score_tiles(a, &tile, query, scores, count, set);
        for (int i = 0; !by_tiles && i < count; i += each)
            score_vectors(a, &tile, query + i, scores + i, each);
        /* Softmax of this tile. Keys that a query does not see get weight 0. */
        real decay[MAX_QUERIES];
        for (int i = 0; i < count; i++) {
            real *s = scores[i] + PAD;
            const int64_t all = (tile.end - first + UNIT - 1) / UNIT * UNIT;
            int64_t high = group->positions[i] + 1 - first; /* of the keys that it sees */
            if (high < 0) high = 0;
            if (high > tile.end - first) high = tile.end - first;
            const int64_t size = padded(high);
            const real *scale = key_scales + PAD;
            for (int64_t t = 0; CACHE == 1 && t < size; t += LANES)
                *(vec *)(s + t) *= *(const vec *)(scale + t);
            for (int64_t t = high; t < size; t++) s[t] = -INFINITY;
            vec top = (vec){0} - INFINITY, total = {0};
            for (int64_t t = 0; t < size; t += LANES) top = vmax(*(vec *)(s + t), top);
            real now = hmax(top, max[i]);
            decay[i] = now > max[i] ? (real)exp(max[i] - now) : 1;
            max[i] = now;
            real shift = now == -INFINITY ? 0 : now;
            factor *weight = weights[i];
            scale = value_scales + PAD;
            for (int64_t t = 0; t < size; t += LANES) {
                vec w = vexp(*(vec *)(s + t) - shift);
                total += w;
                if (CACHE == 1) w *= *(const vec *)(scale + t);
                store_operand(weight + t, w, LANES);
            }
            memset(weight + size, 0, (all - size) * sizeof(factor));
            /* Not left to the compiler, which fuses it for some numbers of queries only. */
            sum[i] = (real)fma(sum[i], decay[i], hsum(total));
        }
        if (by_tiles) weigh_tiles(a, &tile, weights, weighed, count, set);
        for (int i = 0; !by_tiles && i < count; i += each)
            weigh_vectors(a, &tile, weights + i, weighed + i, each);
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
   one item, the heads of an item follow each other, as in memory, and each is stored before it is
   read (gain of both with 32 rows: 1.04x to 1.12x). Otherwise the items of a head do:
   they read the same keys, which are then in the processor's cache, and threads get equal work,
   although a prompt's first tokens see few. */
static void attend_items(int64_t first, int64_t last, void *context) {
    const struct operation *o = context;
    const struct attention *a = &o->of.attention;
    const struct pass *p = o->pass;
    const struct item *items = o->rows == ALL_ROWS ? p->items : p->out_items;
    int64_t n_items = o->rows == ALL_ROWS ? p->n_items : p->n_out_items;
    int set = 0; /* rows of the tiles */
#if BY_TILES && defined(__SSE2__)
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040); /* numbers too small to be normal count as 0, as in tiles */
#endif
    for (int64_t n = first; n < last; n++) {
        const struct item *item = items + (is_single(o) ? n / a->heads : n % n_items);
        const struct share *share = p->shares + item->share;
        struct queries group = {.table = p->tables + share->table};
        group.head = is_single(o) ? n % a->heads : n / n_items;
        if (is_single(o)) store_kv(o, item, group.head);
        int64_t total = item->tokens * a->group;
        for (int64_t done = 0; done < total;) {
            int64_t left = total - done < MAX_QUERIES ? total - done : MAX_QUERIES;
            int count = BY_TILES || left != 7 && left != 5 ? (int)left : (int)left - 1;
            for (int i = 0; i < count; i++) {
                int64_t token = (done + i) / a->group;
                int64_t head = group.head * a->group + (done + i) % a->group;
                int64_t row = share->row + item->first + token, out_row = item->out_row + token;
                group.q[i] = a->q + row * a->q_stride + head * a->head_dim;
                group.out[i] = a->out + out_row * a->out_stride + head * a->head_dim;
                group.positions[i] = share->position + item->first + token;
            }
#if BY_TILES
            attend(a, &group, count, &set);
#else
            switch (count) { /* a constant number of queries keeps their sums in registers */
                case 1: attend(a, &group, 1, &set); break;
                case 2: attend(a, &group, 2, &set); break;
                case 3: attend(a, &group, 3, &set); break;
                case 4: attend(a, &group, 4, &set); break;
                case 6: attend(a, &group, 6, &set); break;
                case 8: attend(a, &group, 8, &set); break;
            }
#endif
            done += count;
        }
    }
#if BY_TILES
    if (set) tile_release();
#endif
#if BY_TILES && defined(__SSE2__)
    _mm_setcsr(mode);
#endif
}

/* Store the new keys and values of all tokens, then attend. */
static void add_attention(struct loops *list, struct operation *o) {
    int64_t heads = o->of.attention.heads;
    if (!is_single(o)) add_loop(list, o->pass->n_items * heads, store_items, o);
    int64_t n_items = o->rows == ALL_ROWS ? o->pass->n_items : o->pass->n_out_items;
    add_loop(list, n_items * heads, attend_items, o);
}
