// Brings weights and activations into the form that multiply (gemm.c) reads; gemm.h describes it.
#include "gemm.h"

#include <string.h>
#ifdef __aarch64__
#include "neon.h"
#else
#include <immintrin.h>
#endif

// Inputs that are packed at a time.
#define CHUNK GROUP

typedef float Chunk[PANEL][CHUNK];

int64_t NAME(panel_bytes)(Format format, int64_t inputs) {
    inputs = round_up(inputs, 2);
    int64_t lines = inputs * PANEL;
    if (is_blocked(format)) return bytes_of_units(format, inputs);
    switch (format) {
    case FLOAT32:
        return lines * 4;
    case INT8:
        return round_up(UNITS_BYTES + (inputs + GROUP - 1) / GROUP * SCALES_BYTES + lines, 64);
    default:
        return lines * 2;
    }
}

int64_t NAME(activation_bytes)(Format format, int64_t inputs) {
    int64_t groups = is_blocked(format) ? round_up(inputs, ROW_MULTIPLE) / BLOCK_GROUP : 0;
    return round_up(row_scale_offset(format, inputs) + groups * (int64_t)sizeof(GroupOfRow), 64) + 64;
}

INLINE float bits_to_float(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE uint32_t float_to_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

// Round to the nearest bfloat16, ties to even. A NaN stays one.
INLINE uint16_t float_to_bfloat16(float number) {
    uint32_t bits = float_to_bits(number), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

// The 8 halves at *from*.
#ifdef __aarch64__
INLINE void halves_to_floats(const uint16_t *from, float *to) { store(to, load_float16(from)); }
INLINE void floats_to_halves(const float *from, uint16_t *to) { store_float16(to, load(from)); }
#else
INLINE void halves_to_floats(const uint16_t *from, float *to) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)));
}

INLINE void floats_to_halves(const float *from, uint16_t *to) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
#endif

// Read *count* weights of every row from *input* on, and zeros up to CHUNK.
static void read_chunk(const void *const rows[PANEL], Format source, int64_t input, int64_t count, Chunk chunk) {
    for (int output = 0; output < PANEL; output++) {
        float *to = chunk[output];
        if (rows[output] == NULL) {
            memset(to, 0, sizeof *chunk);
        } else if (source == FLOAT32) {
            memset(to, 0, sizeof *chunk);
            memcpy(to, (const float *)rows[output] + input, (size_t)count * sizeof(float));
        } else {
            uint16_t from[CHUNK] = {0};
            memcpy(from, (const uint16_t *)rows[output] + input, (size_t)count * sizeof(uint16_t));
            if (source == BFLOAT16)
                for (int i = 0; i < CHUNK; i++) to[i] = bits_to_float((uint32_t)from[i] << 16);
            else
                for (int i = 0; i < CHUNK; i += 8) halves_to_floats(from + i, to + i);
        }
    }
}

// The largest magnitude among CHUNK numbers, as the bits of a float: those of a NaN are above all others.
INLINE uint32_t largest(const float *numbers, uint32_t so_far) {
    for (int i = 0; i < CHUNK; i++) {
        uint32_t magnitude = float_to_bits(numbers[i]) & 0x7fffffff;
        so_far = magnitude > so_far ? magnitude : so_far;
    }
    return so_far;
}

// The power of two that brings the largest scale of an output with this largest weight to [2^14, 2^15). A normal number.
static float unit_of(uint32_t largest_weight) {
    if (largest_weight >= 0x7f800000) return 1.0f; // NaN or infinite: the scale will say so
    float scale = bits_to_float(largest_weight) / 127.0f;
    int exponent = (int)(float_to_bits(scale) >> 23) - 14; // biased; scale / unit is in [2^14, 2^15)
    return bits_to_float((uint32_t)(exponent < 1 ? 1 : exponent) << 23);
}

// The scale of a group with this largest weight: the least half whose 127-fold is not below it.
static uint16_t scale_of(uint32_t largest_weight, float unit) {
    if (largest_weight >= 0x7f800000) return 0x7e00; // NaN
    float exact[8] = {bits_to_float(largest_weight) / 127.0f / unit}, rounded[8];
    uint16_t scale[8];
    floats_to_halves(exact, scale);
    halves_to_floats(scale, rounded);
    return (uint16_t)(scale[0] + (rounded[0] < exact[0]));
}

static void pack_group(const Chunk chunk, int64_t count, const float units[PANEL], char *group) {
    uint16_t scales[PANEL];
    int8_t integers[PANEL][CHUNK];
    for (int output = 0; output < PANEL; output++) {
        const float *weights = chunk[output];
        uint16_t scale[8] = {scale_of(largest(weights, 0), units[output])};
        float width[8];
        halves_to_floats(scale, width);
        scales[output] = scale[0];
        float inverse = 1.0f / units[output], divisor = scale[0] == 0 ? 1.0f : width[0]; // unit * scale may be too small
        for (int i = 0; i < CHUNK; i++) {
            float integer = weights[i] * inverse / divisor;
            integer = integer > 127.0f ? 127.0f : integer < -127.0f ? -127.0f : integer;
            // 1.5 * 2^23 leaves the nearest integer in the low bits of the float, ties to even.
            integers[output][i] = (int8_t)float_to_bits(integer + 12582912.0f);
        }
    }
    memcpy(group, scales, sizeof scales);
    int8_t *line = (int8_t *)group + SCALES_BYTES;
    for (int64_t i = 0; i < count; i += 2, line += 2 * PANEL)
        for (int output = 0; output < PANEL; output++) {
            line[2 * output] = integers[output][i];
            line[2 * output + 1] = integers[output][i + 1];
        }
}

static void pack_int8(const void *const rows[PANEL], Format source, int64_t inputs, char *panel) {
    Chunk chunk;
    uint32_t largest_weights[PANEL] = {0};
    for (int64_t input = 0; input < inputs; input += CHUNK) {
        read_chunk(rows, source, input, least(CHUNK, inputs - input), chunk);
        for (int output = 0; output < PANEL; output++)
            largest_weights[output] = largest(chunk[output], largest_weights[output]);
    }
    float units[PANEL];
    for (int output = 0; output < PANEL; output++) units[output] = unit_of(largest_weights[output]);
    memcpy(panel, units, sizeof units);
    for (int64_t input = 0; input < inputs; input += GROUP) {
        int64_t count = least(GROUP, inputs - input);
        read_chunk(rows, source, input, count, chunk);
        pack_group(chunk, round_up(count, 2), units, panel + front_bytes(INT8, inputs) + panel_offset(INT8, input));
    }
}

static void pack_chunk(Format format, const Chunk chunk, int64_t count, char *lines) {
    uint32_t words[PANEL][CHUNK]; // what a line has of each output
    const int64_t num_lines = format == BFLOAT16 ? count / 2 : count;
    for (int output = 0; output < PANEL; output++) {
        const float *from = chunk[output];
        if (format == BFLOAT16)
            for (int i = 0; i < CHUNK / 2; i++)
                words[output][i] = float_to_bfloat16(from[2 * i]) | (uint32_t)float_to_bfloat16(from[2 * i + 1]) << 16;
        else
            memcpy(words[output], from, sizeof words[output]);
    }
    for (int64_t i = 0; i < num_lines; i++) {
        uint32_t line[PANEL];
        for (int output = 0; output < PANEL; output++) line[output] = words[output][i];
        if (format == FLOAT16) {
            float numbers[PANEL];
            memcpy(numbers, line, sizeof numbers);
            floats_to_halves(numbers, (uint16_t *)lines + i * PANEL);
            floats_to_halves(numbers + 8, (uint16_t *)lines + i * PANEL + 8);
        } else {
            memcpy(lines + i * (int64_t)sizeof line, line, sizeof line);
        }
    }
}

void NAME(pack)(Format format, const void *const rows[PANEL], Format source, int64_t inputs, void *panel) {
    if (format == INT8) {
        pack_int8(rows, source, inputs, panel);
        return;
    }
    Chunk chunk;
    for (int64_t input = 0; input < inputs; input += CHUNK) {
        int64_t count = least(CHUNK, inputs - input);
        read_chunk(rows, source, input, count, chunk);
        pack_chunk(format, chunk, round_up(count, 2), (char *)panel + panel_offset(format, input));
    }
}

static void prepare_int16(const float *x, int64_t inputs, void *activations) {
    uint32_t largest_bits = 0;
    for (int64_t i = 0; i < inputs; i += CHUNK) largest_bits = largest(x + i, largest_bits);
    float scale = bits_to_float(largest_bits) / 32767.0f, smallest = bits_to_float(1u << 23);
    if (scale < smallest) scale = smallest; // smaller ones have too few bits; a NaN stays
    int16_t *to = activations;
    for (int64_t i = 0; i < inputs; i++) {
        float integer = x[i] / scale;
        integer = integer > 32767.0f ? 32767.0f : integer < -32767.0f ? -32767.0f : integer;
        to[i] = (int16_t)float_to_bits(integer + 12582912.0f);
    }
    memcpy((char *)activations + row_scale_offset(INT8, inputs), &scale, sizeof scale);
}

// Round groups of 32 to int8, each with a scale of its own.
static void prepare_int8(const float *x, int64_t inputs, void *activations) {
    int8_t *to = activations;
    GroupOfRow *group = (GroupOfRow *)((char *)activations + row_scale_offset(Q8_0, inputs));
    for (int64_t i = 0; i < inputs; i += BLOCK_GROUP, group++) {
        uint32_t largest_bits = 0;
        for (int k = 0; k < BLOCK_GROUP; k++) {
            uint32_t magnitude = float_to_bits(x[i + k]) & 0x7fffffff;
            largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
        }
        float scale = bits_to_float(largest_bits) / 127.0f, smallest = bits_to_float(1u << 23);
        if (scale < smallest) scale = smallest; // a NaN stays
        int32_t integers[BLOCK_GROUP], sums[2] = {0, 0};
        for (int k = 0; k < BLOCK_GROUP; k++) {
            float integer = x[i + k] / scale;
            integer = integer > 127.0f ? 127.0f : integer < -127.0f ? -127.0f : integer;
            integers[k] = (int32_t)float_to_bits(integer + 12582912.0f); // as in `pack_group`
        }
        for (int k = 0; k < BLOCK_GROUP; k++) to[i + k] = (int8_t)integers[k];
        for (int k = 0; k < BLOCK_GROUP / 2; k++) sums[0] += to[i + k], sums[1] += to[i + BLOCK_GROUP / 2 + k];
        *group = (GroupOfRow){scale, scale * (float)(sums[0] + sums[1]), sums[0], sums[1]};
    }
}

void NAME(prepare)(Format format, const float *x, int64_t inputs, void *activations) {
    inputs = round_up(inputs, ROW_MULTIPLE);
    if (format == INT8) {
        prepare_int16(x, inputs, activations);
        return;
    }
    if (is_blocked(format)) {
        prepare_int8(x, inputs, activations);
        return;
    }
#if PAIRS_OF_BFLOAT16
    if (format == BFLOAT16) {
        for (int64_t i = 0; i < inputs; i += 16) {
            __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
            memcpy((uint16_t *)activations + i, &rounded, sizeof rounded);
        }
        return;
    }
#endif
    memcpy(activations, x, (size_t)inputs * sizeof(float));
}
