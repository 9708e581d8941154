// The blocks of GGUF files: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h has their layouts. They
// become panels (gemm.h) without any rounding, or floats.
//
// A block of INT4 is a group of 32, 64 or 128 weights: the scale, a half; the zero, a byte; a byte that is not used; and
// the integers, weight 2 i in the low half of byte i.
#include <string.h>

#include "gemm.h"
#include "rows.h"
#include "work.h"

// `ggml_type` of ggml.h.
typedef enum {
    OF_F32 = 0, OF_F16 = 1, OF_Q4_0 = 2, OF_Q4_1 = 3, OF_Q5_0 = 6, OF_Q5_1 = 7, OF_Q8_0 = 8,
    OF_Q4_K = 12, OF_Q5_K = 13, OF_Q6_K = 14, OF_BF16 = 30,
    OF_INT4_32 = 100, OF_INT4_64 = 101, OF_INT4_128 = 102 // not of ggml
} Type;

// Of each type: the format of its panels, or of its numbers; and the bytes of a block.
static const struct {
    Format format;
    int64_t bytes;
} types[] = {
    [OF_F32] = {FLOAT32, 4}, [OF_F16] = {FLOAT16, 2}, [OF_BF16] = {BFLOAT16, 2}, [OF_Q4_0] = {Q4_0, 18},
    [OF_Q4_1] = {Q4_1, 20}, [OF_Q5_0] = {Q8_0, 22}, [OF_Q5_1] = {Q5_1, 24}, [OF_Q8_0] = {Q8_0, 34},
    [OF_Q4_K] = {Q4_K, 144}, [OF_Q5_K] = {Q5_K, 176}, [OF_Q6_K] = {Q6_K, 210},
    [OF_INT4_32] = {INT4_32, 20}, [OF_INT4_64] = {INT4_64, 36}, [OF_INT4_128] = {INT4_128, 68},
};

// GROUP weights of one output. Their scales are those that a unit of a panel has for an output, in the same order.
typedef struct {
    int8_t integers[GROUP];
    uint16_t halves[4]; // scales of the two groups, then minima. Of a super-block: d and dmin, each with a 0 behind it
    uint8_t small[4];   // scales and minima in a super-block; zeros of the two groups of INT4
} Unit;

INLINE uint16_t half_at(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

// One block of 32 is one group of a unit.
INLINE void read_small(const Type type, const uint8_t *block, int group, Unit *unit) {
    int8_t *to = unit->integers + group * BLOCK_GROUP;
    unit->halves[group] = half_at(block);
    block += 2;
    if (has_minima(types[type].format)) {
        unit->halves[2 + group] = half_at(block);
        block += 2;
    }
    if (type == OF_Q8_0) {
        memcpy(to, block, BLOCK_GROUP);
        return;
    }
    const int has_fifth = type == OF_Q5_0 || type == OF_Q5_1;
    const uint8_t *nibbles = block + (has_fifth ? 4 : 0);
    for (int i = 0; i < BLOCK_GROUP; i++) {
        int integer = i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4;
        if (has_fifth) integer |= (block[i / 8] >> i % 8 & 1) << 4;
        to[i] = (int8_t)(type == OF_Q5_0 ? integer - 16 : integer);
    }
}

// One super-block of 256 is 4 units, of which this is the one with the number *part*.
INLINE void read_super(const Type type, const uint8_t *block, int part, Unit *unit) {
    if (type == OF_Q6_K) {
        const uint8_t *low = block + part / 2 * 64, *high = block + 128 + part / 2 * 32;
        for (int i = 0; i < GROUP; i++) {
            int integer = part % 2 ? low[i] >> 4 : low[i] & 15;
            integer |= (high[i % 32] >> (part % 2 * 4 + i / 32 * 2) & 3) << 4;
            unit->integers[i] = (int8_t)integer;
        }
        memcpy(unit->small, block + 192 + part * 4, 4);
        unit->halves[0] = half_at(block + 208);
        return;
    }
    const uint8_t *fifth = block + 16, *nibbles = block + (type == OF_Q5_K ? 48 : 16) + part * 32;
    for (int i = 0; i < GROUP; i++) {
        int integer = i < 32 ? nibbles[i] & 15 : nibbles[i - 32] >> 4;
        if (type == OF_Q5_K) integer |= (fifth[i % 32] >> (part * 2 + i / 32) & 1) << 4;
        unit->integers[i] = (int8_t)integer;
    }
    // Scales and minima have 6 bits: those of the first 4 groups in the low bits of 8 bytes; the others have their low 4
    // bits in 4 bytes behind them, and 2 above those of the first.
    for (int k = 0; k < 4; k++) {
        const uint8_t *first = block + 4 + k % 2 * 4 + part % 2 * 2 + k / 2; // of a scale or minimum of the first 4
        uint8_t last = block[12 + part % 2 * 2 + k / 2];
        unit->small[k] = part < 2 ? *first & 63 : (uint8_t)((k % 2 ? last >> 4 : last & 15) | *first >> 6 << 4);
    }
    unit->halves[0] = half_at(block);
    unit->halves[2] = half_at(block + 2) ^ 0x8000; // it is subtracted
}

// GROUP weights of INT4 are two blocks, or one, or half of one. The inputs are a multiple of a block.
INLINE void read_int4(const Type type, const uint8_t *row, int64_t number, int64_t inputs, Unit *unit) {
    const int64_t of_block = front_inputs(types[type].format);
    for (int group = 0; group < 2; group++) {
        const int64_t input = number * GROUP + group * BLOCK_GROUP;
        if (input >= inputs) return;
        const uint8_t *block = row + input / of_block * types[type].bytes, *nibbles = block + 4 + input % of_block / 2;
        unit->halves[group] = half_at(block);
        unit->small[group] = block[2];
        for (int i = 0; i < BLOCK_GROUP; i++)
            unit->integers[group * BLOCK_GROUP + i] = (int8_t)(nibbles[i / 2] >> i % 2 * 4 & 15);
    }
}

// Read the unit with this number of a row of so many inputs. What is beyond them is zero.
INLINE void read_unit(const Type type, const uint8_t *row, int64_t number, int64_t inputs, Unit *unit) {
    memset(unit, 0, sizeof *unit);
    if (!row) return;
    if (is_int4(types[type].format)) {
        read_int4(type, row, number, inputs, unit);
        return;
    }
    if (has_two_levels(types[type].format)) {
        read_super(type, row + number / 4 * types[type].bytes, (int)(number % 4), unit);
        return;
    }
    for (int group = 0; group < 2; group++)
        if (number * GROUP + group * BLOCK_GROUP < inputs)
            read_small(type, row + (2 * number + group) * types[type].bytes, group, unit);
}

// ---- panels

// Where the front of a panel begins to be about a unit.
INLINE char *front_of(const Format format, char *panel, int64_t number) {
    return panel + (front_inputs(format) ? number * GROUP / front_inputs(format) * FRONT_BYTES : 0);
}

// Copy the unit of one output into a panel, or out of it. *front* belongs to its super-block, *place* to the unit.
#define COPY(of_unit, of_panel) (into ? (of_panel = of_unit) : (of_unit = of_panel))
INLINE void copy_unit(const Format format, int into, Unit *unit, int64_t output, char *front, char *place) {
    uint16_t *levels = (uint16_t *)front + output, *halves = (uint16_t *)place + output;
    uint8_t *small = (uint8_t *)place + output, *line = (uint8_t *)place + head_bytes(format) + output * 4;
    for (int k = 0; k < 2 && is_int4(format); k++) {
        char *of_group = front + (format == INT4_32 ? k * FRONT_BYTES : 0);
        COPY(unit->halves[k], ((uint16_t *)of_group)[output]);
        int8_t minus_zero = (int8_t)-unit->small[k], *to = (int8_t *)of_group + 2 * PANEL + output;
        COPY(minus_zero, *to);
        unit->small[k] = (uint8_t)-minus_zero;
    }
    for (int k = 0; k < 4 && !is_int4(format); k++)
        if (has_two_levels(format)) COPY(unit->small[k], small[k * PANEL]);
        else if (k < 2 || has_minima(format)) COPY(unit->halves[k], halves[k * PANEL]);
    for (int k = 0; k < 2 && has_two_levels(format); k++) COPY(unit->halves[2 * k], levels[k * PANEL]);
    for (int i = 0; i < GROUP; i += 4) { // 4 integers at once: they lie side by side in both
        const int nibbles = has_nibbles(format), high = nibbles && i % 8 ? 4 : 0;
        char *to = (char *)line + (nibbles ? i / 8 : i / 4) * 4 * PANEL;
        uint32_t word, other = 0;
        memcpy(&word, into ? (char *)unit->integers + i : to, 4);
        if (into && high) memcpy(&other, to, 4);
        if (into) word = other | word << high;
        else if (nibbles) word = word >> high & 0x0f0f0f0f;
        memcpy(into ? to : (char *)unit->integers + i, &word, 4);
    }
}

typedef struct {
    Type type;
    const uint8_t *const *rows;
    int64_t num_panels, inputs;
    char *out;
} Packing;

INLINE void pack_panel(const Type type, const Packing *p, int64_t number) {
    const Format format = types[type].format;
    char *panel = p->out + number * bytes_of_units(format, p->inputs), *place = panel + front_bytes(format, p->inputs);
    for (int64_t i = 0; i * GROUP < p->inputs; i++, place += unit_bytes(format))
        for (int output = 0; output < PANEL; output++) {
            Unit unit;
            read_unit(type, p->rows[number * PANEL + output], i, p->inputs, &unit);
            copy_unit(format, 1, &unit, output, front_of(format, panel, i), place);
        }
}

// The compiler makes a loop for each type: with what is known of it, a file is packed in a third of the time.
#define PACK(type) case type: pack_panel(type, p, number); break;
static void pack_chunk(void *job, int64_t number, int thread) {
    const Packing *p = job;
    (void)thread;
    switch (p->type) {
        PACK(OF_Q4_0) PACK(OF_Q4_1) PACK(OF_Q5_0) PACK(OF_Q5_1) PACK(OF_Q8_0) PACK(OF_Q4_K) PACK(OF_Q5_K) PACK(OF_Q6_K)
        PACK(OF_INT4_32) PACK(OF_INT4_64) PACK(OF_INT4_128)
    default:
        break;
    }
}

static void pack_together(void *argument, Member *me) {
    pool_share(me, pack_chunk, 0, argument, ((const Packing *)argument)->num_panels);
}

// Pack rows of blocks. *rows* has the first block of each output, PANEL for each panel; NULL: zeros. *inputs* is a
// multiple of the inputs of a block.
API void kernels_pack_blocks(int type, const uint8_t *const *rows, int64_t num_panels, int64_t inputs, int threads,
                             void *out) {
    uint32_t before = begin(threads);
    Packing job = {(Type)type, rows, num_panels, inputs, out};
    pool_together(pack_together, &job);
    end(before);
}

// ---- floats

static void widen_unit(Format format, const Unit *unit, int64_t count, float *out) {
    float levels[4];
    expand(FLOAT16, unit->halves, 4, levels);
    for (int64_t k = 0; k < count; k++) {
        const int64_t group = k / BLOCK_GROUP;
        float integer = (float)(unit->integers[k] - zero_of(format)), scale = levels[group], minimum = levels[2 + group];
        if (is_int4(format)) minimum = scale * -(float)unit->small[group];
        else if (format == Q6_K) scale = levels[0] * (float)(int8_t)unit->small[k / 16];
        else if (has_two_levels(format)) {
            scale = levels[0] * (float)unit->small[2 * group];
            minimum = levels[2] * (float)unit->small[2 * group + 1];
        }
        out[k] = has_minima(format) ? scale * integer + minimum : scale * integer;
    }
}

int64_t bytes_of_row(int type, int64_t inputs) {
    const Format format = types[type].format;
    return inputs / (front_inputs(format) ? front_inputs(format) : is_blocked(format) ? BLOCK_GROUP : 1) * types[type].bytes;
}

void widen_row(int type, const void *row, int64_t inputs, float *out) {
    const Format format = types[type].format;
    if (!is_blocked(format)) expand(format, row, inputs, out);
    else
        for (int64_t i = 0; i * GROUP < inputs; i++) {
            Unit unit;
            read_unit((Type)type, row, i, inputs, &unit);
            widen_unit(format, &unit, least(GROUP, inputs - i * GROUP), out + i * GROUP);
        }
}

void widen_output(const Matrix *matrix, int64_t number, float *out) {
    const Format format = matrix->format;
    const int64_t inputs = matrix->inputs;
    char *panel = (char *)matrix->panels + number / PANEL * bytes_of_units(format, inputs);
    char *place = panel + front_bytes(format, inputs);
    for (int64_t i = 0; i * GROUP < inputs; i++, place += unit_bytes(format)) {
        Unit unit = {{0}, {0}, {0}};
        copy_unit(format, 0, &unit, number % PANEL, front_of(format, panel, i), place);
        widen_unit(format, &unit, least(GROUP, inputs - i * GROUP), out + i * GROUP);
    }
}

typedef struct {
    int type;
    const void *const *rows;
    int64_t num_rows, inputs;
    float *out;
} Widening;

static void widen_chunk(void *job, int64_t number, int thread) {
    const Widening *w = job;
    (void)thread;
    for (int64_t row = number * ROWS_AT_ONCE; row < least((number + 1) * ROWS_AT_ONCE, w->num_rows); row++)
        widen_row(w->type, w->rows[row], w->inputs, w->out + row * w->inputs);
}

static void widen_together(void *argument, Member *me) {
    pool_share(me, widen_chunk, 0, argument, parts(((const Widening *)argument)->num_rows, ROWS_AT_ONCE));
}

// Write rows of any type as floats, [num_rows][inputs]. *rows* has where each begins.
API void kernels_widen(int type, const void *const *rows, int64_t num_rows, int64_t inputs, int threads, float *out) {
    uint32_t before = begin(threads);
    Widening job = {type, rows, num_rows, inputs, out};
    pool_together(widen_together, &job);
    end(before);
}
