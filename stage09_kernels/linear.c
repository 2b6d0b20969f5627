/* Linear layers over weights that were laid out once, when the model was loaded.

   The outputs are cut into panels of 64. A panel has its weights input by input, 64 numbers each,
   so that a product reads memory forwards. Up to 6 rows share what is read. Their sums stay in
   registers, and each is made input by input, in order: the bits of a row do not depend on the rows
   beside it.

   In bfloat16 two inputs are beside each other, which is what the instruction for bfloat16 products
   takes (AVX512-BF16). It rounds x to bfloat16 as well, and takes subnormal numbers for 0. */

#include "numbers.h"

#if WEIGHT == 2 && REAL == 4 && defined(__AVX512BF16__)
#define PAIRED 1
#else
#define PAIRED 0
#endif

#define PANEL 64
#define ROWS 6
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
};

static inline lanes gelu(lanes x) { /* 0.5 x (1 + tanh(u)) = x sigmoid(2 u) */
    return x * sigmoid(x * (real)1.5957691216057308 * ((real)0.044715 * x * x + 1));
}

static inline __attribute__((always_inline)) void
panel_rows(const struct linear *l, int64_t panel, int64_t row, const int rows) {
#if WEIGHT == 2
    const int64_t half = (l->inputs + 1) / 2;
    const weight *w = l->weights + panel * half * 2 * PANEL;
#else
    const weight *w = l->weights + panel * l->inputs * PANEL;
#endif
#if !PAIRED
    const real *x = l->x + row * l->x_stride;
#endif
    lanes sums[ROWS][VECTORS];
    for (int part = 0; part < VECTORS; part += WIDE) {
        lanes some[ROWS][WIDE];
        const real *bias = l->bias + panel * PANEL + part * LANES;
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < WIDE; j++)
                some[i][j] = l->bias ? *(const lanes *)(bias + j * LANES) : (lanes){0};
#if WEIGHT == 2
        for (int64_t k = 0; k < half; k++) {
            wholes read[WIDE];
            for (int j = 0; j < WIDE; j++)
                read[j] = *(const wholes *)(w + 2 * (k * PANEL + (part + j) * LANES));
            for (int i = 0; i < rows; i++) {
#if PAIRED
                __m512bh two = (__m512bh)((wholes){0} + l->pairs[(row + i) * half + k]);
                for (int j = 0; j < WIDE; j++)
                    some[i][j] = _mm512_dpbf16_ps(some[i][j], (__m512bh)read[j], two);
#else
                real even = x[i * l->x_stride + 2 * k];
                real odd = 2 * k + 1 < l->inputs ? x[i * l->x_stride + 2 * k + 1] : 0;
                for (int j = 0; j < WIDE; j++) {
                    some[i][j] += even * floats(read[j] << 16);
                    some[i][j] += odd * floats(read[j] & 0xffff0000u);
                }
#endif
            }
        }
#else
        for (int64_t k = 0; k < l->inputs; k++) {
            lanes read[WIDE];
            for (int j = 0; j < WIDE; j++)
                read[j] = *(const lanes *)(w + k * PANEL + (part + j) * LANES);
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < WIDE; j++) some[i][j] += x[i * l->x_stride + k] * read[j];
        }
#endif
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < WIDE; j++) sums[i][part + j] = some[i][j];
    }
    int64_t size = l->way == GATED ? PANEL / 2 : PANEL, first = panel * size;
    for (int i = 0; i < rows; i++) {
        real *out = l->out + (row + i) * l->out_stride + first;
        lanes *y = sums[i];
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
}

static void panels(int64_t first, int64_t last, void *context) {
    const struct linear *l = context;
    for (int64_t panel = first; panel < last; panel++) {
        int64_t row = 0;
        for (; row + ROWS <= l->rows; row += ROWS) panel_rows(l, panel, row, ROWS);
        switch (l->rows - row) { /* constants keep the sums in registers */
            case 1: panel_rows(l, panel, row, 1); break;
            case 2: panel_rows(l, panel, row, 2); break;
            case 3: panel_rows(l, panel, row, 3); break;
            case 4: panel_rows(l, panel, row, 4); break;
            case 5: panel_rows(l, panel, row, 5); break;
        }
    }
}

#if PAIRED
static void pair_rows(int64_t first, int64_t last, void *context) {
    const struct linear *l = context;
    int64_t half = (l->inputs + 1) / 2;
    for (int64_t row = first; row < last; row++)
        for (int64_t k = 0; k < half; k++) {
            const real *x = l->x + row * l->x_stride + 2 * k;
            uint32_t odd = 2 * k + 1 < l->inputs ? narrow(x[1]) : 0;
            l->pairs[row * half + k] = odd << 16 | narrow(x[0]);
        }
}
#endif

int linear(struct linear *l, parallel_for run) {
#if PAIRED
    int failed = run(0, l->rows, 8, pair_rows, l);
    if (failed) return failed;
#endif
    int64_t size = l->way == GATED ? PANEL / 2 : PANEL;
    return run(0, (l->outputs + size - 1) / size, 1, panels, l);
}
