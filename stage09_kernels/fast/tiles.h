/* Tiles (AMX): eight registers of 16 rows of 64 bytes, and instructions that multiply two of them.

   A tile of x has up to 16 rows of 32 inputs, a tile of weights 16 pairs of inputs of 16 outputs,
   as they lie in a panel, and one instruction adds their 8,192 products to 16 x 16 sums: 16 times
   what a vector instruction does. The order of a sum's additions is that of tiles.h. It does not
   depend on the number of rows, so a row's bits are the same alone and beside others; but they
   differ from those of vectors, so all rows take tiles.

   A thread sets the shape of its tiles before it uses them, and releases them when it is done, so
   that an idle thread has none that the system must save.

   The loop over tiles of a product is here, for weights in bfloat16 and for codes of 8 bits. */

#pragma once

#include "../operations.h"
#include "../tiles.h"

#define TILE_ROWS 16
/* The tiles: one of x, two of weights, four of sums. No enum: gcc 12 takes literals alone. */
#define X0 0
#define W0 2
#define W1 3
#define SUM0 4
#define SUM1 5
#define SUM2 6
#define SUM3 7

struct tile_shape { /* as the processor reads it */
    uint8_t palette, start, zeros[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

#if defined(__AMX_BF16__)
#include <immintrin.h>
/* gcc 12 does not know that tiles are loaded from memory: what was written must be there. */
#define memory_is_written() __asm__ volatile("" ::: "memory")
#define tile_load(tile, p, stride) _tile_loadd(tile, p, stride)
#define tile_store(tile, p, stride) _tile_stored(tile, p, stride)
#define tile_zero(tile) _tile_zero(tile)
#define tile_madd(sum, x, w) _tile_dpbf16ps(sum, x, w)
#define tile_madd_codes(sum, x, w) _tile_dpbsud(sum, x, w)
#define tile_configure(shape) _tile_loadconfig(shape)
#define tile_release() _tile_release()
#elif TILES
static _Thread_local struct {
    struct tile_shape shape;
    uint8_t rows[8][TILE_ROWS][64];
} emulated;
#define memory_is_written()
#define tile_release() memset(&emulated, 0xff, sizeof emulated)
#define tile_zero(tile) memset(emulated.rows[tile], 0, sizeof emulated.rows[tile])
static inline void tile_configure(const struct tile_shape *shape) {
    memset(&emulated, 0, sizeof emulated);
    emulated.shape = *shape;
}
static inline void tile_load(int tile, const void *p, int64_t stride) {
    tile_zero(tile);
    for (int i = 0; i < emulated.shape.rows[tile]; i++)
        memcpy(emulated.rows[tile][i], (const char *)p + i * stride, emulated.shape.bytes[tile]);
}
static inline void tile_store(int tile, void *p, int64_t stride) {
    for (int i = 0; i < emulated.shape.rows[tile]; i++)
        memcpy((char *)p + i * stride, emulated.rows[tile][i], emulated.shape.bytes[tile]);
}
static inline void tile_madd(int sums, int x, int w) {
    for (int i = 0; i < emulated.shape.rows[x]; i++)
        for (int j = 0; j < 16; j++) {
            float *sum = (float *)emulated.rows[sums][i] + j;
            uint16_t column[UNIT];
            for (int k = 0; k < UNIT; k++)
                column[k] = ((uint16_t *)emulated.rows[w][k / 2])[2 * j + k % 2];
            *sum = tile_sum(*sum, (uint16_t *)emulated.rows[x][i], column);
        }
}
static inline void tile_madd_codes(int sums, int x, int w) { /* signed x, unsigned w */
    for (int i = 0; i < emulated.shape.rows[x]; i++)
        for (int j = 0; j < 16; j++)
            for (int k = 0; k < 64; k++)
                ((int32_t *)emulated.rows[sums][i])[j] +=
                    (int8_t)emulated.rows[x][i][k] * emulated.rows[w][k / 4][4 * j + k % 4];
}
#endif

#if TILES
/* Tiles of x and sums with `rows` rows, at most 16, if they do not have them; those of weights have
   16. `set`: the rows they have; 0: there are no tiles yet. */
static inline void use_tiles(int *set, int64_t rows) {
    struct tile_shape shape = {.palette = 1};
    if (rows > TILE_ROWS) rows = TILE_ROWS;
    if (*set == rows) return;
    for (int i = 0; i < 8; i++) {
        shape.bytes[i] = 64;
        shape.rows[i] = i == W0 || i == W1 ? TILE_ROWS : rows;
    }
    tile_configure(&shape);
    *set = (int)rows;
}

#define TILE_MC 512 /* rows at a time: their x stays in L2 */
/* Few rows read a panel at once, from memory: 16 rows a whole one. 17 to 64 rows take 4 tiles of
   inputs at a time, more rows 6, 24 KiB that stay in L1. The rows after the first 16 prefetch the
   next tiles, because memory is idle then. */
#define UNITS(ROWS) ((ROWS) <= TILE_ROWS ? INT64_MAX : (ROWS) <= 64 ? 4 : 6)
#define X_BYTES 64                    /* of a row of x, in a tile */
#define W_LINE (PANEL * 4)            /* bytes of 4 bytes of inputs of a panel */
#define W_BYTES (W_LINE * TILE_ROWS) /* of a panel, for a tile of x */

typedef char tile_sums[PANEL * 4]; /* of a row, in float32 or int32 */

/* DO(tile of sums, tile of weights, quarter of a panel) */
#define QUARTERS(DO) DO(SUM0, W0, 0) DO(SUM1, W1, 1) DO(SUM2, W0, 2) DO(SUM3, W1, 3)
#define QUARTER_LOAD(SUM, W, I) tile_load(SUM, sums[0] + 64 * I, sizeof sums[0]);
#define QUARTER_ZERO(SUM, W, I) tile_zero(SUM);
#define QUARTER_STORE(SUM, W, I) tile_store(SUM, sums[0] + 64 * I, sizeof sums[0]);
#define QUARTER_MADD(SUM, W, I) \
    tile_load(W, panel + 64 * I, W_LINE); \
    if (codes) tile_madd_codes(SUM, X0, W); \
    else tile_madd(SUM, X0, W);

/* sums (rows, 64) = or += x times `units` tiles of a panel. Each prefetches `lines` lines at `next`
   and further on. */
static inline __attribute__((always_inline)) void
madd_tiles(const char *x, int64_t stride, const char *panel, int64_t units, const char *next,
           int64_t lines, tile_sums *sums, int add, const int codes) {
    memory_is_written();
    if (add) { QUARTERS(QUARTER_LOAD) } else { QUARTERS(QUARTER_ZERO) }
    for (int64_t k = 0; k < units; k++, x += X_BYTES, panel += W_BYTES) {
        for (int64_t i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
        tile_load(X0, x, stride);
        QUARTERS(QUARTER_MADD)
    }
    QUARTERS(QUARTER_STORE)
    memory_is_written();
}

struct tile_product { /* x (rows, inputs) times panels, in bytes */
    const char *x, *panels;
    int64_t x_stride, panel_stride, units, left; /* of inputs: whole tiles, and bytes behind them */
    void (*finish)(const struct operation *o, int64_t panel, int64_t row, void *sums);
};

/* Prefetch where outputs go: those of many rows do not fit in L2. Gain: prompt of 512 1.1x. */
static inline void prefetch_outputs(const struct linear *l, int64_t panel, int64_t row) {
    const int64_t size = l->out_is_operand ? sizeof(operand) : sizeof(real);
    const int64_t wide = l->epilogue == SILU_MUL ? PANEL / 2 : PANEL;
    const char *out = (const char *)l->out + (row * l->out_stride + panel * wide) * size;
    for (int64_t i = 0; i < wide * size; i += 64) __builtin_prefetch(out + i, 1, 2);
}

/* Compute the panels from `first` to `last`. codes: x and weights are codes, not bfloat16. */
static inline __attribute__((always_inline)) void
multiply_tiles(const struct operation *o, int64_t first, int64_t last, const struct tile_product p,
               const int codes) {
    const int64_t rows = rows_of(o), units = p.units + (p.left > 0);
    _Alignas(64) tile_sums sums[TILE_MC];
    char last_x[TILE_ROWS][X_BYTES] = {0}; /* what lies behind a row may be NaN */
    int set = 0;
    for (int64_t row = 0; row < rows; row += TILE_MC) {
        const int64_t count = rows - row < TILE_MC ? rows - row : TILE_MC;
        const int64_t block = UNITS(count), others = (count - 1) / TILE_ROWS;
        const int64_t lines = others ? (W_BYTES / 64 + others - 1) / others : 0;
        for (int64_t panel = first; panel < last; panel++)
            for (int64_t k = 0, end; k < units; k = end) {
                const char *w = p.panels + panel * p.panel_stride + k * W_BYTES;
                end = units - k < block ? units : k + block;
                for (int64_t i = 0; i < count; i += TILE_ROWS) {
                    const int some = count - i < TILE_ROWS ? (int)(count - i) : TILE_ROWS;
                    const char *x = p.x + (row + i) * p.x_stride + k * X_BYTES;
                    const int64_t full = (end < p.units ? end : p.units) - k;
                    const int64_t done = (i / TILE_ROWS - 1) * full * lines;
                    const char *next = w + (end - k) * W_BYTES + done * 64;
                    use_tiles(&set, some);
                    for (int t = 0; t < some && end == units; t++)
                        prefetch_outputs(&o->of.linear, panel, row + i + t);
                    madd_tiles(x, p.x_stride, w, full, next, i ? lines : 0, sums + i, k > 0, codes);
                    if (end < units) continue;
                    if (p.left) {
                        x += full * X_BYTES;
                        for (int t = 0; t < some; t++)
                            memcpy(last_x[t], x + t * p.x_stride, p.left);
                        madd_tiles(last_x[0], X_BYTES, w + full * W_BYTES, 1, w, 0, sums + i, 1,
                                   codes);
                    }
                    for (int t = 0; t < some; t++) p.finish(o, panel, row + i + t, sums[i + t]);
                }
            }
    }
    tile_release();
}
#endif
