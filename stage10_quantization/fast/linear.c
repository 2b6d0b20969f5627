/* Products with a matrix of whole numbers.

   `add_product` adds two loops to a step: the first rounds x to int8, with one scale for each row
   and group; the second multiplies. A register holds 4 inputs of 16 outputs (8 with AVX2), and one
   instruction (VNNI) multiplies all 64 codes with those of x and adds each 4 products. Codes of the
   matrix have no sign, those of x have one, as the instruction expects. So with an offset of 8 or
   128 a sum is too large by the offset times the codes of x, and begins with minus that.

   Without VNNI two products of 16 bits and a sum take its place. They are as exact: no step
   saturates. So all levels give the same bits. */

#include "../../stage09_kernels/fast/linear.c"
#include "../quantized.h"

#if !defined(__AVX512F__) && defined(__SSE2__)
#include <immintrin.h>
#endif

#define F_LANES (BYTES / 4) /* numbers of 4 bytes in a vector */
#define F_VECTORS (PANEL / F_LANES)

typedef float floats __attribute__((vector_size(BYTES), aligned(4)));
typedef int32_t words __attribute__((vector_size(BYTES), aligned(4)));
typedef uint32_t bits32 __attribute__((vector_size(BYTES), aligned(4)));
typedef uint16_t bits16 __attribute__((vector_size(BYTES), aligned(4)));
typedef int16_t shorts __attribute__((vector_size(BYTES), aligned(4)));
typedef int8_t codes_vec __attribute__((vector_size(F_LANES), aligned(1)));

/* x, of which the compiler knows nothing: it cannot add a product before it is rounded (FMA). */
static inline floats rounded(floats x) {
#if defined(__x86_64__)
    __asm__("" : "+v"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#else
    __asm__("" : "+m"(x));
#endif
    return x;
}

#if BYTES == 64
#define madd_shorts(a, b) (words)_mm512_madd_epi16((__m512i)(a), (__m512i)(b))
#elif BYTES == 32
#define madd_shorts(a, b) (words)_mm256_madd_epi16((__m256i)(a), (__m256i)(b))
#else
#define madd_shorts(a, b) (words)_mm_madd_epi16((__m128i)(a), (__m128i)(b))
#endif

/* `sum` plus 4 products: codes w without a sign, times the codes of x, in each place. */
static inline words madd_codes(words sum, words w, int32_t x) {
    const words all = (words){0} + x;
#if defined(__AVX512VNNI__)
    return (words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)all);
#elif defined(__SSE2__)
    sum += madd_shorts((bits16)w & 255, (shorts)((bits16)all << 8) >> 8);
    return sum + madd_shorts((bits16)w >> 8, (shorts)all >> 8);
#else
    for (int b = 0; b < 4; b++)
        sum += (words)((bits32)w >> 8 * b & 255) * ((words)((bits32)all << (24 - 8 * b)) >> 24);
    return sum;
#endif
}

/* F_LANES scales or minimums at p, float32 or float16. */
static inline floats load_scales(const struct quantized *q, const uint8_t *p, int64_t i) {
    if (q->scale_bytes == 4) return *(const floats *)(p + 4 * i);
#if BYTES == 64
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)(p + 2 * i)));
#elif BYTES == 32 /* gain: 1.1x, int4 and one row */
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const void *)(p + 2 * i)));
#else
    typedef uint16_t halves16 __attribute__((vector_size(BYTES / 2), aligned(2)));
    bits32 half = __builtin_convertvector(*(const halves16 *)(p + 2 * i), bits32);
    floats size = (floats)((half & 0x7fff) << 13) * 0x1p112f;
    return (floats)((bits32)size | (half & 0x8000) << 16);
#endif
}

/* ---- x */

/* Numbers k to k + F_LANES of a row of x, of which `left` exist; then zeros. */
static inline floats load_x(const struct linear *l, int64_t row, int64_t k, int64_t left) {
    const int size = l->x_is_operand ? WEIGHT : REAL;
    const char *x = (const char *)l->x + (row * l->x_stride + k) * size;
#if REAL == 4
    if (left >= F_LANES)
        return size == 2 ? (floats)(load_low((const void *)x) << 16) : *(const floats *)x;
#endif
    floats y = {0};
    for (int i = 0; i < F_LANES && i < left; i++) y[i] = (float)load(x, i, size);
    return y;
}

/* The largest of x, or its sum. */
static inline int32_t reduce(words x, const int largest) {
#if BYTES == 64
    return largest ? _mm512_reduce_max_epi32((__m512i)x) : _mm512_reduce_add_epi32((__m512i)x);
#endif
    int32_t y = x[0];
    for (int i = 1; i < F_LANES; i++) y = !largest ? y + x[i] : x[i] > y ? x[i] : y;
    return y;
}

/* Round group g of a row of x, or copy it if it stays floats. Without their sign, the bits of
   larger floats are larger whole numbers, and infinity and NaN are the largest. */
static void read_group(const struct linear *l, int64_t row, int64_t g) {
    const struct quantized *q = l->format;
    struct group *group = x_groups(l, row) + g;
    const int64_t place = g * steps_of(q) * 4;
    int8_t *codes = x_codes(l, row) + place;
    if (q->floats) {
        float *copy = (float *)x_codes(l, row) + place, total = 0;
        for (int64_t k = 0; k < steps_of(q) * 4; k += F_LANES)
            *(floats *)(copy + k) = load_x(l, row, g * q->group + k, q->group - k);
        for (int64_t k = 0; k < q->group && q->minimum; k++) total += copy[k];
        *group = (struct group){1, total, 0};
        return;
    }
    words top = {0}, sums = {0};
    for (int64_t k = 0; k < q->group; k += F_LANES) {
        words x = (words)load_x(l, row, g * q->group + k, q->group - k) & 0x7fffffff;
        top = (x & (x > top)) | (top & ~(x > top));
    }
    const float largest = (union word){.bits = reduce(top, 1)}.number;
    if (!(largest >= SMALLEST && largest < INFINITY)) {
        float scale = largest < SMALLEST ? 0 : NAN; /* shows infinity and NaN */
        memset(codes, 0, steps_of(q) * 4);
        *group = (struct group){scale, scale, 0};
        return;
    }
    const float factor = 127 / largest;
    const floats magic = (floats){0} + 12582912.0f; /* 1.5 * 2^23: its last bits are a number's */
    for (int64_t k = 0; k < steps_of(q) * 4; k += F_LANES) {
        floats x = rounded(load_x(l, row, g * q->group + k, q->group - k) * factor);
        words code = (words)(x + magic) - (words)magic;
        sums += code;
        *(codes_vec *)(codes + k) = __builtin_convertvector(code, codes_vec);
    }
    group->scale = largest / 127;
    group->sum = reduce(sums, 0);
    group->total = (float)group->sum * group->scale;
}

static void read_rows(int64_t first, int64_t last, void *context) {
    const struct linear *l = &((const struct operation *)context)->of.linear;
    const struct quantized *q = l->format;
    for (int64_t row = first; row < last; row++)
        for (int64_t g = 0; g < q->count; g++) read_group(l, row, g);
}

/* ---- the product */

/* Code b of each place in float32. AVX-512 looks 4 bits up among `all` 16; gain: 1.2x, one row. */
static inline floats code_of(const struct quantized *q, words w, int b, const int bits,
                             floats all) {
    int shift = bits == 8 ? 8 * b : b % 4 * 8 + b / 4 * 4;
#if BYTES == 64
    if (bits == 4) return (floats)_mm512_permutexvar_ps((__m512i)((bits32)w >> shift), (__m512)all);
#endif
    (void)all;
    words code = (words)((bits32)w >> shift & (bits == 8 ? 255 : 15)) - (int32_t)q->offset;
    return __builtin_convertvector(code, floats);
}

/* With AVX2 and less a tile is narrower than a panel, and reads it in rounds, with gaps, so that
   the processor fetches less by itself. So all rounds of the first rows read CHUNK steps before the
   next ones, and prefetch what lies AHEAD bytes further line after line (stage 09). Gain with AVX2,
   2 to 64 rows: 1.1x to 1.4x, codes of 4 bits and groups of 32 1.2x to 1.5x. */
#define ROUNDS (BYTES < 64)
#define CHUNK 8
#define AHEAD(ROWS) (ROWS == 1 ? 1024 : 2048)

static inline __attribute__((always_inline)) void
prefetch(const uint8_t *codes, int64_t size, const int rows) {
    for (int64_t line = 0; ROUNDS && line < size; line += 64)
        __builtin_prefetch(codes + AHEAD(rows) + line);
}

/* `sum` plus 8 products with codes of 4 bits, the first four in `low`. AVX2 multiplies bytes, too,
   and adds two and two in 16 bits, which hold both: 4 * 15 * 127 at most. Gain: 1.5x. */
static inline words madd_nibbles(words sum, words low, words high, const int32_t *x) {
#if BYTES == 32
    __m256i first = _mm256_maddubs_epi16((__m256i)low, _mm256_set1_epi32(x[0]));
    __m256i second = _mm256_maddubs_epi16((__m256i)high, _mm256_set1_epi32(x[1]));
    return sum + madd_shorts(_mm256_add_epi16(first, second), _mm256_set1_epi16(1));
#else
    return madd_codes(madd_codes(sum, low, x[0]), high, x[1]);
#endif
}

/* tile += products of `steps` steps of codes, `bits` each, and x: its codes, or the numbers
   `as_it_is`, and then all is float32. What is prefetched lies AHEAD of `line`. */
static inline __attribute__((always_inline)) void
madd_steps(const struct quantized *q, words (*tile)[F_VECTORS], const uint8_t *codes,
           const int32_t *const *x, int64_t steps, const uint8_t *line, const int rows,
           const int bits, const int wide, const int as_it_is) {
    floats all;
    for (int i = 0; i < F_LANES; i++) all[i] = (float)(i - q->offset);
    for (int64_t k = 0; k < steps; k += 8 / bits, codes += PANEL * 4, line += wide * BYTES) {
        prefetch(line, wide * BYTES, rows);
        for (int j = 0; j < wide; j++) {
            const words w = *(const words *)(codes + j * BYTES);
            const words low = w & 0x0f0f0f0f, high = (words)((bits32)w >> 4) & 0x0f0f0f0f;
            for (int b = 0; b < 32 / bits && as_it_is; b++) {
                floats code = code_of(q, w, b, bits, all);
                for (int i = 0; i < rows; i++) {
                    float number;
                    memcpy(&number, x[i] + 4 * k + b, sizeof number);
                    tile[i][j] = (words)((floats)tile[i][j] + code * number);
                }
            }
            for (int i = 0; i < rows && !as_it_is; i++)
                if (bits == 8) tile[i][j] = madd_codes(tile[i][j], w, x[i][k]);
                else tile[i][j] = madd_nibbles(tile[i][j], low, high, x[i] + k);
        }
    }
}

/* y += the sums of a group with its scales and minimums, for `wide` vectors of outputs. */
static inline __attribute__((always_inline)) void
add_group(const struct quantized *q, const uint8_t *group, const struct group *const *x, int first,
          words (*sums)[F_VECTORS], floats (*y)[F_VECTORS], const int rows, const int wide,
          const int as_it_is) {
    for (int j = 0; j < wide; j++) {
        floats scale = load_scales(q, group, (first + j) * F_LANES);
        for (int i = 0; i < rows; i++) {
            floats sum = (floats)sums[i][j];
            if (!as_it_is) sum = __builtin_convertvector(sums[i][j], floats);
            y[i][first + j] += rounded(sum * rounded(scale * x[i]->scale));
        }
        if (!q->minimum) continue;
        scale = load_scales(q, group + PANEL * q->scale_bytes, (first + j) * F_LANES);
        for (int i = 0; i < rows; i++) y[i][first + j] += rounded(scale * x[i]->total);
    }
}

static void finish_row(const struct operation *o, int64_t panel, int64_t row, const floats *y) {
    const real *bias = o->of.linear.bias;
    sums_of sums;
    for (int n = 0; n < PANEL; n++)
        sums[n] = ((const float *)y)[n] + (bias ? (float)bias[panel * PANEL + n] : 0);
    epilogue(o, panel, row, sums);
}

/* The outputs of `rows` rows for a panel whose codes have `bits` bits, `wide` vectors at a time. x
   is rounded, or `as_it_is`. */
static inline __attribute__((always_inline)) void
multiply(const struct linear *l, int64_t panel, int64_t row, floats (*out)[F_VECTORS],
         const int rows, const int bits, const int as_it_is) {
    /* As in stage 09. Gain with AVX2: 2.2x, one row. */
    const int most = rows == 1 ? 4 * NR : rows <= 3 ? 2 * NR : NR;
    const int wide = most < F_VECTORS ? most : F_VECTORS;
    const struct quantized *q = l->format;
    const int64_t steps = steps_of(q), chunk = ROUNDS && rows > 1 && row == 0 ? CHUNK : steps;
    const struct group *of_x[MR];
    const int32_t *x[MR];
    words sums[MR][F_VECTORS];
    floats y[MR][F_VECTORS] = {0};
    for (int i = 0; i < rows; i++) {
        x[i] = (const int32_t *)x_codes(l, row + i);
        of_x[i] = x_groups(l, row + i);
    }
    for (int64_t g = 0; g < q->count; g++) {
        const uint8_t *group = group_of(q, panel, g), *codes = codes_of(q, group);
        prefetch(group, codes - group, rows);
        for (int64_t k = 0, end; k < steps; k = end) {
            end = steps - k < chunk ? steps : k + chunk;
            const int64_t loads = (end - k) * bits / 8;
            for (int first = 0; first < F_VECTORS; first += wide) {
                words tile[MR][F_VECTORS];
                for (int i = 0; i < rows; i++)
                    for (int j = 0; j < wide; j++)
                        tile[i][j] = k ? sums[i][first + j]
                                       : (words){0} - of_x[i]->sum * (int32_t)q->offset;
                const uint8_t *w = codes + first * BYTES, *line = codes + loads * first * BYTES;
                madd_steps(q, tile, w, x, end - k, line, rows, bits, wide, as_it_is);
                if (end == steps)
                    add_group(q, group, of_x, first, tile, y, rows, wide, as_it_is);
                else
                    for (int i = 0; i < rows; i++)
                        for (int j = 0; j < wide; j++) sums[i][first + j] = tile[i][j];
            }
            codes += loads * PANEL * 4;
            for (int i = 0; i < rows; i++) x[i] += (end - k) * (as_it_is ? 4 : 1);
        }
        for (int i = 0; i < rows; i++) of_x[i]++;
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < F_VECTORS; j++) out[i][j] = y[i][j];
}

/* Constants keep the sums in registers. */
static void multiply_rows(const struct linear *l, int64_t panel, int64_t row, int64_t rows,
                          floats (*out)[F_VECTORS]) {
    const struct quantized *q = l->format;
#define CASE(ROWS) \
    case ROWS: \
        if (q->bits == 8 && q->floats) multiply(l, panel, row, out, ROWS, 8, 1); \
        else if (q->bits == 8) multiply(l, panel, row, out, ROWS, 8, 0); \
        else if (q->floats) multiply(l, panel, row, out, ROWS, 4, 1); \
        else multiply(l, panel, row, out, ROWS, 4, 0); \
        break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}

static void product(int64_t first, int64_t last, void *context) { /* panels */
    const struct operation *o = context;
    const struct linear *l = &o->of.linear;
    const int64_t rows = rows_of(o);
    floats out[MR][F_VECTORS];
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t row = 0; row < rows; row += MR) {
            int64_t count = rows - row < MR ? rows - row : MR;
            multiply_rows(l, panel, row, count, out);
            for (int64_t i = 0; i < count; i++) finish_row(o, panel, row + i, out[i]);
        }
}

#if TILES
#define TILE_LEAST 4  /* rows that pay for tiles */
#define TILE_STEPS 16 /* steps in a tile: 64 inputs */

/* `product` for one group in 8 bits: the same whole numbers in another order, so the same bits. */
static void finish_codes(const struct operation *o, int64_t panel, int64_t row, void *sums) {
    const struct linear *l = &o->of.linear;
    const struct quantized *q = l->format;
    const struct group *of_x = x_groups(l, row);
    words tile[1][F_VECTORS];
    floats y[1][F_VECTORS] = {0};
    for (int j = 0; j < F_VECTORS; j++)
        tile[0][j] = ((const words *)sums)[j] - of_x->sum * (int32_t)q->offset;
    add_group(q, group_of(q, panel, 0), &of_x, 0, tile, y, 1, F_VECTORS, 0);
    finish_row(o, panel, row, y[0]);
}

static void product_by_tiles(int64_t first, int64_t last, void *context) { /* panels */
    const struct operation *o = context;
    const struct quantized *q = o->of.linear.format;
    const struct tile_product product = {
        .x = (const char *)x_codes(&o->of.linear, 0),
        .panels = (const char *)codes_of(q, group_of(q, 0, 0)),
        .x_stride = q->row_bytes,
        .panel_stride = group_of(q, 1, 0) - group_of(q, 0, 0),
        .units = steps_of(q) / TILE_STEPS,
        .finish = finish_codes,
    };
    multiply_tiles(o, first, last, product, 1);
}
#endif

void add_product(struct loops *list, struct operation *o) {
    int64_t size = o->of.linear.epilogue == SILU_MUL ? PANEL / 2 : PANEL;
    body multiply_panels = product;
#if TILES
    const struct quantized *q = o->of.linear.format;
    const int fits = q->count == 1 && q->bits == 8 && !q->floats && steps_of(q) % TILE_STEPS == 0;
    if (fits && rows_of(o) >= TILE_LEAST) multiply_panels = product_by_tiles;
#endif
    add_loop(list, rows_of(o), read_rows, o);
    add_loop(list, (o->of.linear.outputs + size - 1) / size, multiply_panels, o);
}
