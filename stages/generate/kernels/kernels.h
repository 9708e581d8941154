// What the C files of this folder share.
//
// The contract: a number depends on the row (or the query) that it belongs to and on nothing else. It is summed in one
// order that the source fixes, whatever the number of rows beside it, the chunks of a prompt, or the threads. So a
// request gets the same bits alone, in any batch, and when a prompt is computed again after a preemption.
// No function of libm is called, and the compiler may not contract or reorder: -ffp-contract=off, no -ffast-math.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Outputs of one panel of a packed matrix.
#define PANEL 16

// Rows of activations lie this many numbers apart, rounded up. What lies beyond their end is zero.
#define ROW_MULTIPLE 64

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// The formats from Q4_0 on lie in panels as gemm.h says. Those up to Q6_K are of GGUF files. The weights of Q5_0 become
// Q8_0, and so do those of a checkpoint with `--quantization int8`. INT4 with the inputs of a group: AWQ, GPTQ and the like.
typedef enum {
    FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2,
    Q4_0 = 3, Q4_1 = 4, Q4_K = 5, Q8_0 = 6, Q5_1 = 7, Q5_K = 8, Q6_K = 9,
    INT4_32 = 10, INT4_64 = 11, INT4_128 = 12, NUM_FORMATS = 13
} Format;

// y = W x + b, packed by `Variant.pack`.
typedef struct {
    const void *panels;
    const float *bias; // one for each output, zeros up to a multiple of PANEL; NULL: none
    int64_t outputs, inputs;
    Format format;
    const int32_t *order; // [inputs]: the activation that is multiplied by each weight; NULL: they are in order
} Matrix;

// Keys that lie together, dimension by dimension, on a page that has so many. A tile of them is read as it is multiplied.
#define KEY_GROUP 16

// The keys and values of one layer, as they lie: [page][kv head][slot][head_dim]. But keys of pages with KEY_GROUP slots or
// more: [page][kv head][slot / KEY_GROUP][head_dim][slot % KEY_GROUP], in bfloat16 with two dimensions side by side. Slots that
// were never written may hold anything, even NaN, without any effect.
typedef struct {
    const void *keys, *values;
    int64_t num_heads, num_kv_heads, head_dim, page_size;
    int64_t window; // a token sees this many tokens, itself included; 0: all before it
    Format format;  // FLOAT32, BFLOAT16 or FLOAT16
    float scale;    // of the scores
    float cap;      // scores become cap * tanh(score / cap); 0: they stay as they are
} Pages;

// Tokens of a row that are summed by themselves before they are merged, in order, with those before: a long row may be
// computed by several threads, and the result is the same as by one. A larger page is a segment by itself.
#define SEGMENT 1024

static inline int64_t segment_tokens(int64_t page_size) { return most(SEGMENT, page_size); }

// What depends on the instructions that a CPU has. One for each way that this library was compiled.
typedef struct {
    const char *name; // "avx2", "avx512f", "avx512vnni", "avx512", "neon"

    // ---- matrices (gemm.c)

    // Bytes of one packed panel of a matrix with so many inputs; a multiple of 64.
    int64_t (*panel_bytes)(Format format, int64_t inputs);
    // Pack one panel: *rows* are the weights of its PANEL outputs, *source* their format (FLOAT32, BFLOAT16 or
    // FLOAT16); NULL rows are zeros.
    void (*pack)(Format format, const void *const rows[PANEL], Format source, int64_t inputs, void *panel);
    // Bytes of one row of activations as `multiply` wants them; a multiple of 64.
    int64_t (*activation_bytes)(Format format, int64_t inputs);
    // Bring one row of activations, with zeros up to ROW_MULTIPLE, into that form.
    void (*prepare)(Format format, const float *x, int64_t inputs, void *activations);
    // out[r * stride + 16 p + j] = the dot product of row r and output j of panel first_panel + p, plus its bias.
    // *rows* are `activation_bytes` apart.
    void (*multiply)(const Matrix *matrix, const void *rows, int64_t num_rows, int64_t first_panel, int64_t num_panels,
                     float *out, int64_t stride);
    // How many rows and panels one call of `multiply` should get when *num_rows* rows are multiplied on *threads*.
    // The number of panels is even, or all.
    void (*tile)(const Matrix *matrix, int64_t num_rows, int threads, int64_t *rows, int64_t *panels);

    // ---- attention (attention.c)

    // Queries of one row that one call of `attend` should get at most.
    int64_t (*queries)(const Pages *pages);
    // Bytes that a thread lends to `attend` or `attend_segment`.
    int64_t (*attend_scratch)(const Pages *pages);
    // Compute *count* queries of one row, all query heads of one kv head. The first one is at *position*, and query i
    // sees [max(0, position + i + 1 - window), position + i + 1). *table* has the row's pages. Queries and outputs of
    // neighbouring tokens lie *q_stride* and *o_stride* floats apart; q and o point at the first query head of the
    // kv head.
    void (*attend)(const Pages *pages, const int32_t *table, int64_t position, int64_t count, int64_t kv_head,
                   const float *q, int64_t q_stride, float *o, int64_t o_stride, void *scratch);
    // Long rows with one query: one segment by itself, the one with this number from position 0 on, into *part*,
    // (num_heads / num_kv_heads) * `part_floats` floats. `merge` makes of all parts, in order from the first segment
    // that the query sees, exactly what `attend` makes.
    int64_t (*part_floats)(const Pages *pages);
    void (*attend_segment)(const Pages *pages, const int32_t *table, int64_t position, int64_t kv_head, int64_t segment,
                           const float *q, float *part, void *scratch);
    void (*merge)(const Pages *pages, const float *parts, int64_t num_parts, float *o);
} Variant;

extern const Variant variant_avx2, variant_avx512f, variant_avx512vnni, variant_avx512, variant_neon;
