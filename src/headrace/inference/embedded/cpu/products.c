/* Matrix products of tens to hundreds of rows with weights in panels, in float32: see weight_layout.py.

   A panel has PANEL outputs: their weights for the first input, for the second, and so on. Every output is one sum in
   the order of its inputs, whatever rows and columns are computed beside it: no bit of a row depends on the batch or on
   threads. */

#include <string.h>

#include "kernels.h"

#if defined(__AVX512F__)  /* TILE rows by PANEL outputs are summed in registers */
#define LANES 16
#define VECTORS 2
#define TILE 12
#elif defined(__AVX__)
#define LANES 8
#define VECTORS 2
#define TILE 6
#else
#define LANES 4
#define VECTORS 4
#define TILE 6
#endif
#define PANEL (LANES * VECTORS)  /* outputs */
#define DEPTH 512  /* inputs whose weights stay in the fastest cache */
#define AHEAD 12  /* inputs whose weights are fetched before they are needed */
#define BLOCK (1 << 17)  /* numbers of rows that stay in the second cache, beside the weights */
#define PART_PRODUCTS (1 << 18)

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

struct product {
    struct rows input;
    const float *panels, *bias;
    float *out;
    int64_t rows, depth, width, blocks, panels_per_part;
};

int64_t panel_width(void) { return PANEL; }

/* out += rows of input * weights; out = start + ... if `start` is given */
static inline __attribute__((always_inline)) void sum_tile(int rows, struct rows input, const float *weights,
                                                           int64_t depth, const float *start, struct rows out) {
    vector sums[TILE][VECTORS];
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < VECTORS; i++)
            sums[row][i] = *(const vector *)((start ? start : out.first + row * out.stride) + i * LANES);
    for (int64_t k = 0; k < depth; k++, weights += PANEL) {
        vector column[VECTORS];  /* named, or compilers do not keep it in registers */
        for (int i = 0; i < VECTORS; i++) {
            column[i] = *(const vector *)(weights + i * LANES);
            __builtin_prefetch(weights + AHEAD * PANEL + i * LANES);
        }
        for (int row = 0; row < rows; row++) {
            float x = input.first[row * input.stride + k];
            for (int i = 0; i < VECTORS; i++) sums[row][i] += x * column[i];
        }
    }
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < VECTORS; i++) *(vector *)(out.first + row * out.stride + i * LANES) = sums[row][i];
}

/* A copy of `sum_tile` for each number of rows: sums are in registers only if that is a constant. */
static void sum_rows(int rows, struct rows input, const float *weights, int64_t depth, const float *start,
                     struct rows out) {
    switch (rows) {
#define CASE(number) case number: sum_tile(number, input, weights, depth, start, out); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE == 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

static void multiply_panel(const struct product *product, int64_t first, int64_t end, int64_t panel) {
    int64_t width = product->width - panel * PANEL, tiles = (end - first + TILE - 1) / TILE;
    float start[PANEL] = {0}, padded[TILE * PANEL];
    if (width > PANEL) width = PANEL;
    if (product->bias) memcpy(start, product->bias + panel * PANEL, width * sizeof(float));
    for (int64_t k = 0; k < product->depth; k += DEPTH)
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t row = first + (end - first) * tile / tiles, next = first + (end - first) * (tile + 1) / tiles;
            float *out = product->out + row * product->width + panel * PANEL;
            struct rows input = {product->input.first + row * product->input.stride + k, product->input.stride};
            struct rows whole = {out, product->width};
            if (width < PANEL) {
                whole = (struct rows){padded, PANEL};
                for (int64_t i = 0; k && i < next - row; i++)
                    memcpy(padded + i * PANEL, out + i * product->width, width * sizeof(float));
            }
            int64_t depth = product->depth - k < DEPTH ? product->depth - k : DEPTH;
            sum_rows(next - row, input, product->panels + (panel * product->depth + k) * PANEL, depth, k ? NULL : start,
                     whole);
            if (width < PANEL)
                for (int64_t i = 0; i < next - row; i++)
                    memcpy(out + i * product->width, padded + i * PANEL, width * sizeof(float));
        }
}

static void multiply_part(const void *job, int64_t part) {
    const struct product *product = job;
    int64_t panels = (product->width + PANEL - 1) / PANEL, block = part % product->blocks;
    int64_t panel = part / product->blocks * product->panels_per_part, last = panel + product->panels_per_part;
    int64_t first = product->rows * block / product->blocks, end = product->rows * (block + 1) / product->blocks;
    for (; panel < last && panel < panels; panel++) multiply_panel(product, first, end, panel);
}

/* out = input * weights + bias, if given; out is contiguous */
void multiply(struct rows input, const float *panels, const float *bias, float *out, int64_t rows, int64_t depth,
              int64_t width, int threads) {
    int64_t most = BLOCK / depth > 8 * TILE ? BLOCK / depth : 8 * TILE, blocks = (rows + most - 1) / most;
    if (!rows) return;
    int64_t products = rows / blocks * depth * PANEL;
    int64_t together = products < PART_PRODUCTS ? PART_PRODUCTS / products : 1;
    struct product product = {input, panels, bias, out, rows, depth, width, blocks, together};
    int64_t count = (width + PANEL - 1) / PANEL;
    compute_parts(multiply_part, &product, blocks * ((count + together - 1) / together), threads);
}
