/* Linear layers over weights that were laid out once, when the model was loaded.

   The outputs are cut into panels of 64. A panel stores its weights input by input, 64 numbers
   each, so a product reads memory forwards, KC inputs of a panel at a time. All rows take these
   from the L1 cache, MR rows per read, while the next ones come from memory. A row's sums add its
   inputs in order, so its bits do not depend on the rows beside it.

   The names are those of BLIS: MR rows and NR vectors of outputs are a register tile, KC inputs and
   MC rows a block that stays in the processor's cache. With weights in bfloat16, x is bfloat16 too,
   and a step takes two inputs, whose weights lie in pairs. Without an instruction for pairs each
   panel widens its block of x, and computes in float32. */

#include "pool.h"
#include "tiles.h"
#include "vec.h"

#define STEP (K_STEP * PANEL) /* weights per step */
#define LINE (64 / (int)sizeof(weight)) /* weights in a cache line */
#define VECTORS (PANEL / LANES)
#define MC 96 /* rows at a time: their x stays in L2 */
#ifndef LINEAR_PREFETCH /* the benchmark sets these three, to measure what they gain */
#define LINEAR_PREFETCH 1 /* gain: 1.22x, bfloat16 1.15x */
#endif
#ifndef KC
#define KC 128 /* steps at a time: 32 KiB, which stay in L1; gain: 1.07x, bfloat16 1.04x */
#endif
#ifndef MR
#define MR 6 /* rows at a time in registers; gain: 1.87x, bfloat16 2.27x */
#endif
#if BYTES == 32 || defined(__SSE2__) && BYTES == 16
#define NR 2 /* vectors of outputs at a time: the sums of MR rows fit in 16 registers */
#else
#define NR 4 /* or in 32 registers */
#endif
#define FORWARDS (NR >= VECTORS) /* a tile is as wide as a panel, so it reads without gaps */

#if WEIGHT == 2 && !defined(__AVX512BF16__)
#define WIDEN 1 /* gain with AVX2: 1.1x, from 12 rows on 1.2x */
#else
#define WIDEN 0
#endif
#define HALVES (WIDEN ? 2 : 1) /* of a step, one after another */
#define WIDE_STEPS 64 /* widened at a time */

typedef real sums_of[PANEL]; /* of one row */

/* The weights of a vector of outputs: of a step, or of its first or second half. The mask is read
   each time, because a tile leaves it no register. Gain with AVX2: 1.1x, from 8 rows on. */
static inline weight_vec load_weights(const weight *w, int half) {
#if WIDEN
#define FOUR 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u
    static const _Alignas(64) volatile uint32_t mask[16] = {FOUR, FOUR, FOUR, FOUR};
    pairs both = *(const pairs *)w;
    return (vec)(half ? both & *(const volatile pairs *)mask : both << 16);
#endif
    return *(const weight_vec *)w;
}

/* Add `steps` steps to the sums of `rows` rows. x and `panel` begin with the first of them. The
   steps follow each other in memory, and for few rows the processor fetches them by itself in time.
   Many rows leave memory idle while they use a block, so each step of a full tile prefetches a line
   of the next block, `next` weights on. A tile narrower than a panel reads a block in rounds, with
   gaps, and the processor fetches less by itself. So one row takes more vectors (gain with AVX2:
   1.9x), and the rounds of more rows prefetch the next block line after line, not in the order in
   which they read (1.05x to 1.3x with 2 to 16 rows; bfloat16 1.1x to 1.6x with 2 to 6, and the same
   with more). */
static inline __attribute__((always_inline)) void
madd_rows(const weight_factor *x, int64_t stride, const weight *panel, int64_t steps, int64_t next,
          sums_of *sums, const int rows) {
    const int most = rows == 1 ? 4 * NR : NR, wide = most < VECTORS ? most : VECTORS;
    const int size = wide * LANES * K_STEP; /* weights that a tile reads of a step */
    for (int first = 0; first < VECTORS; first += wide) {
        vec tile[MR][VECTORS];
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < wide; j++) tile[i][j] = *(vec *)(sums[i] + (first + j) * LANES);
        for (int64_t k = 0; k < steps; k++) {
            const weight *line = panel + k * STEP + first * LANES * K_STEP;
            if (FORWARDS ? rows == MR : rows > 1)
                __builtin_prefetch(panel + next + (first / wide * steps + k) * size);
            for (int half = 0; half < HALVES; half++) {
                weight_vec w[VECTORS];
                for (int j = 0; j < wide; j++) w[j] = load_weights(line + j * LANES * K_STEP, half);
                for (int i = 0; i < rows; i++)
                    for (int j = 0; j < wide; j++)
                        tile[i][j] = madd(tile[i][j], w[j], x[i * stride + k * HALVES + half]);
            }
        }
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < wide; j++) *(vec *)(sums[i] + (first + j) * LANES) = tile[i][j];
    }
}

/* The same for `count` rows. */
static void madd_block(const weight_factor *x, int64_t stride, const weight *panel, int64_t steps,
                       int64_t prefetch, sums_of *sums, int64_t count) {
    for (int64_t i = 0; i < count; i += MR, x += MR * stride, sums += MR) {
        int64_t next = FORWARDS ? steps * STEP + i / MR % 4 * LINE : i < 4 * MR ? steps * STEP : 0;
        if (!prefetch) next = 0;
        switch (count - i < MR ? count - i : MR) { /* constants keep the sums in registers */
            case 1: madd_rows(x, stride, panel, steps, next, sums, 1); break;
            case 2: madd_rows(x, stride, panel, steps, next, sums, 2); break;
            case 3: madd_rows(x, stride, panel, steps, next, sums, 3); break;
            case 4: madd_rows(x, stride, panel, steps, next, sums, 4); break;
            case 5: madd_rows(x, stride, panel, steps, next, sums, 5); break;
            default: madd_rows(x, stride, panel, steps, next, sums, MR);
        }
    }
}

/* Store a row of a panel whose sums are complete, with GELU, gate or residual applied. */
static void epilogue(const struct operation *o, int64_t panel, int64_t row, real *sums) {
    const struct linear *l = &o->of.linear;
    int64_t size = l->epilogue == SILU_MUL ? PANEL / 2 : PANEL, first = panel * size;
    vec *y = (vec *)sums;
    const real *residual = l->residual;
    if (residual) {
        int64_t residual_row = l->residual_of_all ? o->pass->out_rows[row] : row;
        residual += residual_row * l->residual_stride + first;
    }
    if (l->epilogue == GELU) for (int j = 0; j < VECTORS; j++) y[j] = gelu(y[j]);
    if (l->epilogue == SILU_MUL)
        for (int j = 0; j < VECTORS / 2; j++) y[j] = silu_mul(y[j], y[j + VECTORS / 2]);
    for (int64_t j = 0; j < size && first + j < l->outputs; j += LANES) {
        int64_t place = row * l->out_stride + first + j, left = l->outputs - first - j;
        vec sum = y[j / LANES];
        if (residual) sum += load_partial(residual + j, left, 0);
        if (l->out_is_operand) store_operand((operand *)l->out + place, sum, left);
        else store_real((real *)l->out + place, sum, left);
    }
}

#if TILES && WEIGHT == 2
static void finish(const struct operation *o, int64_t panel, int64_t row, void *sums) {
    const real *bias = o->of.linear.bias;
    for (int j = 0; bias && j < PANEL; j += LANES)
        *(vec *)((real *)sums + j) += *(const vec *)(bias + panel * PANEL + j);
    epilogue(o, panel, row, sums);
}

static void linear(int64_t first, int64_t last, void *context) { /* panels */
    const struct operation *o = context;
    const struct linear *l = &o->of.linear;
    const struct tile_product product = {
        .x = (const char *)l->x,
        .panels = (const char *)l->weights,
        .x_stride = l->x_stride * 2,
        .panel_stride = padded_inputs(l->inputs) * PANEL * 2,
        .units = l->inputs / UNIT,
        .left = l->inputs % UNIT * 2,
        .finish = finish,
    };
    multiply_tiles(o, first, last, product, 0);
}
#else
static void linear(int64_t first, int64_t last, void *context) { /* panels */
    const struct operation *o = context;
    const struct linear *l = &o->of.linear;
    const int64_t rows = rows_of(o), steps = (l->inputs + K_STEP - 1) / K_STEP;
    const int64_t panel_size = padded_inputs(l->inputs) * PANEL;
    /* Many rows are bound by arithmetic. Where a tile is as wide as a panel (AVX-512), they take a
       panel whole: pieces would load and store the sums of all rows each time, which costs 1.1x. */
    const int many = FORWARDS && rows > MC;
    sums_of sums[MC];
    for (int64_t row = 0; row < rows; row += MC)
        for (int64_t panel = first; panel < last; panel++) {
            const weight *w = l->weights + panel * panel_size;
            int64_t count = rows - row < MC ? rows - row : MC;
            for (int64_t i = 0; i < count; i++)
                if (l->bias) memcpy(sums[i], l->bias + panel * PANEL, sizeof(sums_of));
                else memset(sums[i], 0, sizeof(sums_of));
            const int prefetch = LINEAR_PREFETCH && !many && count >= (FORWARDS ? 2 * MR : 2);
            int64_t block = FORWARDS || count < 2 || count > 16 ? KC : count > 8 ? 16 : 8;
            if (many) block = steps;
            if (WIDEN && block > WIDE_STEPS) block = WIDE_STEPS;
            for (int64_t k = 0, end; k < steps; k = end) {
                end = k + block < steps ? k + block : steps;
                const operand *x = l->x + row * l->x_stride + k * K_STEP;
                int64_t stride = l->x_stride / K_STEP;
#if WIDEN
                real numbers[MC * WIDE_STEPS * 2];
                stride = (end - k) * 2;
                for (int64_t i = 0; i < count; i++)
                    for (int64_t n = 0; n < stride; n++)
                        numbers[i * stride + n] = load(x + i * l->x_stride, n, WEIGHT);
                madd_block(numbers, stride, w + k * STEP, end - k, prefetch, sums, count);
#else
                madd_block((const weight_factor *)x, stride, w + k * STEP, end - k, prefetch, sums,
                           count);
#endif
            }
            for (int64_t i = 0; i < count; i++) epilogue(o, panel, row + i, sums[i]);
        }
}
#endif

static void add_linear(struct loops *list, struct operation *o) {
    void (*product)(struct loops *, struct operation *) = o->of.linear.product;
    if (product) {
        product(list, o);
        return;
    }
    int64_t size = o->of.linear.epilogue == SILU_MUL ? PANEL / 2 : PANEL;
    add_loop(list, (o->of.linear.outputs + size - 1) / size, linear, o);
}
