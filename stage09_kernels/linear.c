/* Linear layers over weights that were laid out once, when the model was loaded.

   The outputs are cut into panels of 64. A panel has its weights input by input, 64 numbers each,
   so that a product reads memory forwards, a piece of a panel at a time: all rows take it from the
   first cache, up to 6 of them by one reading, and meanwhile the next piece comes from memory. The
   sums of a row are made input by input, in order: its bits do not depend on the rows beside it.

   In bfloat16 two inputs are beside each other, which is what the instruction for bfloat16 products
   takes (AVX512-BF16). It rounds x to bfloat16 as well, and takes subnormal numbers for 0. */

#include "numbers.h"

#if WEIGHT == 2 && REAL == 4 && defined(__AVX512BF16__)
#define PAIRED 1
#else
#define PAIRED 0
#endif

#define PANEL 64
#if WEIGHT == 2
#define STEP (2 * PANEL) /* numbers of a panel for one step: an input, or two in bfloat16 */
#else
#define STEP PANEL
#endif
#define LINE (64 / WEIGHT) /* numbers in a cache line */
#define PIECE 128 /* steps at a time: 32 KiB of weights, which stay in the first cache */
#define MOST 64  /* rows at a time: their x stays in the second */
#define ROWS 6   /* rows at a time in registers */
#define VECTORS (PANEL / LANES)
#if BYTES == 32 || defined(__SSE2__) && BYTES == 16
#define WIDE 2 /* vectors of outputs at a time: the sums of ROWS rows fill 16 registers */
#else
#define WIDE 4 /* or 32 registers */
#endif

enum { PLAIN, GELU, GATED }; /* GATED: a panel has 32 gates and the 32 numbers they open */

struct linear {
    const real *x;
    real *out;
    const weight *weights; /* (panels, inputs, 64); bfloat16: (panels, inputs / 2, 64, 2) */
    uint32_t *pairs;       /* room for x as pairs of bfloat16: (rows, inputs / 2) */
    const real *bias;      /* (panels * 64), or none */
    int64_t x_stride, out_stride, inputs, outputs, rows;
    int64_t way, residual; /* residual: add to what is in `out` */
    int64_t steps;         /* set by `linear`: inputs, in bfloat16 pairs of them */
};

static inline lanes gelu(lanes x) { /* 0.5 x (1 + tanh(u)) = x sigmoid(2 u) */
    return x * sigmoid(x * (real)1.5957691216057308 * ((real)0.044715 * x * x + 1));
}

typedef real sums_of[PANEL]; /* of one row */

/* Add to the sums of `rows` rows what the steps `begin` to `end` of a panel give. In memory the
   next steps follow these: a line of them is asked for in each step, where `ahead` is. */
static inline __attribute__((always_inline)) void
add_rows(const struct linear *l, const weight *panel, int64_t row, int64_t begin, int64_t end,
         int64_t ahead, sums_of *sums, const int rows) {
#if PAIRED
    const uint32_t *x = l->pairs + row * l->steps;
#else
    const real *x = l->x + row * l->x_stride;
#endif
    for (int part = 0; part < VECTORS; part += WIDE) {
        lanes some[ROWS][WIDE];
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < WIDE; j++) some[i][j] = *(lanes *)(sums[i] + (part + j) * LANES);
        for (int64_t k = begin; k < end; k++) {
            const weight *line = panel + k * STEP + part * LANES * (STEP / PANEL);
            __builtin_prefetch(line + ahead);
#if WEIGHT == 2
            wholes read[WIDE];
            for (int j = 0; j < WIDE; j++) read[j] = *(const wholes *)(line + 2 * j * LANES);
#else
            lanes read[WIDE];
            for (int j = 0; j < WIDE; j++) read[j] = *(const lanes *)(line + j * LANES);
#endif
            for (int i = 0; i < rows; i++) {
#if PAIRED
                __m512bh two = (__m512bh)((wholes){0} + x[i * l->steps + k]);
                for (int j = 0; j < WIDE; j++)
                    some[i][j] = _mm512_dpbf16_ps(some[i][j], (__m512bh)read[j], two);
#elif WEIGHT == 2
                real even = x[i * l->x_stride + 2 * k];
                real odd = 2 * k + 1 < l->inputs ? x[i * l->x_stride + 2 * k + 1] : 0;
                for (int j = 0; j < WIDE; j++) {
                    some[i][j] += even * floats(read[j] << 16);
                    some[i][j] += odd * floats(read[j] & 0xffff0000u);
                }
#else
                for (int j = 0; j < WIDE; j++) some[i][j] += x[i * l->x_stride + k] * read[j];
#endif
            }
        }
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < WIDE; j++) *(lanes *)(sums[i] + (part + j) * LANES) = some[i][j];
    }
}

/* What a row of a panel becomes once its sums are complete. */
static void finish(const struct linear *l, int64_t panel, int64_t row, real *sums) {
    int64_t size = l->way == GATED ? PANEL / 2 : PANEL, first = panel * size;
    real *out = l->out + row * l->out_stride + first;
    lanes *y = (lanes *)sums;
    if (l->way == GELU) for (int j = 0; j < VECTORS; j++) y[j] = gelu(y[j]);
    if (l->way == GATED)
        for (int j = 0; j < VECTORS / 2; j++) y[j] *= sigmoid(y[j]) * y[j + VECTORS / 2];
    for (int64_t j = 0; j < size / LANES; j++) {
        int64_t left = l->outputs - first - j * LANES;
        if (left >= LANES) {
            lanes *place = (lanes *)(out + j * LANES);
            *place = l->residual ? *place + y[j] : y[j];
        } else {
            for (int64_t t = 0; t < left; t++)
                out[j * LANES + t] = y[j][t] + (l->residual ? out[j * LANES + t] : 0);
        }
    }
}

static void panels(int64_t first, int64_t last, void *context) {
    const struct linear *l = context;
    sums_of sums[MOST];
    for (int64_t row = 0; row < l->rows; row += MOST)
        for (int64_t panel = first; panel < last; panel++) {
            const weight *w = l->weights + panel * l->steps * STEP;
            int64_t count = l->rows - row < MOST ? l->rows - row : MOST;
            for (int64_t i = 0; i < count; i++)
                if (l->bias) memcpy(sums[i], l->bias + panel * PANEL, sizeof(sums_of));
                else memset(sums[i], 0, sizeof(sums_of));
            for (int64_t k = 0, end; k < l->steps; k = end) {
                end = k + PIECE < l->steps ? k + PIECE : l->steps;
                for (int64_t i = 0; i < count; i += ROWS) {
                    int64_t ahead = (end - k) * STEP + i / ROWS % 4 * LINE;
                    switch (count - i) { /* constants keep the sums in registers */
                        case 1: add_rows(l, w, row + i, k, end, ahead, sums + i, 1); break;
                        case 2: add_rows(l, w, row + i, k, end, ahead, sums + i, 2); break;
                        case 3: add_rows(l, w, row + i, k, end, ahead, sums + i, 3); break;
                        case 4: add_rows(l, w, row + i, k, end, ahead, sums + i, 4); break;
                        case 5: add_rows(l, w, row + i, k, end, ahead, sums + i, 5); break;
                        default: add_rows(l, w, row + i, k, end, ahead, sums + i, ROWS);
                    }
                }
            }
            for (int64_t i = 0; i < count; i++) finish(l, panel, row + i, sums[i]);
        }
}

#if PAIRED
static void pair_rows(int64_t first, int64_t last, void *context) {
    const struct linear *l = context;
    for (int64_t row = first; row < last; row++) {
        const real *x = l->x + row * l->x_stride;
        uint16_t *pairs = (uint16_t *)(l->pairs + row * l->steps);
        int64_t k = 0;
        for (; k + 2 * LANES <= l->inputs; k += 2 * LANES)
            *(wholes *)(pairs + k) = (wholes)_mm512_cvtne2ps_pbh(
                *(const lanes *)(x + k + LANES), *(const lanes *)(x + k));
        for (; k < 2 * l->steps; k++) pairs[k] = k < l->inputs ? narrow(x[k]) : 0;
    }
}
#endif

int linear(struct linear *l, parallel_for run) {
    l->steps = STEP == PANEL ? l->inputs : (l->inputs + 1) / 2;
#if PAIRED
    int failed = run(0, l->rows, 8, pair_rows, l);
    if (failed) return failed;
#endif
    int64_t size = l->way == GATED ? PANEL / 2 : PANEL;
    return run(0, (l->outputs + size - 1) / size, 1, panels, l);
}
