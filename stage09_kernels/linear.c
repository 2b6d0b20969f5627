/* Linear layers over weights that were laid out once, when the model was loaded.

   The outputs are cut into panels of 64. A panel stores its weights input by input, 64 numbers
   each, so a product reads memory forwards, one piece of a panel at a time. All rows take the piece
   from the L1 cache, up to 6 rows per read, while the next piece comes from memory. A row's sums
   add its inputs in order, so its bits do not depend on the rows beside it.

   With weights in bfloat16, x is bfloat16 too, and a step takes two inputs, whose weights lie in
   pairs. */

#include "loops.h"
#include "numbers.h"

#define EACH (WEIGHT == 2 ? 2 : 1) /* inputs per step */
#define PANEL 64
#define STEP (EACH * PANEL) /* weights per step */
#define LINE (64 / WEIGHT)  /* numbers in a cache line */
#define PIECE 128 /* steps at a time: 32 KiB of weights, which stay in the L1 cache */
#define MOST 96   /* rows at a time: their x stays in L2 */
#define ROWS 6    /* rows at a time in registers */
#define AHEAD 16384 /* bytes to prefetch ahead with fewer rows, which read more than they compute */
#define VECTORS (PANEL / LANES)
#if BYTES == 32 || defined(__SSE2__) && BYTES == 16
#define WIDE 2 /* vectors of outputs at a time: the sums of ROWS rows fit in 16 registers */
#else
#define WIDE 4 /* or in 32 registers */
#endif

enum { PLAIN, GELU, GATED }; /* GATED: a panel has 32 gates and the 32 numbers they open */

struct linear {
    const input *x; /* (rows, inputs); in bfloat16, an odd row ends with one more 0 */
    void *out;
    const weight *weights; /* (panels, inputs, 64); bfloat16: (panels, inputs / 2, 64, 2) */
    const real *bias;      /* (panels * 64), or none */
    const real *residual;  /* rows to add, or none; may be `out` itself */
    const int64_t *chosen; /* which rows of `residual` to add, or none: all */
    int64_t x_stride, out_stride, residual_stride, inputs, outputs, rows, way;
    int64_t feeds; /* whether `out` is stored as a product's input instead of real */
    int64_t steps; /* set by `add_linear` */
};

static inline lanes gelu(lanes x) { /* 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)) */
    return opened(x, x * (real)1.5957691216057308 * ((real)0.044715 * x * x + 1));
}

typedef real sums_of[PANEL]; /* of one row */

/* Add steps `begin` to `end` of a panel to the sums of `rows` rows. The next steps follow in
   memory: each step prefetches one line of them, `ahead` numbers on, or with fewer rows than ROWS
   as many lines as it reads. */
static inline __attribute__((always_inline)) void
add_rows(const struct linear *l, const weight *panel, int64_t row, int64_t begin, int64_t end,
         int64_t ahead, sums_of *sums, const int rows) {
    const weight_factor *x = (const weight_factor *)(l->x + row * l->x_stride);
    const int64_t stride = l->x_stride / EACH;
    for (int part = 0; part < VECTORS; part += WIDE) {
        lanes held[ROWS][WIDE];
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < WIDE; j++) held[i][j] = *(lanes *)(sums[i] + (part + j) * LANES);
        for (int64_t k = begin; k < end; k++) {
            const weight *line = panel + k * STEP + part * LANES * EACH;
            if (rows < ROWS)
                for (int j = 0; j < WIDE * BYTES / 64; j++)
                    __builtin_prefetch(line + AHEAD / WEIGHT + j * LINE, 0, 2);
            else __builtin_prefetch(line + ahead);
            weight_lanes read[WIDE];
            for (int j = 0; j < WIDE; j++)
                read[j] = *(const weight_lanes *)(line + j * LANES * EACH);
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < WIDE; j++)
                    held[i][j] = add(held[i][j], read[j], x[i * stride + k]);
        }
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < WIDE; j++) *(lanes *)(sums[i] + (part + j) * LANES) = held[i][j];
    }
}

/* Store a row of a panel whose sums are complete, with GELU, gate or residual applied. */
static void finish(const struct linear *l, int64_t panel, int64_t row, real *sums) {
    int64_t size = l->way == GATED ? PANEL / 2 : PANEL, first = panel * size;
    lanes *y = (lanes *)sums;
    const real *more = l->residual;
    if (more) more += (l->chosen ? l->chosen[row] : row) * l->residual_stride + first;
    if (l->way == GELU) for (int j = 0; j < VECTORS; j++) y[j] = gelu(y[j]);
    if (l->way == GATED)
        for (int j = 0; j < VECTORS / 2; j++) y[j] = opened(y[j] * y[j + VECTORS / 2], y[j]);
    for (int64_t j = 0; j < size && first + j < l->outputs; j += LANES) {
        int64_t place = row * l->out_stride + first + j, left = l->outputs - first - j;
        real *out = (real *)l->out + place;
        if (l->feeds) feed((input *)l->out + place, y[j / LANES], left);
        else put(out, more ? some(more + j, left, 0) + y[j / LANES] : y[j / LANES], left);
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

static void add_linear(struct loops *list, struct linear *l) {
    int64_t size = l->way == GATED ? PANEL / 2 : PANEL;
    l->steps = (l->inputs + EACH - 1) / EACH;
    add_loop(list, (l->outputs + size - 1) / size, 1, panels, l);
}

int linear(struct linear *l, parallel_for run) {
    struct loop one;
    struct loops list = {&one, 0};
    add_linear(&list, l);
    return run_all(&list, run);
}
