/* What naive.c and fast/ share: types of numbers, the layout of memory, the operations of a step.

   REAL, WEIGHT and CACHE are sizes in bytes. REAL is 4 or 8; WEIGHT and CACHE equal REAL, or are 2
   for bfloat16 if REAL is 4. Numbers that are multiplied in bfloat16 lie in pairs, as processors
   with an instruction for it expect them. CACHE 1 is for a later stage: whole numbers, with a scale
   for each key and each value. */

#pragma once

#include <stdint.h>

#if REAL == 8
typedef double real; /* to compute with */
#else
typedef float real;
#endif
#if WEIGHT == 2
typedef uint16_t weight, operand; /* operand: what a weight multiplies */
#else
typedef real weight, operand;
#endif
#if CACHE == 1
typedef int8_t cached;
typedef real factor; /* what a cached number is multiplied by */
#elif CACHE == 2
typedef uint16_t cached, factor;
#else
typedef real cached, factor;
#endif

#define PAD 16   /* rows in memory are padded to a multiple of it */
#define PANEL 64 /* outputs side by side in a packed weight */
#define K_STEP (WEIGHT == 2 ? 2 : 1)  /* inputs whose weights are interleaved */
#define K_PAD (WEIGHT == 2 ? 32 : 1) /* a panel's inputs are padded with zeros to a multiple */
#define PAIR (CACHE == 2 ? 2 : 1)    /* channels of keys that are interleaved */
#define MAX_HEAD_DIM 512
#define SCALES (CACHE == 1 ? 4 : 0) /* bytes of a token's two scales, behind the values */

static inline int64_t padded(int64_t count) { return (count + PAD - 1) / PAD * PAD; }
static inline int64_t padded_inputs(int64_t count) { return (count + K_PAD - 1) / K_PAD * K_PAD; }

/* What a token enters the first layer with: its row of the table, plus GPT-2's of its position. */
struct embed {
    const weight *table, *positions; /* (vocabulary, width), (positions, width); either: or none */
    real *out;
    int64_t out_stride, width;
    void *read_row;     /* or none: the function of a stage with a table in its own format */
    const void *format; /* what that function reads */
};

/* LayerNorm: (x - mean) / deviation * gain + bias, for each head of a row. Not centred, it is
   RMSNorm: the mean counts as 0. */
struct norm {
    const real *x;
    void *out;
    const real *gain, *bias; /* bias: or none */
    int64_t x_stride, out_stride, width, heads, centred;
    int64_t out_is_operand; /* out: operand instead of real */
    double epsilon;
};

/* out = epilogue(x W^T + bias) + residual. */
struct linear {
    const operand *x; /* (rows, inputs); in bfloat16, an odd row ends with one more 0 */
    void *out;
    const weight *weights; /* (panels, inputs, 64); bfloat16: (panels, inputs / 2, 64, 2), padded */
    const real *bias;      /* (panels * 64), or none */
    const real *residual;  /* or none; may be `out` itself */
    int64_t x_stride, out_stride, residual_stride, inputs, outputs, epilogue, out_is_operand;
    int64_t residual_of_all; /* residual has a row for each token, out only the wanted ones */
    int64_t x_is_operand;    /* x: operand instead of real; only `product` reads the latter */
    void *product;           /* or none: the function of a stage with weights in its own format */
    const void *format;      /* what that function reads */
    void *scratch;           /* where it may write */
};
enum { PLAIN, GELU, SILU_MUL }; /* SILU_MUL: a panel has 32 gates and the 32 numbers they scale */

/* Rotary positions, in place: channels i and i + head_dim / 2 of a head form a pair. */
struct rope {
    real *x;
    int64_t x_stride, head_dim, heads;
};

/* A block holds `block` tokens of a layer; for each KV head the keys, transposed: (even head_dim,
   padded block), in bfloat16 (even head_dim / 2, padded block, 2), then the values:
   (block, padded head_dim). */
struct attention {
    const real *q, *k, *v; /* a row per token: heads of head_dim numbers */
    operand *out;          /* laid out like q */
    cached *cache;         /* blocks of this layer */
    int64_t q_stride, k_stride, v_stride, out_stride; /* numbers from one token to the next */
    int64_t block_stride;                             /* numbers from one block to the next */
    int64_t heads, group;                             /* KV heads; query heads for each */
    int64_t head_dim, block;
    double scale;
};

struct share { /* the tokens of one sequence in a pass */
    int64_t table, position, tokens, row; /* its place in `tables`; of the first token; how many */
};

struct item { /* neighbouring tokens of a share, for one thread to attend */
    int64_t share, first, tokens, out_row;
};

struct pass { /* what changes from one pass to the next */
    const int64_t *ids; /* a token each */
    const struct share *shares;
    const struct item *items, *out_items; /* of all tokens; of those whose output is wanted */
    const int32_t *tables;                /* blocks of all shares */
    const int64_t *out_rows;              /* the tokens whose logits are wanted */
    const real *cosines, *sines;          /* (positions, head_dim / 2) */
    int64_t n_shares, n_items, n_out_items, n_rows, n_out_rows;
};

struct operation {
    int64_t kind, rows; /* rows: all tokens, or those that are wanted */
    union {
        struct embed embed;
        struct norm norm;
        struct linear linear;
        struct rope rope;
        struct attention attention;
    } of;
    const struct pass *pass; /* set by `step` */
};
enum { EMBED, NORM, LINEAR, ROPE, ATTEND };
enum { ALL_ROWS, OUT_ROWS }; /* OUT_ROWS: from the last layer's attention on */

static inline int64_t rows_of(const struct operation *o) {
    return o->rows == ALL_ROWS ? o->pass->n_rows : o->pass->n_out_rows;
}

/* The share that a token of the pass belongs to. */
static inline const struct share *share_of(const struct pass *p, int64_t token) {
    const struct share *s = p->shares;
    while (token >= s->row + s->tokens) s++;
    return s;
}

static inline int64_t position_of(const struct pass *p, int64_t token) {
    const struct share *s = share_of(p, token);
    return s->position + token - s->row;
}

static inline cached *keys_of(const struct attention *a, int64_t block, int64_t head) {
    int64_t keys = (a->head_dim + a->head_dim % 2) * padded(a->block);
    return a->cache + block * a->block_stride +
           head * (keys + a->block * padded(a->head_dim) + SCALES * padded(a->block));
}

static inline cached *values_of(const struct attention *a, int64_t block, int64_t head) {
    return keys_of(a, block, head) + (a->head_dim + a->head_dim % 2) * padded(a->block);
}
