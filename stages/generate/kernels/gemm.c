// y = W x + b on packed panels. Every output is one chain of multiply-adds over the inputs in order: it is the same for
// any number of rows and panels. Where a block of inputs ends, the chain is stored as float32 and goes on from there.
#include "gemm.h"
#include "vector.h"

#define UNROLL _Pragma("GCC unroll 32")

// Of a kernel. Arrays have these sizes, because gcc keeps arrays of a variable size in memory.
#define MOST_ROWS 8
#define MOST_VECTORS (4 * VECTORS)

// Activations that share a line of a panel, as 4-byte words.
INLINE int words_of_line(Format format) { return format == BFLOAT16 && !PAIRS_OF_BFLOAT16 ? 2 : 1; }

// Some rows of activations times some panels, over some inputs: the sums stay in registers.
typedef struct {
    const char *rows, *panels; // at the first input of the block
    int64_t row_bytes, panel_bytes;
    float *out;
    int64_t stride;
    int64_t inputs;
    int first, last;        // whether these are the first and the last inputs
    const float *bias;      // of the first panel; NULL: none
    const char *front;      // of the first panel
    int64_t first_input;    // of the block
    const char *row_scales; // of the first row
    // Lines (groups, units) of each panel that the next block of weights begins with and this one fetches into the cache.
    const char *ahead;
    int64_t num_ahead;
} Block;

// The weights of a line for LANES outputs. *word* says which of its inputs, where there are two for different words.
INLINE Vector weights_of(const Format format, const char *line, const int word) {
    if (format == FLOAT16) return from_halves(line);
    if (format == FLOAT32 || PAIRS_OF_BFLOAT16) return load(line);
    return word == 0 ? from_even(line) : from_odd(line);
}

INLINE void add_product(const Format format, Vector *sum, Vector activation, Vector weights) {
#if PAIRS_OF_BFLOAT16
    if (format == BFLOAT16) {
        *sum = _mm512_dpbf16_ps(*sum, (__m512bh)activation, (__m512bh)weights);
        return;
    }
#else
    (void)format;
#endif
    MULTIPLY_ADD(*sum, activation, weights);
}

// Add the products with one line of every panel.
INLINE void add_line(const Format format, const int rows, const int panels, const char *x, int64_t row_bytes,
                     const char *line, int64_t panel_bytes, Vector sums[MOST_ROWS][MOST_VECTORS]) {
    const int vectors = panels * VECTORS, vector_bytes = LANES * (format == FLOAT16 ? 2 : 4);
    UNROLL for (int word = 0; word < words_of_line(format); word++, x += 4) {
        // clang would keep what it read for the even inputs, and has no registers for it.
        if (word > 0) __asm__ volatile("" ::: "memory");
        // Beside the sums, the registers hold either the activations or the weights: what is fewer.
        if (rows < vectors) {
            Vector activations[MOST_ROWS];
            UNROLL for (int r = 0; r < rows; r++) activations[r] = spread(*(const float *)(x + r * row_bytes));
            UNROLL for (int v = 0; v < vectors; v++) {
                const char *panel = line + v / VECTORS * panel_bytes;
                Vector weights = weights_of(format, panel + v % VECTORS * vector_bytes, word);
                UNROLL for (int r = 0; r < rows; r++) add_product(format, &sums[r][v], activations[r], weights);
            }
        } else {
            Vector weights[MOST_VECTORS];
            UNROLL for (int v = 0; v < vectors; v++) {
                const char *panel = line + v / VECTORS * panel_bytes;
                weights[v] = weights_of(format, panel + v % VECTORS * vector_bytes, word);
            }
            UNROLL for (int r = 0; r < rows; r++) {
                Vector activation = spread(*(const float *)(x + r * row_bytes));
                UNROLL for (int v = 0; v < vectors; v++) add_product(format, &sums[r][v], activation, weights[v]);
            }
        }
    }
}

// Weights that are needed soon go to the first cache, those that are *far* ahead to the second one.
INLINE void fetch(const int far, const char *weights) {
    if (far)
        __builtin_prefetch(weights, 0, 2);
    else
        __builtin_prefetch(weights);
}

INLINE void multiply_floats(const Format format, const int rows, const int panels, const Block *block) {
    const int words = words_of_line(format), line_bytes = format == FLOAT16 ? 32 : 64;
    const int64_t lines = format == FLOAT32 || format == FLOAT16 ? block->inputs : block->inputs / 2;
    const int64_t row_bytes = block->row_bytes, panel_bytes = block->panel_bytes, num_ahead = block->num_ahead;
    const char *x = block->rows, *line = block->panels, *ahead = block->ahead;
    Vector sums[MOST_ROWS][MOST_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < panels * VECTORS; v++)
            sums[r][v] = block->first ? spread(0.0f) : load(block->out + r * block->stride + v * LANES);
    int64_t i = 0;
    for (; i < num_ahead; i++, x += 4 * words, line += line_bytes, ahead += line_bytes) {
        UNROLL for (int p = 0; p < panels; p++) fetch(rows <= 2, ahead + p * panel_bytes); // they took whole panels
        add_line(format, rows, panels, x, row_bytes, line, panel_bytes, sums);
    }
    for (; i < lines; i++, x += 4 * words, line += line_bytes)
        add_line(format, rows, panels, x, row_bytes, line, panel_bytes, sums);
    UNROLL for (int v = 0; v < panels * VECTORS; v++) {
        const int biased = block->last && block->bias != NULL;
        Vector bias = biased ? load(block->bias + v * LANES) : spread(0.0f);
        UNROLL for (int r = 0; r < rows; r++)
            store(block->out + r * block->stride + v * LANES, biased ? add(sums[r][v], bias) : sums[r][v]);
    }
}

// Scales and minima of a group of a unit, for LANES outputs. *front* has those of its super-block, or of INT4 its own.
INLINE Vector scales_of(const Format format, const char *unit, const char *front, const int64_t group, const int lane) {
    if (is_int4(format)) return from_halves(front + 2 * lane);
    if (format == Q6_K) return multiplied(from_signed(unit + group * PANEL + lane), from_halves(front + 2 * lane));
    if (!has_two_levels(format)) return from_halves(unit + group * 2 * PANEL + 2 * lane);
    return multiplied(from_unsigned(unit + group * 2 * PANEL + lane), from_halves(front + 2 * lane));
}

INLINE Vector minima_of(const Format format, const char *unit, const char *front, const int64_t group, const int lane) {
    if (is_int4(format)) return multiplied(from_signed(front + 2 * PANEL + lane), from_halves(front + 2 * lane));
    if (!has_two_levels(format)) return from_halves(unit + 64 + group * 2 * PANEL + 2 * lane);
    return multiplied(from_unsigned(unit + group * 2 * PANEL + PANEL + lane), from_halves(front + 2 * PANEL + 2 * lane));
}

#if BYTES_AS_SHORTS
// Add the products of 4 inputs of Q8_0.
INLINE void add_shorts(const int rows, const int panels, const char *x, int64_t row_bytes, const char *line,
                       int64_t panel_bytes, Integers exact[MOST_ROWS][MOST_VECTORS]) {
    UNROLL for (int odd = 0; odd < 2; odd++) {
        Integers weights[MOST_VECTORS];
        UNROLL for (int v = 0; v < panels * VECTORS; v++) {
            Integers four = load_bytes(line + v / VECTORS * panel_bytes + v % VECTORS * LANES * 4);
            weights[v] = odd ? odd_shorts(four) : even_shorts(four);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            Integers pair = spread_word(x + r * row_bytes + 4 * odd);
            UNROLL for (int v = 0; v < panels * VECTORS; v++) MULTIPLY_ADD_PAIRS(exact[r][v], pair, weights[v]);
        }
    }
}
#endif

// Add the products of 8 inputs, one line or two, with the activations at *x* of each row.
INLINE void add_eight(const Format format, const int rows, const int panels, const char *x, int64_t row_bytes,
                      const char *line, int64_t panel_bytes, Integers exact[MOST_ROWS][MOST_VECTORS]) {
#if BYTES_AS_SHORTS
    if (format == Q8_0) {
        add_shorts(rows, panels, x, row_bytes, line, panel_bytes, exact);
        add_shorts(rows, panels, x + 8, row_bytes, line + 4 * PANEL, panel_bytes, exact);
        return;
    }
#endif
    UNROLL for (int v = 0; v < panels * VECTORS; v++) {
        const char *at = line + v / VECTORS * panel_bytes + v % VECTORS * LANES * 4;
        Integers four = load_bytes(at), others = has_nibbles(format) ? high_nibbles(four) : load_bytes(at + 4 * PANEL);
        if (has_nibbles(format)) four = low_nibbles(four);
#if BYTES_ARE_UNSIGNED
        if (format == Q8_0) four = from_signed_bytes(four), others = from_signed_bytes(others);
#endif
        UNROLL for (int r = 0; r < rows; r++) {
            Integers x_four = spread_word(x + r * row_bytes), x_others = spread_word(x + r * row_bytes + 4);
            ADD_BYTES(exact[r][v], four, x_four, others, x_others);
        }
    }
}

INLINE int has_inner_chains(const Format format) { return is_int4(format) && format != INT4_32; }

// The formats with units. The integers of a group are summed exactly, whatever the instructions; then each output has one
// chain of multiply-adds over the groups. INT4 has a chain for the groups that share a scale, and another one over these.
INLINE void multiply_units(const Format format, const int rows, const int panels, const Block *block) {
    const int64_t row_bytes = block->row_bytes, panel_bytes = block->panel_bytes;
    const int inputs_of_group = format == Q6_K ? BLOCK_GROUP / 2 : BLOCK_GROUP;
    const int vectors = panels * VECTORS, bytes_of_eight = (has_nibbles(format) ? 4 : 8) * PANEL;
    const int32_t zero = BYTES_ARE_UNSIGNED && format == Q8_0 ? 128 : zero_of(format); // of the bytes that are multiplied
    const char *x = block->rows, *unit = block->panels, *ahead = block->ahead;
    int64_t num_ahead = block->num_ahead;
    Vector sums[MOST_ROWS][MOST_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            sums[r][v] = block->first ? spread(0.0f) : load(block->out + r * block->stride + v * LANES);
    Vector of_scale[MOST_ROWS][MOST_VECTORS];
    float weighted[MOST_ROWS];
    for (int64_t input = 0; input < block->inputs; input += GROUP, unit += unit_bytes(format), ahead += unit_bytes(format)) {
        const int64_t place = block->first_input + input;
        const char *line = unit + head_bytes(format);
        const char *row_groups = block->row_scales + place / BLOCK_GROUP * (int64_t)sizeof(GroupOfRow);
        // Line by line, because caches wait for few at a time; but many rows of nibbles have no time for that.
        const int fetches = num_ahead-- > 0, at_once = rows > 4 && has_nibbles(format);
        for (int64_t byte = 0; fetches && byte < (at_once ? unit_bytes(format) : head_bytes(format)); byte += 64)
            UNROLL for (int p = 0; p < panels; p++) fetch(rows == 1, ahead + p * panel_bytes + byte);
        if (fetches && is_int4(format) && place % most(front_inputs(format), GROUP) == 0)
            UNROLL for (int p = 0; p < panels; p++) {
                const char *next = block->front + (panels + p) * panel_bytes + place / front_inputs(format) * FRONT_BYTES;
                fetch(rows == 1, next);
                if (format == INT4_32) fetch(rows == 1, next + FRONT_BYTES);
            }
        for (int group = 0; group < GROUP / inputs_of_group; group++) {
            const int64_t front_place = front_inputs(format) ? (place + group * inputs_of_group) / front_inputs(format) : 0;
            const char *front = block->front + front_place * FRONT_BYTES;
            const char *of_rows = row_groups + group * inputs_of_group / BLOCK_GROUP * (int64_t)sizeof(GroupOfRow);
            Integers exact[MOST_ROWS][MOST_VECTORS];
            UNROLL for (int r = 0; r < rows; r++) {
                const GroupOfRow *of_row = (const GroupOfRow *)(of_rows + r * row_bytes);
                int32_t sum = format != Q6_K ? of_row->first_sum + of_row->last_sum
                              : group % 2    ? of_row->last_sum
                                             : of_row->first_sum;
                UNROLL for (int v = 0; v < vectors; v++) exact[r][v] = zero ? spread_integer(-zero * sum) : no_integers();
            }
            UNROLL for (int i = 0; i < inputs_of_group; i += 8, x += 8 * activation_size(format), line += bytes_of_eight) {
                for (int byte = 0; !at_once && fetches && byte < bytes_of_eight; byte += 64)
                    UNROLL for (int p = 0; p < panels; p++) fetch(rows == 1, ahead + (line - unit) + p * panel_bytes + byte);
                add_eight(format, rows, panels, x, row_bytes, line, panel_bytes, exact);
            }
            if (has_inner_chains(format)) {
                const int64_t first = (place + group * inputs_of_group) % front_inputs(format);
                if (first == 0)
                    UNROLL for (int r = 0; r < rows; r++) {
                        weighted[r] = 0;
                        UNROLL for (int v = 0; v < vectors; v++) of_scale[r][v] = spread(0.0f);
                    }
                UNROLL for (int r = 0; r < rows; r++) {
                    const GroupOfRow *of_row = (const GroupOfRow *)(of_rows + r * row_bytes);
                    weighted[r] += of_row->weighted;
                    UNROLL for (int v = 0; v < vectors; v++)
                        MULTIPLY_ADD(of_scale[r][v], to_floats(exact[r][v]), spread(of_row->scale));
                }
                if (first + inputs_of_group < front_inputs(format)) continue;
            }
            UNROLL for (int v = 0; v < vectors; v++) {
                const int lane = v % VECTORS * LANES;
                const int64_t panel = v / VECTORS * panel_bytes;
                Vector scales = scales_of(format, unit + panel, front + panel, group, lane), minima = scales;
                if (has_minima(format)) minima = minima_of(format, unit + panel, front + panel, group, lane);
                UNROLL for (int r = 0; r < rows; r++) {
                    if (has_inner_chains(format)) {
                        MULTIPLY_ADD(sums[r][v], of_scale[r][v], scales);
                        MULTIPLY_ADD(sums[r][v], minima, spread(weighted[r]));
                        continue;
                    }
                    const GroupOfRow *of_row = (const GroupOfRow *)(of_rows + r * row_bytes);
                    Vector of_group = multiplied(to_floats(exact[r][v]), scales);
                    MULTIPLY_ADD(sums[r][v], of_group, spread(of_row->scale));
                    if (has_minima(format)) MULTIPLY_ADD(sums[r][v], minima, spread(of_row->weighted));
                }
            }
        }
    }
    UNROLL for (int v = 0; v < vectors; v++) {
        const int biased = block->last && block->bias != NULL;
        Vector bias = biased ? load(block->bias + v * LANES) : spread(0.0f);
        UNROLL for (int r = 0; r < rows; r++)
            store(block->out + r * block->stride + v * LANES, biased ? add(sums[r][v], bias) : sums[r][v]);
    }
}

INLINE int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

// The most rows of a block. 7 and 8 rows of units are one block, although some of its sums are in memory: two blocks would
// unpack each unit twice. More rows are faster in blocks of 6.
#define USUAL_ROWS 6
INLINE int64_t rows_at_once(Format format, int64_t num_rows) {
    return VECTORS == 1 && is_blocked(format) && num_rows <= MOST_ROWS ? MOST_ROWS : USUAL_ROWS;
}

// As many as the registers hold the sums of. Units need two kinds of sums.
INLINE int panels_at_once(Format format, int64_t rows) {
    if (VECTORS == 1) return is_blocked(format) && rows > 2 ? 2 : 4;
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

INLINE void multiply_block(const Format format, const int rows, const int panels, const Block *block) {
    if (is_blocked(format))
        multiply_units(format, rows, panels, block);
    else
        multiply_floats(format, rows, panels, block);
}

typedef void (*Kernel)(const Block *block);

#define KERNEL(format, rows) \
    static void wide_##format##_##rows(const Block *block) { \
        multiply_block(format, rows, panels_at_once(format, rows), block); \
    } \
    static void narrow_##format##_##rows(const Block *block) { multiply_block(format, rows, 1, block); }
#define KERNELS(format) \
    KERNEL(format, 1) KERNEL(format, 2) KERNEL(format, 3) KERNEL(format, 4) \
    KERNEL(format, 5) KERNEL(format, 6) KERNEL(format, 7) KERNEL(format, 8)
#define EACH_FORMAT(of) \
    of(FLOAT32) of(BFLOAT16) of(FLOAT16) of(Q4_0) of(Q4_1) of(Q4_K) of(Q8_0) of(Q5_1) of(Q5_K) of(Q6_K) \
    of(INT4_32) of(INT4_64) of(INT4_128)
EACH_FORMAT(KERNELS)

#define BY_ROWS(width) {NULL, width##_1, width##_2, width##_3, width##_4, width##_5, width##_6, width##_7, width##_8},
#define WIDE(format) [format] = BY_ROWS(wide_##format)
#define NARROW(format) [format] = BY_ROWS(narrow_##format)
static const Kernel wide[NUM_FORMATS][MOST_ROWS + 1] = {EACH_FORMAT(WIDE)};
static const Kernel narrow[NUM_FORMATS][MOST_ROWS + 1] = {EACH_FORMAT(NARROW)};

// Bytes of the panels that stay in the first cache while all rows are multiplied with them. With few rows the next ones
// have to fit beside them. With many, wide vectors need larger blocks, so that the sums are stored less often.
#define CACHED_BYTES 16384
#define CACHED_BYTES_OF_MANY (VECTORS == 1 ? 32768 : 16384)
#define MANY_ROWS 64

// A few rows read each weight once, and wait for the memory: they take whole panels, and fetch the next ones.
#define FEW_ROWS (VECTORS == 1 ? USUAL_ROWS : 2)
INLINE int64_t bytes_of_a_block(Format format, int64_t num_rows) {
    if (num_rows <= (is_blocked(format) ? rows_at_once(format, num_rows) : FEW_ROWS)) return INT64_MAX;
    return num_rows < MANY_ROWS ? CACHED_BYTES : CACHED_BYTES_OF_MANY;
}

// Multiply all rows with one block of weights. *ahead* is the next one, with *num_ahead* lines or groups of that size in
// each panel: each block of rows fetches a part of them.
static void multiply_rows(const Kernel kernels[], Block block, int64_t num_rows, int64_t num_blocks, const char *ahead,
                          int64_t num_ahead, int64_t size) {
    for (int64_t b = 0; b < num_blocks; b++) {
        const int64_t rows = num_rows / num_blocks + (b < num_rows % num_blocks);
        const int64_t fetched = num_ahead * b / num_blocks;
        block.ahead = ahead + fetched * size;
        block.num_ahead = num_ahead * (b + 1) / num_blocks - fetched;
        kernels[rows](&block);
        block.rows += rows * block.row_bytes;
        block.row_scales += rows * block.row_bytes;
        block.out += rows * block.stride;
    }
}

void NAME(multiply)(const Matrix *matrix, const void *rows, int64_t num_rows, int64_t first_panel, int64_t num_panels,
                    float *out, int64_t stride) {
    if (num_rows == 0) return;
    const Format format = matrix->format;
    const int64_t row_bytes = NAME(activation_bytes)(format, matrix->inputs);
    const int64_t panel_bytes = NAME(panel_bytes)(format, matrix->inputs);
    const int64_t inputs = round_up(matrix->inputs, 2), num_groups = (inputs + GROUP - 1) / GROUP;
    const int64_t group_bytes = panel_offset(format, GROUP) - panel_offset(format, 0);
    const int64_t front = front_bytes(format, matrix->inputs);
    const int64_t cached_bytes = bytes_of_a_block(format, num_rows);
    const int64_t line = is_blocked(format) ? GROUP : format == BFLOAT16 ? 2 : 1; // inputs of what a block fetches
    const int64_t num_blocks = parts(num_rows, rows_at_once(format, num_rows));
    const int64_t at_once = panels_at_once(format, (num_rows + num_blocks - 1) / num_blocks);
    for (int64_t p = 0, width; p < num_panels; p += width) {
        width = num_panels - p < at_once ? 1 : at_once;
        const int64_t most_groups = cached_bytes / group_bytes / width;
        const int64_t steps = (num_groups + most_groups - 1) / most_groups; // of nearly the same size
        // No block ends between weights that have a chain of their own.
        const int64_t whole = has_inner_chains(format) ? most(GROUP, front_inputs(format)) : GROUP;
        const int64_t depth = round_up((num_groups + steps - 1) / steps * GROUP, whole);
        const char *panel = (const char *)matrix->panels + (first_panel + p) * panel_bytes;
        for (int64_t input = 0; input < inputs; input += depth) {
            const int64_t left = inputs - input, here = least(depth, left);
            const Block block = {
                .rows = (const char *)rows + input * activation_size(format),
                .panels = panel + front + panel_offset(format, input),
                .row_bytes = row_bytes,
                .panel_bytes = panel_bytes,
                .out = out + p * PANEL,
                .stride = stride,
                .inputs = here,
                .first = input == 0,
                .last = here == left,
                .bias = matrix->bias == NULL ? NULL : matrix->bias + (first_panel + p) * PANEL,
                .front = panel,
                .first_input = input,
                .row_scales = (const char *)rows + row_scale_offset(format, inputs),
            };
            const char *ahead = panel + front + (block.last ? width * panel_bytes : panel_offset(format, input + depth));
            int64_t inputs_ahead = block.last ? here : least(depth, left - here);
            if (block.last && num_panels - p < 2 * width) inputs_ahead = 0;
            multiply_rows(width == 1 ? narrow[format] : wide[format], block, num_rows, num_blocks, ahead,
                          inputs_ahead / line, group_bytes / (GROUP / line));
        }
    }
}

// What a thread does in a nanosecond, roughly: bytes of weights read, and multiplications of a full kernel.
#define BYTES_PER_NS 20
#ifdef __AVX512F__
static const int64_t products_per_ns[NUM_FORMATS] = {100, 200, 100, 250, 230, 230, 250, 230, 230, 230, 230, 230, 230};
#else
static const int64_t products_per_ns[NUM_FORMATS] = {50, 50, 50, 120, 110, 110, 80, 80, 80, 80, 110, 110, 110};
#endif

// How long a call should take. With many rows longer, because every call reads the activations into the second cache.
#define CALL_NS 100000
#define LONG_CALL_NS 500000
#define CALLS_PER_THREAD 4

// Bytes of activations that stay in the second cache, and the rows for which it is worth to read the weights again.
#ifdef __AVX512F__
#define ROWS_BYTES 524288
#else
#define ROWS_BYTES 262144
#endif
#define ENOUGH_ROWS 96

void NAME(tile)(const Matrix *matrix, int64_t num_rows, int threads, int64_t *rows, int64_t *panels) {
    const int64_t row_bytes = NAME(activation_bytes)(matrix->format, matrix->inputs);
    const int64_t num_panels = (matrix->outputs + PANEL - 1) / PANEL;
    const int64_t most_rows = most(ROWS_BYTES / row_bytes, ENOUGH_ROWS);
    const int64_t num_tiles = most((num_rows + most_rows - 1) / most_rows, 1);
    *rows = num_tiles == 1 ? num_rows : round_up((num_rows + num_tiles - 1) / num_tiles, USUAL_ROWS);
    const int64_t reading = NAME(panel_bytes)(matrix->format, matrix->inputs) / BYTES_PER_NS;
    const int64_t multiplying = *rows * matrix->inputs * PANEL / products_per_ns[matrix->format];
    int64_t count = (*rows >= MANY_ROWS ? LONG_CALL_NS : CALL_NS) / (most(reading, multiplying) + 1);
    count = least(count, num_panels * num_tiles / (CALLS_PER_THREAD * threads)) / 4 * 4;
    // With few panels for many threads, two at a time if all are done sooner.
    if (count == 0) {
        const int64_t fours = (num_panels * num_tiles + 3) / 4, twos = (num_panels * num_tiles + 1) / 2;
        count = (twos + threads - 1) / threads * 2 < (fours + threads - 1) / threads * 4 ? 2 : 4;
    }
    *panels = least(count, num_panels);
}
