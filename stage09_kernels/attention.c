/* Attention over keys and values in blocks, read where they are.

   A block has B tokens of one layer. For each head it holds the keys as D rows of B numbers and the
   values as B rows of D numbers, so that both are read forwards, a vector at a time: with AVX-512
   16 keys are 16 scores of one query, and 16 numbers of a value are a part of its output.

   The sums of a query are made in an order that depends on its position alone: over the width of a
   key in two halves (even and odd), over keys in chunks of 256 counted from position 0. So its bits
   do not depend on the number of threads, on its neighbours in the pass, or on how its prompt was
   cut into chunks.

   The groups of a model whose heads share keys (GQA) are queries of one item, so keys are read once
   for all of them. */

#include "numbers.h"

#define CHUNK 256 /* keys between two corrections of the running maximum */
#define QUERIES 8 /* that share the keys and values which an item reads */
#define WIDEST 512

struct attention {
    const real *q, *k, *v;            /* rows of packed tokens: heads of width numbers */
    real *out;                        /* as q */
    cached *cache;                    /* blocks of this layer */
    const int64_t *shares;            /* 4 a share: start in tables, first position, tokens, row */
    const int64_t *items;             /* 3 an item: share, its first token, tokens */
    const int32_t *tables;            /* blocks of all shares */
    int64_t q_stride, k_stride, v_stride, out_stride; /* numbers from a token to the next */
    int64_t block_stride;             /* numbers from a block to the next */
    int64_t heads, group, width, block; /* of keys; queries a head of keys; numbers; tokens */
    int64_t window;                   /* tokens that a token sees, itself included; 0: all */
    double scale;
};

static inline cached *keys_of(const struct attention *c, int64_t block, int64_t head) {
    int64_t each = c->width * padded(c->block) + c->block * padded(c->width);
    return c->cache + block * c->block_stride + head * each;
}

static inline cached *values_of(const struct attention *c, cached *keys) {
    return keys + c->width * padded(c->block);
}

/* The first key that a query at `position` sees. */
static inline int64_t first_of(const struct attention *c, int64_t position) {
    return c->window && position >= c->window ? position - c->window + 1 : 0;
}

/* Write the keys and values of the tokens of shares `first` to `last`. */
static void write_shares(int64_t first, int64_t last, void *context) {
    const struct attention *c = context;
    int64_t line = padded(c->block), row_of_value = padded(c->width);
    for (int64_t item = first; item < last; item++) {
        const int64_t *share = c->shares + 4 * (item / c->heads);
        int64_t head = item % c->heads;
        for (int64_t i = 0; i < share[2]; i++) {
            int64_t position = share[1] + i, slot = position % c->block;
            cached *keys = keys_of(c, c->tables[share[0] + position / c->block], head);
            cached *value = values_of(c, keys) + slot * row_of_value;
            const real *k = c->k + (share[3] + i) * c->k_stride + head * c->width;
            const real *v = c->v + (share[3] + i) * c->v_stride + head * c->width;
            for (int64_t d = 0; d < c->width; d++) keys[d * line + slot] = to_cached(k[d]);
            for (int64_t d = 0; d < c->width; d++) value[d] = to_cached(v[d]);
        }
    }
}

/* The output of `count` queries that share their keys: tokens of one share, heads of one group. */
static inline __attribute__((always_inline)) void
attend_queries(const struct attention *c, const int64_t *share, int64_t head, const real **q,
               real **out, const int64_t *positions, const int count) {
    const int64_t line = padded(c->block), row_of_value = padded(c->width);
    const int32_t *table = c->tables + share[0];
    real query[QUERIES][WIDEST], result[QUERIES][WIDEST], scores[QUERIES][CHUNK + ROUND];
    real most[QUERIES], sum[QUERIES];
    int64_t seen = 0, begin = INT64_MAX; /* keys that some query sees: begin to seen - 1 */
    for (int i = 0; i < count; i++) {
        for (int64_t d = 0; d < c->width; d++) query[i][d] = q[i][d] * (real)c->scale;
        memset(result[i], 0, sizeof(real) * row_of_value);
        most[i] = -INFINITY;
        sum[i] = 0;
        if (positions[i] + 1 > seen) seen = positions[i] + 1;
        if (first_of(c, positions[i]) < begin) begin = first_of(c, positions[i]);
    }
    for (int64_t chunk = begin / CHUNK * CHUNK; chunk < seen; chunk += CHUNK) {
        int64_t start = chunk > begin ? chunk : begin;
        int64_t end = chunk + CHUNK < seen ? chunk + CHUNK : seen;
        /* Scores, a vector of keys at a time. Blocks need not begin where chunks do. */
        for (int64_t key = start; key < end;) {
            int64_t slot = key % c->block, first = slot / LANES * LANES; /* of the vector */
            int64_t some = c->block - first < LANES ? c->block - first : LANES;
            int64_t here = some - (slot - first) < end - key ? some - (slot - first) : end - key;
            const cached *keys = keys_of(c, table[key / c->block], head) + first;
            lanes even[QUERIES], odd[QUERIES];
            for (int i = 0; i < count; i++) even[i] = odd[i] = (lanes){0};
            int64_t d = 0;
            for (; d + 1 < c->width; d += 2) {
                lanes a = load_cached(keys + d * line), b = load_cached(keys + (d + 1) * line);
                for (int i = 0; i < count; i++) {
                    even[i] += query[i][d] * a;
                    odd[i] += query[i][d + 1] * b;
                }
            }
            if (d < c->width) {
                lanes a = load_cached(keys + d * line);
                for (int i = 0; i < count; i++) even[i] += query[i][d] * a;
            }
            for (int i = 0; i < count; i++) {
                real all[LANES];
                lanes score = even[i] + odd[i];
                memcpy(all, &score, sizeof all);
                memcpy(scores[i] + (key - chunk), all + (slot - first), here * sizeof(real));
            }
            key += here;
        }
        /* Softmax so far. What a query does not see weighs nothing. */
        for (int i = 0; i < count; i++) {
            int64_t from = first_of(c, positions[i]), low = from > chunk ? from - chunk : 0;
            int64_t high = positions[i] + 1 - chunk < CHUNK ? positions[i] + 1 - chunk : CHUNK;
            for (int64_t t = 0; t < low && t < CHUNK; t++) scores[i][t] = -INFINITY;
            if (high < 0) high = 0;
            for (int64_t t = high; t < padded(end - chunk); t++) scores[i][t] = -INFINITY;
            real now = most[i];
            for (int64_t t = low; t < high; t++) now = scores[i][t] > now ? scores[i][t] : now;
            real correction = 1;
            if (now > most[i]) correction = most[i] == -INFINITY ? 0 : (real)exp(most[i] - now);
            most[i] = now;
            real shift = now == -INFINITY ? 0 : now;
            lanes total = {0};
            for (int64_t t = 0; t < padded(end - chunk); t += LANES) {
                lanes weight = exponential(*(lanes *)(scores[i] + t) - shift);
                *(lanes *)(scores[i] + t) = weight;
                total += weight;
            }
            real part = 0;
            for (int t = 0; t < LANES; t++) part += total[t];
            sum[i] = sum[i] * correction + part;
            for (int64_t d = 0; d < row_of_value; d += LANES)
                *(lanes *)(result[i] + d) *= correction;
        }
        /* Values. Those behind `end` or before `start` may be anything, NaN included: not read. */
        for (int64_t d = 0; d < row_of_value; d += LANES) {
            lanes mixed[QUERIES];
            for (int i = 0; i < count; i++) mixed[i] = *(lanes *)(result[i] + d);
            for (int64_t key = start; key < end;) {
                int64_t slot = key % c->block;
                int64_t here = c->block - slot < end - key ? c->block - slot : end - key;
                cached *keys = keys_of(c, table[key / c->block], head);
                const cached *value = values_of(c, keys) + slot * row_of_value + d;
                for (int64_t t = 0; t < here; t++, value += row_of_value) {
                    lanes v = load_cached(value);
                    for (int i = 0; i < count; i++) mixed[i] += scores[i][key - chunk + t] * v;
                }
                key += here;
            }
            for (int i = 0; i < count; i++) *(lanes *)(result[i] + d) = mixed[i];
        }
    }
    for (int i = 0; i < count; i++)
        for (int64_t d = 0; d < c->width; d++) out[i][d] = result[i][d] / sum[i];
}

/* Items `first` to `last`, each of some tokens of a share and one head of keys. */
static void attend_items(int64_t first, int64_t last, void *context) {
    const struct attention *c = context;
    for (int64_t number = first; number < last; number++) {
        const int64_t *item = c->items + 3 * (number / c->heads);
        const int64_t *share = c->shares + 4 * item[0];
        int64_t head = number % c->heads, total = item[2] * c->group;
        for (int64_t done = 0; done < total; done += QUERIES) {
            const real *q[QUERIES];
            real *out[QUERIES];
            int64_t positions[QUERIES];
            int count = total - done < QUERIES ? (int)(total - done) : QUERIES;
            for (int i = 0; i < count; i++) {
                int64_t token = item[1] + (done + i) / c->group;
                int64_t row = share[3] + token, which = head * c->group + (done + i) % c->group;
                q[i] = c->q + row * c->q_stride + which * c->width;
                out[i] = c->out + row * c->out_stride + which * c->width;
                positions[i] = share[1] + token;
            }
            switch (count) { /* a constant number of queries keeps their sums in registers */
                case 1: attend_queries(c, share, head, q, out, positions, 1); break;
                case 2: attend_queries(c, share, head, q, out, positions, 2); break;
                case 3: attend_queries(c, share, head, q, out, positions, 3); break;
                case 4: attend_queries(c, share, head, q, out, positions, 4); break;
                case 8: attend_queries(c, share, head, q, out, positions, 8); break;
                default: attend_queries(c, share, head, q, out, positions, count);
            }
        }
    }
}

/* Write the new keys and values, then attend. `run` is PyTorch's own parallel loop. */
int attend(struct attention *c, int64_t shares, int64_t items, parallel_for run) {
    int failed = run(0, shares * c->heads, 16, write_shares, c);
    return failed ? failed : run(0, items * c->heads, 1, attend_items, c);
}
