/* Tiles (AMX): eight registers of 16 rows of 64 bytes, and instructions that multiply two of them.

   A tile of x has up to 16 rows of 32 inputs, a tile of weights 16 pairs of inputs of 16 outputs, as
   they lie in a panel, and one instruction adds their 8,192 products to 16 x 16 sums: 16 times what
   a vector instruction does. The order of a sum's additions is that of tiles.h. It does not depend
   on the number of rows, so a row's bits are the same alone and beside others; but they differ from
   those of vectors, so all rows take tiles.

   A thread sets the shape of its tiles before it uses them, and releases them when it is done, so
   that an idle thread has none that the system must save. */

#pragma once

#include "../tiles.h"

#define TILE_ROWS 16
/* The tiles: two of x, two of weights, four of sums. No enum: gcc 12 takes literals alone. */
#define X0 0
#define X1 1
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

/* Tiles of x and sums with `rows` rows, at most 16, if they do not have them; those of weights have
   16. `set`: the rows they have; 0: there are no tiles yet. */
static inline void use_tiles(int *set, int64_t rows) {
#if TILES
    struct tile_shape shape = {.palette = 1};
    if (rows > TILE_ROWS) rows = TILE_ROWS;
    if (*set == rows) return;
    for (int i = 0; i < 8; i++) {
        shape.bytes[i] = 64;
        shape.rows[i] = i == W0 || i == W1 ? TILE_ROWS : rows;
    }
    tile_configure(&shape);
    *set = (int)rows;
#endif
}

static inline void release_tiles(int set) {
#if TILES
    if (set) tile_release();
#endif
}
