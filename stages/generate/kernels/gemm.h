// What packing (pack.c) and multiplication (gemm.c) share: how panels and rows of activations lie in memory.
//
// A panel has the weights of PANEL outputs, line after line in the order of the inputs:
//
//   FLOAT32   a line is one input: PANEL floats.
//   BFLOAT16  a line is two inputs: for each output the weights of an even and of the next odd input.
//   FLOAT16   a line is one input: PANEL halves.
//
// The inputs are padded with zeros to an even number.
//
// The formats from Q4_0 on have units of 64 inputs, padded with zeros: 64 bytes of scales (128 with minima of their own),
// then a line of 64 bytes for every 4 inputs, with the 4 integers of each output side by side; where they have 4 bits, one
// line for every 8, with input i in the low half of a byte and i + 4 in the high one. A weight is
//
//   Q4_0, Q8_0         scale * integer; PANEL halves are the scales of a group of 32 inputs. Q4_0: 8 less than stored.
//   Q4_1, Q5_1         scale * integer + minimum; behind all scales PANEL halves for each group, the minima.
//   Q4_K, Q5_K         d * scale * integer + dmin * minimum; a group has PANEL bytes of scales, then of minima.
//   Q6_K               d * scale * integer, 32 less than stored; 16 inputs are a group with PANEL signed bytes of scales.
//
//   INT4               scale * (integer - zero).
//
// The front of the panel has 64 bytes for every 256 inputs, PANEL halves d and PANEL halves dmin. For every group of INT4 it
// has PANEL halves, the scales, and PANEL signed bytes, -zero; its units have no scales.
//
// A row of activations has one 4-byte word for each input, or for every two where they have 2 bytes:
//
//   FLOAT32, FLOAT16  floats.
//   BFLOAT16          floats, or pairs of bfloat16 for CPUs that multiply them.
//   Q4_0 and so on    int8, one byte for each input; after the padded inputs a `GroupOfRow` for every 32. For Q8_0 int16 on
//                     CPUs that do not multiply bytes faster; of every 4 inputs the second and the third change places.
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

#ifdef __AVX512BF16__
#define PAIRS_OF_BFLOAT16 1
#else
#define PAIRS_OF_BFLOAT16 0
#endif

#if defined(__x86_64__) && !defined(__AVX512VNNI__)
#define BYTES_AS_SHORTS 1
#else
#define BYTES_AS_SHORTS 0
#endif

// What a row has for 32 of its integers: x = scale * integer.
typedef struct {
    float scale, weighted;       // weighted: scale * the sum of the integers
    int32_t first_sum, last_sum; // of the first 16 integers, and of the others
} GroupOfRow;

#define BLOCK_GROUP 32
#define SUPER_BLOCK 256
#define FRONT_BYTES 64

// The formats with units.
INLINE int is_blocked(Format format) { return format >= Q4_0; }
INLINE int is_int4(Format format) { return format >= INT4_32; }
INLINE int has_nibbles(Format format) { return format == Q4_0 || format == Q4_1 || format == Q4_K || is_int4(format); }
INLINE int has_minima(Format format) {
    return format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K || is_int4(format);
}
INLINE int has_two_levels(Format format) { return format == Q4_K || format == Q5_K || format == Q6_K; }
INLINE int64_t head_bytes(Format format) { return is_int4(format) ? 0 : format == Q4_1 || format == Q5_1 ? 128 : 64; }
// Inputs for which the front has FRONT_BYTES; 0: there is no front.
INLINE int64_t front_inputs(Format format) {
    return is_int4(format) ? BLOCK_GROUP << (format - INT4_32) : has_two_levels(format) ? SUPER_BLOCK : 0;
}
INLINE int64_t unit_bytes(Format format) { return head_bytes(format) + GROUP * PANEL / (has_nibbles(format) ? 2 : 1); }
// The integer of a weight is this much less than the one that is stored.
INLINE int32_t zero_of(Format format) { return format == Q4_0 ? 8 : format == Q6_K ? 32 : 0; }

// Bytes of an activation.
INLINE int64_t activation_size(Format format) {
    if (is_blocked(format)) return format == Q8_0 && BYTES_AS_SHORTS ? 2 : 1;
    return format == BFLOAT16 && PAIRS_OF_BFLOAT16 ? 2 : 4;
}

// Where the `GroupOfRow`s of a row lie.
INLINE int64_t row_scale_offset(Format format, int64_t inputs) {
    return round_up(inputs, ROW_MULTIPLE) * activation_size(format);
}

// Bytes before the first weights of a panel.
INLINE int64_t front_bytes(Format format, int64_t inputs) {
    const int64_t each = front_inputs(format);
    return each ? (round_up(inputs, GROUP) + each - 1) / each * FRONT_BYTES : 0;
}

// Where the weights or the unit of an input lie behind the front. *input* is a multiple of GROUP.
INLINE int64_t panel_offset(Format format, int64_t input) {
    if (is_blocked(format)) return input / GROUP * unit_bytes(format);
    return input * PANEL * (format == FLOAT32 ? 4 : 2);
}

// Bytes of a panel of units.
INLINE int64_t bytes_of_units(Format format, int64_t inputs) {
    return front_bytes(format, inputs) + panel_offset(format, round_up(inputs, GROUP));
}

int64_t NAME(panel_bytes)(Format format, int64_t inputs);
void NAME(pack)(Format format, const void *const rows[PANEL], Format source, int64_t inputs, void *panel);
int64_t NAME(activation_bytes)(Format format, int64_t inputs);
void NAME(prepare)(Format format, const float *x, int64_t inputs, void *activations);
void NAME(multiply)(const Matrix *matrix, const void *rows, int64_t num_rows, int64_t first_panel, int64_t num_panels,
                    float *out, int64_t stride);
void NAME(tile)(const Matrix *matrix, int64_t num_rows, int threads, int64_t *rows, int64_t *panels);
