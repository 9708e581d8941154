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
    if (is_blocked(format)) return bytes_of_units(format, inputs);
    return panel_offset(format, inputs);
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

// The largest magnitude of a group, as the bits of a float: those of a NaN are above all others.
INLINE uint32_t largest(const float *numbers) {
    uint32_t found = 0;
    for (int i = 0; i < BLOCK_GROUP; i++) {
        uint32_t magnitude = float_to_bits(numbers[i]) & 0x7fffffff;
        found = magnitude > found ? magnitude : found;
    }
    return found;
}

// number / scale as an integer from -127 to 127, ties to even.
INLINE int8_t rounded(float number, float scale) {
    float integer = number / scale;
    integer = integer > 127.0f ? 127.0f : integer < -127.0f ? -127.0f : integer;
    return (int8_t)float_to_bits(integer + 12582912.0f); // 1.5 * 2^23 leaves it in the low bits of the float
}

// The scale of weights of which this is the largest: the least half whose 127-fold is not below it. NaN if there is none.
static uint16_t scale_of(uint32_t largest_weight) {
    float exact[8] = {bits_to_float(largest_weight) / 127.0f}, nearest[8];
    uint16_t scale[8];
    if (!(exact[0] <= 65504.0f)) return 0x7e00;
    floats_to_halves(exact, scale);
    halves_to_floats(scale, nearest);
    return (uint16_t)(scale[0] + (nearest[0] < exact[0]));
}

// Round the weights of a unit of Q8_0: each group has a scale.
static void pack_unit(const Chunk chunk, char *unit) {
    for (int output = 0; output < PANEL; output++)
        for (int group = 0; group < GROUP / BLOCK_GROUP; group++) {
            const float *weights = chunk[output] + group * BLOCK_GROUP;
            uint16_t scale[8] = {scale_of(largest(weights))};
            float width[8];
            halves_to_floats(scale, width);
            ((uint16_t *)unit)[group * PANEL + output] = scale[0];
            int8_t *to = (int8_t *)unit + head_bytes(Q8_0) + group * BLOCK_GROUP * PANEL + output * 4;
            for (int i = 0; i < BLOCK_GROUP; i++)
                to[i / 4 * 4 * PANEL + i % 4] = rounded(weights[i], scale[0] ? width[0] : 1.0f);
        }
}

static void pack_q8_0(const void *const rows[PANEL], Format source, int64_t inputs, char *panel) {
    Chunk chunk;
    for (int64_t input = 0; input < inputs; input += GROUP) {
        read_chunk(rows, source, input, least(GROUP, inputs - input), chunk);
        pack_unit(chunk, panel + panel_offset(Q8_0, input));
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
    if (format == Q8_0) {
        pack_q8_0(rows, source, inputs, panel);
        return;
    }
    Chunk chunk;
    for (int64_t input = 0; input < inputs; input += CHUNK) {
        int64_t count = least(CHUNK, inputs - input);
        read_chunk(rows, source, input, count, chunk);
        pack_chunk(format, chunk, round_up(count, 2), (char *)panel + panel_offset(format, input));
    }
}

// Round groups of 32 to int8, each with a scale of its own.
static void prepare_bytes(Format format, const float *x, int64_t inputs, void *activations) {
    GroupOfRow *group = (GroupOfRow *)((char *)activations + row_scale_offset(format, inputs));
    for (int64_t i = 0; i < inputs; i += BLOCK_GROUP, group++) {
        float scale = bits_to_float(largest(x + i)) / 127.0f, smallest = bits_to_float(1u << 23);
        if (scale < smallest) scale = smallest; // a NaN stays
        int32_t integers[BLOCK_GROUP], sums[2] = {0, 0};
        int8_t bytes[BLOCK_GROUP];
        for (int k = 0; k < BLOCK_GROUP; k++) integers[k] = rounded(x[i + k], scale);
        for (int k = 0; k < BLOCK_GROUP / 2; k++) sums[0] += integers[k], sums[1] += integers[BLOCK_GROUP / 2 + k];
        for (int k = 0; k < BLOCK_GROUP; k++) bytes[k] = (int8_t)integers[k];
        *group = (GroupOfRow){scale, scale * (float)(sums[0] + sums[1]), sums[0], sums[1]};
        if (activation_size(format) == 1) memcpy((int8_t *)activations + i, bytes, sizeof bytes);
        else
            for (int k = 0; k < BLOCK_GROUP; k += 4) {
                const int32_t first = integers[k] & 0xffff, second = integers[k + 1] & 0xffff;
                const int32_t four[2] = {first | integers[k + 2] * 65536, second | integers[k + 3] * 65536};
                memcpy((int16_t *)activations + i + k, four, sizeof four);
            }
    }
}

void NAME(prepare)(Format format, const float *x, int64_t inputs, void *activations) {
    inputs = round_up(inputs, ROW_MULTIPLE);
    if (is_blocked(format)) {
        prepare_bytes(format, x, inputs, activations);
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
