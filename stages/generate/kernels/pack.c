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

// ---- int4: a scale and a zero for each group, searched for

#define STEPS 8 // widths of a group that are tried, for each of three zeros

// The integers of one group of 16 outputs, for one zero and width of each, and what they lose.
typedef struct {
    float scales[PANEL], zeros[PANEL], losses[PANEL];
} Choice;

// Round weights to integers of these scales, with the zero, and sum what the best scale for them needs.
INLINE void try_scales(const float (*weights)[PANEL], const float (*importance)[PANEL], int64_t count, const float *energy,
                       Choice *choice) {
    float products[PANEL] = {0}, squares[PANEL] = {0}, inverse[PANEL];
    for (int o = 0; o < PANEL; o++) inverse[o] = choice->scales[o] > 0.0f ? 1.0f / choice->scales[o] : 0.0f;
    for (int64_t i = 0; i < count; i++)
        for (int o = 0; o < PANEL; o++) {
            float integer = weights[i][o] * inverse[o] + choice->zeros[o];
            integer = integer < 0.0f ? 0.0f : integer > 15.0f ? 15.0f : integer;
            float distance = (integer + 12582912.0f) - 12582912.0f - choice->zeros[o];
            float weighted = importance[i][o] * distance;
            products[o] += weighted * weights[i][o];
            squares[o] += weighted * distance;
        }
    for (int o = 0; o < PANEL; o++) {
        float scale = squares[o] > 0.0f ? products[o] / squares[o] : 0.0f;
        choice->scales[o] = scale;
        choice->losses[o] = energy[o] - 2.0f * scale * products[o] + scale * scale * squares[o];
    }
}

// Choose the scale and the zero of a group of so many inputs with the least weighted error. As for Q4_K, a weight counts
// by its size and that of all: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c, `make_qkx2_quants`.
static void choose(const float (*weights)[PANEL], int64_t count, Choice *best) {
    float importance[GROUP][PANEL], low[PANEL] = {0}, high[PANEL] = {0}, size[PANEL] = {0}, energy[PANEL] = {0};
    for (int64_t i = 0; i < count; i++)
        for (int o = 0; o < PANEL; o++) {
            float w = weights[i][o];
            low[o] = w < low[o] ? w : low[o];
            high[o] = w > high[o] ? w : high[o];
            size[o] += w * w;
        }
    for (int o = 0; o < PANEL; o++) size[o] = __builtin_sqrtf(size[o] / (float)count);
    for (int64_t i = 0; i < count; i++)
        for (int o = 0; o < PANEL; o++) {
            float w = weights[i][o];
            importance[i][o] = size[o] + (w < 0.0f ? -w : w);
            energy[o] += importance[i][o] * w * w;
        }
    for (int o = 0; o < PANEL; o++) best->losses[o] = 3.4e38f, best->scales[o] = best->zeros[o] = 0.0f;
    for (int step = 0; step < STEPS; step++)
        for (int shift = -1; shift <= 1; shift++) {
            Choice choice;
            for (int o = 0; o < PANEL; o++) {
                float scale = (high[o] - low[o]) / (13.5f + 0.5f * (float)step);
                float zero = scale > 0.0f ? -low[o] / scale : 0.0f;
                zero = (zero + 12582912.0f) - 12582912.0f + (float)shift;
                choice.zeros[o] = zero < 0.0f ? 0.0f : zero > 15.0f ? 15.0f : zero;
                choice.scales[o] = scale;
            }
            try_scales(weights, importance, count, energy, &choice);
            for (int o = 0; o < PANEL; o++)
                if (choice.losses[o] < best->losses[o]) {
                    best->losses[o] = choice.losses[o];
                    best->scales[o] = choice.scales[o];
                    best->zeros[o] = choice.zeros[o];
                }
        }
    for (int o = 0; o < PANEL; o++)
        if (!(energy[o] <= 3.4e38f)) best->scales[o] = bits_to_float(0x7fc00000); // a weight is not a number
}

static void pack_int4(const void *const rows[PANEL], Format source, int64_t inputs, char *panel) {
    const Format format = INT4_32;
    Chunk chunk;
    for (int64_t input = 0; input < inputs; input += GROUP) {
        float weights[GROUP][PANEL];
        read_chunk(rows, source, input, least(GROUP, inputs - input), chunk);
        for (int i = 0; i < GROUP; i++)
            for (int o = 0; o < PANEL; o++) weights[i][o] = chunk[o][i];
        char *unit = panel + front_bytes(format, inputs) + panel_offset(format, input);
        memset(unit, 0, (size_t)unit_bytes(format));
        for (int64_t first = 0; first < GROUP; first += front_inputs(format)) {
            char *front = panel + (input + first) / front_inputs(format) * FRONT_BYTES;
            Choice best;
            choose((const float (*)[PANEL])weights + first, front_inputs(format), &best);
            uint16_t scales[PANEL];
            float widths[PANEL];
            floats_to_halves(best.scales, scales), floats_to_halves(best.scales + 8, scales + 8);
            halves_to_floats(scales, widths), halves_to_floats(scales + 8, widths + 8);
            memset(front, 0, FRONT_BYTES);
            memcpy(front, scales, sizeof scales);
            for (int o = 0; o < PANEL; o++) {
                ((int8_t *)front)[2 * PANEL + o] = (int8_t)-(int)best.zeros[o];
                for (int64_t i = first; i < first + front_inputs(format); i++) {
                    float integer = widths[o] > 0.0f ? weights[i][o] / widths[o] + best.zeros[o] : best.zeros[o];
                    integer = integer < 0.0f ? 0.0f : integer > 15.0f ? 15.0f : integer;
                    unit[i / 8 * 4 * PANEL + o * 4 + i % 4] |= (char)((int)(integer + 0.5f) << (i % 8 / 4 * 4));
                }
            }
        }
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
    if (format == INT4_32) {
        pack_int4(rows, source, inputs, panel);
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
