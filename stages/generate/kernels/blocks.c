// The blocks of GGUF files: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h has their layouts. They become
// panels (gemm.h) without any rounding, or floats.
#include <string.h>

#include "gemm.h"
#include "rows.h"
#include "work.h"

#define API __attribute__((visibility("default")))

// `ggml_type` of ggml.h.
typedef enum {
    OF_F32 = 0,
    OF_F16 = 1,
    OF_Q4_0 = 2,
    OF_Q4_1 = 3,
    OF_Q5_0 = 6,
    OF_Q5_1 = 7,
    OF_Q8_0 = 8,
    OF_Q4_K = 12,
    OF_Q5_K = 13,
    OF_Q6_K = 14,
    OF_BF16 = 30
} Type;

static int is_super(Type type) { return type >= OF_Q4_K; }

static int64_t block_bytes(Type type) {
    switch (type) {
    case OF_Q4_0: return 18;
    case OF_Q4_1: return 20;
    case OF_Q5_0: return 22;
    case OF_Q5_1: return 24;
    case OF_Q8_0: return 34;
    case OF_Q4_K: return 144;
    case OF_Q5_K: return 176;
    default: return 210;
    }
}

static Format format_of(Type type) {
    switch (type) {
    case OF_Q4_0: return Q4_0;
    case OF_Q4_1: return Q4_1;
    case OF_Q5_1: return Q5_1;
    case OF_Q4_K: return Q4_K;
    case OF_Q5_K: return Q5_K;
    case OF_Q6_K: return Q6_K;
    default: return Q8_0;
    }
}

// GROUP weights of one output. Halves stay as they are.
typedef struct {
    int8_t integers[GROUP]; // as gemm.h has them stored
    uint16_t scales[2], minima[2];          // of groups of 32; of super-blocks: d and dmin come first
    uint8_t small_scales[4], small_minima[2]; // Q4_K, Q5_K: of groups of 32. Q6_K: of groups of 16, signed
} Unit;

static uint16_t half_at(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

// One block of 32 is one group of a unit.
static void read_small(Type type, const uint8_t *block, int group, Unit *unit) {
    int8_t *to = unit->integers + group * BLOCK_GROUP;
    unit->scales[group] = half_at(block);
    block += 2;
    if (type == OF_Q4_1 || type == OF_Q5_1) {
        unit->minima[group] = half_at(block);
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

// 8 scales and 8 minima of 6 bits each, in 12 bytes.
static void read_small_scales(const uint8_t *from, int group, uint8_t *scale, uint8_t *minimum) {
    if (group < 4) {
        *scale = from[group] & 63;
        *minimum = from[group + 4] & 63;
    } else {
        *scale = (uint8_t)((from[group + 4] & 15) | from[group - 4] >> 6 << 4);
        *minimum = (uint8_t)(from[group + 4] >> 4 | from[group] >> 6 << 4);
    }
}

// One super-block of 256 is 4 units, of which this is the one with the number *part*.
static void read_super(Type type, const uint8_t *block, int part, Unit *unit) {
    if (type == OF_Q6_K) {
        const uint8_t *low = block + part / 2 * 64, *high = block + 128 + part / 2 * 32;
        for (int i = 0; i < GROUP; i++) {
            int integer = part % 2 ? low[i] >> 4 : low[i] & 15;
            integer |= (high[i % 32] >> (part % 2 * 4 + i / 32 * 2) & 3) << 4;
            unit->integers[i] = (int8_t)integer;
        }
        memcpy(unit->small_scales, block + 192 + part * 4, 4);
        unit->scales[0] = half_at(block + 208);
        return;
    }
    const uint8_t *fifth = block + 16, *nibbles = block + (type == OF_Q5_K ? 48 : 16) + part * 32;
    for (int i = 0; i < GROUP; i++) {
        int integer = i < 32 ? nibbles[i] & 15 : nibbles[i - 32] >> 4;
        if (type == OF_Q5_K) integer |= (fifth[i % 32] >> (part * 2 + i / 32) & 1) << 4;
        unit->integers[i] = (int8_t)integer;
    }
    for (int group = 0; group < 2; group++)
        read_small_scales(block + 4, part * 2 + group, &unit->small_scales[group], &unit->small_minima[group]);
    unit->scales[0] = half_at(block);
    unit->minima[0] = half_at(block + 2) ^ 0x8000; // it is subtracted
}

// Read the unit with this number of a row of so many inputs. What is beyond them is zero.
static void read_unit(Type type, const uint8_t *row, int64_t number, int64_t inputs, Unit *unit) {
    memset(unit, 0, sizeof *unit);
    if (!row) return;
    if (is_super(type)) {
        read_super(type, row + number / 4 * block_bytes(type), (int)(number % 4), unit);
        return;
    }
    for (int group = 0; group < 2; group++)
        if (number * GROUP + group * BLOCK_GROUP < inputs)
            read_small(type, row + (2 * number + group) * block_bytes(type), group, unit);
}

// ---- panels

static int64_t panel_bytes_of(Format format, int64_t inputs) {
    return front_bytes(format, inputs) + panel_offset(format, round_up(inputs, GROUP));
}

static void pack_unit(Format format, const Unit units[PANEL], int64_t number, char *panel, char *unit) {
    uint16_t *halves = (uint16_t *)unit, *front = (uint16_t *)(panel + number / 4 * FRONT_BYTES);
    uint8_t *bytes = (uint8_t *)unit, *line = bytes + head_bytes(format);
    for (int output = 0; output < PANEL; output++) {
        const Unit *from = &units[output];
        if (has_two_levels(format)) {
            front[output] = from->scales[0];
            front[PANEL + output] = from->minima[0];
        }
        for (int group = 0; group < 2; group++) {
            if (format == Q6_K) {
                bytes[2 * group * PANEL + output] = from->small_scales[2 * group];
                bytes[(2 * group + 1) * PANEL + output] = from->small_scales[2 * group + 1];
            } else if (has_two_levels(format)) {
                bytes[2 * group * PANEL + output] = from->small_scales[group];
                bytes[(2 * group + 1) * PANEL + output] = from->small_minima[group];
            } else {
                halves[group * PANEL + output] = from->scales[group];
                if (has_minima(format)) halves[(2 + group) * PANEL + output] = from->minima[group];
            }
        }
        const uint8_t *integers = (const uint8_t *)from->integers;
        for (int i = 0; i < GROUP; i += 4) {
            uint8_t *to = line + output * 4 + (has_nibbles(format) ? i / 8 : i / 4) * 4 * PANEL;
            for (int k = 0; k < 4; k++)
                if (!has_nibbles(format)) to[k] = integers[i + k];
                else if (i % 8 == 0) to[k] = (uint8_t)(integers[i + k] | integers[i + 4 + k] << 4);
        }
    }
}

typedef struct {
    Type type;
    const uint8_t *const *rows;
    int64_t num_panels, inputs, panel_bytes;
    char *out;
} Packing;

static void pack_chunk(void *job, int64_t number, int thread) {
    const Packing *p = job;
    const Format format = format_of(p->type);
    char *panel = p->out + number * p->panel_bytes, *unit = panel + front_bytes(format, p->inputs);
    (void)thread;
    for (int64_t i = 0; i * GROUP < p->inputs; i++, unit += unit_bytes(format)) {
        Unit units[PANEL];
        for (int output = 0; output < PANEL; output++)
            read_unit(p->type, p->rows[number * PANEL + output], i, p->inputs, &units[output]);
        pack_unit(format, units, i, panel, unit);
    }
}

static void pack_together(void *argument, Member *me) {
    pool_share(me, pack_chunk, 0, argument, ((const Packing *)argument)->num_panels);
}

// Pack rows of blocks. *rows* has the first block of each output, PANEL for each panel; NULL: zeros. *inputs* is a multiple
// of the inputs of a block.
API void kernels_pack_blocks(int type, const uint8_t *const *rows, int64_t num_panels, int64_t inputs, int threads, void *out) {
    const Format format = format_of((Type)type);
    uint32_t before = begin(threads);
    Packing job = {(Type)type, rows, num_panels, inputs, panel_bytes_of(format, inputs), out};
    pool_together(pack_together, &job);
    end(before);
}

// ---- floats

int64_t bytes_of_blocks(int type, int64_t inputs) {
    return inputs / (is_super((Type)type) ? SUPER_BLOCK : BLOCK_GROUP) * block_bytes((Type)type);
}

static void widen_unit(Format format, const Unit *unit, int64_t count, float *out) {
    float levels[4];
    uint16_t halves[4];
    memcpy(halves, unit->scales, 4), memcpy(halves + 2, unit->minima, 4);
    expand(FLOAT16, halves, 4, levels);
    for (int64_t k = 0; k < count; k++) {
        const int64_t group = k / BLOCK_GROUP;
        float integer = (float)unit->integers[k], scale = levels[group], minimum = levels[2 + group];
        if (format == Q4_0) integer -= 8;
        if (format == Q6_K) integer -= 32;
        if (format == Q6_K) scale = levels[0] * (float)(int8_t)unit->small_scales[k / 16];
        else if (has_two_levels(format)) {
            scale = levels[0] * (float)unit->small_scales[group];
            minimum = levels[2] * (float)unit->small_minima[group];
        }
        out[k] = has_minima(format) ? scale * integer + minimum : scale * integer;
    }
}

void unpack_blocks(int type, const void *row, int64_t inputs, float *out) {
    for (int64_t i = 0; i * GROUP < inputs; i++) {
        Unit unit;
        read_unit((Type)type, row, i, inputs, &unit);
        widen_unit(format_of((Type)type), &unit, least(GROUP, inputs - i * GROUP), out + i * GROUP);
    }
}

void unpack_output(const Matrix *matrix, int64_t number, float *out) {
    const Format format = matrix->format;
    const int64_t inputs = matrix->inputs, output = number % PANEL;
    const char *panel = (const char *)matrix->panels + number / PANEL * panel_bytes_of(format, inputs);
    const uint8_t *bytes = (const uint8_t *)panel + front_bytes(format, inputs);
    for (int64_t i = 0; i * GROUP < inputs; i++, bytes += unit_bytes(format)) {
        const uint16_t *halves = (const uint16_t *)bytes, *front = (const uint16_t *)(panel + i / 4 * FRONT_BYTES);
        const uint8_t *line = bytes + head_bytes(format) + output * 4;
        Unit unit;
        for (int group = 0; group < 2; group++) {
            unit.scales[group] = has_two_levels(format) ? front[output] : halves[group * PANEL + output];
            if (has_two_levels(format)) unit.minima[group] = front[PANEL + output];
            else unit.minima[group] = has_minima(format) ? halves[(2 + group) * PANEL + output] : 0;
            unit.small_minima[group] = bytes[(2 * group + 1) * PANEL + output];
        }
        for (int k = 0; k < 4; k++) unit.small_scales[k] = bytes[(format == Q6_K ? k : 2 * k % 4) * PANEL + output];
        for (int k = 0; k < GROUP; k++)
            if (has_nibbles(format)) unit.integers[k] = line[k / 8 * 4 * PANEL + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15;
            else unit.integers[k] = (int8_t)line[k / 4 * 4 * PANEL + k % 4];
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
    for (int64_t row = number * ROWS_AT_ONCE; row < least((number + 1) * ROWS_AT_ONCE, w->num_rows); row++) {
        float *out = w->out + row * w->inputs;
        if (!w->rows[row]) memset(out, 0, (size_t)w->inputs * sizeof(float));
        else if (w->type == OF_F32) expand(FLOAT32, w->rows[row], w->inputs, out);
        else if (w->type == OF_F16) expand(FLOAT16, w->rows[row], w->inputs, out);
        else if (w->type == OF_BF16) expand(BFLOAT16, w->rows[row], w->inputs, out);
        else unpack_blocks(w->type, w->rows[row], w->inputs, out);
    }
}

static void widen_together(void *argument, Member *me) {
    pool_share(me, widen_chunk, 0, argument, parts(((const Widening *)argument)->num_rows, ROWS_AT_ONCE));
}

// Write rows of any type as floats, [num_rows][inputs]. *rows* has where each begins; NULL: zeros.
API void kernels_widen(int type, const void *const *rows, int64_t num_rows, int64_t inputs, int threads, float *out) {
    uint32_t before = begin(threads);
    Widening job = {type, rows, num_rows, inputs, out};
    pool_together(widen_together, &job);
    end(before);
}
