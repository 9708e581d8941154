// What packing (pack.c) and multiplication (gemm.c) share: how panels and rows of activations lie in memory.
//
// A panel has the weights of PANEL outputs, line after line in the order of the inputs:
//
//   FLOAT32   a line is one input: PANEL floats.
//   BFLOAT16  a line is two inputs: for each output the weights of an even and of the next odd input.
//   FLOAT16   a line is one input: PANEL halves.
//   INT8      PANEL floats, the units; then for each group of GROUP inputs PANEL halves, the scales, and a line for
//             every two inputs, as for BFLOAT16. A weight is its integer * scale * unit. A unit is a power of two that
//             brings the scales of its output into the range of a half.
//
// The inputs are padded with zeros to an even number.
//
// A row of activations has one 4-byte word for each input, or for every two where they have 2 bytes:
//
//   FLOAT32, FLOAT16  floats.
//   BFLOAT16          floats, or pairs of bfloat16 for CPUs that multiply them.
//   INT8              pairs of int16, and after the padded inputs a float, the scale.
//
// The inputs are padded with zeros to a multiple of ROW_MULTIPLE. 64 bytes more make the distance of two rows an odd
// number of cache lines, so that rows of 2^n inputs do not share the same few sets of a cache.
#pragma once
#include "kernels.h"

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(function) JOIN(function, VARIANT)
#define INLINE static inline __attribute__((always_inline))

#define GROUP 64
#define UNITS_BYTES (PANEL * (int64_t)sizeof(float))
#define SCALES_BYTES (PANEL * (int64_t)sizeof(uint16_t))
#define GROUP_BYTES (SCALES_BYTES + GROUP * PANEL)

#ifdef __AVX512BF16__
#define PAIRS_OF_BFLOAT16 1
#else
#define PAIRS_OF_BFLOAT16 0
#endif

// Bytes of an activation.
INLINE int64_t activation_size(Format format) {
    return format == INT8 || (format == BFLOAT16 && PAIRS_OF_BFLOAT16) ? 2 : 4;
}

// Where the scale of a row lies, for INT8.
INLINE int64_t row_scale_offset(int64_t inputs) { return round_up(inputs, ROW_MULTIPLE) * (int64_t)sizeof(int16_t); }

// Where the weights (for INT8: the group) of an input lie in a panel. *input* is a multiple of GROUP.
INLINE int64_t panel_offset(Format format, int64_t input) {
    switch (format) {
    case FLOAT32:
        return input * PANEL * 4;
    case INT8:
        return UNITS_BYTES + input / GROUP * GROUP_BYTES;
    default:
        return input * PANEL * 2;
    }
}

int64_t NAME(panel_bytes)(Format format, int64_t inputs);
void NAME(pack)(Format format, const void *const rows[PANEL], Format source, int64_t inputs, void *panel);
int64_t NAME(activation_bytes)(Format format, int64_t inputs);
void NAME(prepare)(Format format, const float *x, int64_t inputs, void *activations);
void NAME(multiply)(const Matrix *matrix, const void *rows, int64_t num_rows, int64_t first_panel, int64_t num_panels,
                    float *out, int64_t stride);
void NAME(tile)(const Matrix *matrix, int64_t num_rows, int threads, int64_t *rows, int64_t *panels);
