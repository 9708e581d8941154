// The memory of one step, and its jobs that several threads share.
#pragma once
#include "pool.h"
#include "step.h"

#define API __attribute__((visibility("default")))

// What happens to a product: it is stored, added to what is there, or gate and up become one.
typedef enum { STORE, ADD, GATE } Then;

// One product that all threads share, as one job or, for experts, as one of several in a job.
typedef struct {
    const struct Work *work;
    const Matrix *matrix;
    const char *rows;
    int64_t num_rows, tile_rows, tile_panels, row_tiles, num_chunks;
    Then then;
    float *out;
    int64_t stride;
} Product;

typedef struct {
    int32_t row, token, count, first_head, num_heads;
    int32_t segment; // -1: all of them
    int64_t part;    // where the parts of a segment go, in floats
} AttentionChunk;

// What the attention of the layers of a kind computes in a step.
typedef struct {
    AttentionChunk *chunks, *merges;
    int64_t num_chunks, num_merges, num_parts;
} AttentionList;

// Each thread has a copy. The memory that it names is the same.
typedef struct Work {
    const Model *model;
    const Step *step;
    Member *me;
    int64_t layer;
    float *sums; // [num_tokens][hidden]: the embedding, and each layer's attention and MLP, are added here; x, or a rank's part
    int32_t *positions, *rows; // [num_tokens]: of each token, in its row; and which row that is
    float *cosines, *sines;    // [num_kinds][num_tokens][rotary_dim / 2]
    float *added;              // [num_tokens][hidden]: outputs that are normalised before they are added; NULL: none are
    float *qkv, *attended, *inner;
    int64_t qkv_stride, attended_stride, inner_stride; // in floats, multiples of ROW_MULTIPLE; what is beyond is zero
    char *activations; // prepared rows
    char *own;         // a few of them, for each thread
    int64_t own_bytes;
    AttentionList *attention; // [num_kinds]
    int64_t part_floats;
    int64_t attend_bytes; // of a thread's scratch memory; behind them a chunk's outputs wait to be published
    float *attention_parts;
    // experts: pairs of a token and one of its experts, those of an expert side by side
    char *pair_activations;
    float *router, *shares, *pair_inner, *pair_out;
    int32_t *chosen, *pair_tokens, *pair_of, *first_pair;
    Product *products; // for each thread one for each expert that has tokens
    int64_t router_stride, pair_inner_stride, pair_out_stride;
    float *best; // the head
    int32_t *best_ids;
    char *scratch;
    int64_t scratch_bytes;
} Work;

// Tokens whose experts are computed at once; more need more memory.
#define EXPERT_TOKENS 512

#define ROWS_AT_ONCE 8 // of a chunk of what goes row by row

static inline int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }
static inline int64_t padded(int64_t count) { return round_up(count, ROW_MULTIPLE); }
// The pages of a row that have the keys and values of this layer.
static inline const int32_t *table_of(const Work *work, int64_t row) {
    const Model *model = work->model;
    return work->step->tables + (row * model->num_parts + model->layers[work->layer].part) * work->step->table_width;
}

static inline const Kind *kind_of(const Work *work) {
    return &work->model->kinds[work->model->layers[work->layer].kind];
}
static inline float *scratch_of(const Work *work, int thread) {
    return (float *)(work->scratch + thread * work->scratch_bytes);
}

// Begin and end a call that uses the threads: one at a time. Returns how the thread rounded before.
uint32_t begin(int threads);
void end(uint32_t before);

// Lay out the memory of a step, or of the head.
Outcome begin_work(Work *work);
Outcome begin_head(Work *work, int64_t num_rows, int64_t tiles, int64_t tile_floats);
// Memory for the rest of this call; NULL: there is none.
void *lend(int64_t bytes);

// Bring rows of *in*, or those that *rows* names, into the form that *matrix* multiplies, normalised if there is a *norm*.
// Returns where they are: a few rows each thread prepares for itself, more are a job and go to *out*.
const char *prepare(const Work *work, const float *in, int64_t in_stride, const int32_t *rows, int64_t num_rows,
                    const float *norm, const Matrix *matrix, char *out);
// The same, always to *out*.
void prepare_for_all(const Work *work, const float *in, int64_t in_stride, const int32_t *rows, int64_t num_rows,
                     const float *norm, const Matrix *matrix, char *out);

Product product_of(const Work *work, const Matrix *matrix, const char *rows, int64_t num_rows, Then then, float *out,
                   int64_t stride);
void product_chunk(void *job, int64_t chunk, int thread);
void publish_product(void *job, int64_t chunk, int thread);
void multiply(const Work *work, const Matrix *matrix, const char *rows, int64_t num_rows, Then then, float *out,
              int64_t stride);

// Add outputs of attention or MLP, [num_tokens][hidden], normalised, to x.
void add_normed(const Work *work, const float *outputs, const float *norm, float *x);

// All rows' attention of a layer: from `qkv` and the pages to `attended`.
void attend(const Work *work);

// A mixture of experts (https://arxiv.org/abs/1701.06538) of x, added to the sums.
void mix_experts(const Work *work, const Layer *layer);
