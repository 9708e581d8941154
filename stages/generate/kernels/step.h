// One step of a decoder: what Python calls. `decoder.py` has the same structures.
#pragma once
#include <stdint.h>

#include "kernels.h"

typedef struct {
    Matrix gate_up; // panels of gate and up in turn; `outputs` counts both
    Matrix down;
} Mlp;

// What layers may differ in.
typedef struct {
    int64_t window;           // a token sees this many tokens, itself included; 0: all before it
    const float *frequencies; // [rotary_dim / 2]: radians per position; NULL: nothing is rotated
    float rope_factor;        // of cosines and sines
} Kind;

typedef struct {
    const float *input_norm, *mlp_norm; // [hidden]
    const float *norm_after_attention, *norm_after_mlp; // [hidden]: of their outputs; NULL: none
    const float *q_norm, *k_norm;       // [head_dim]; NULL: none
    Matrix qkv[3];      // q, k and v in one matrix, or in one each if their formats differ; the others have no outputs
    Matrix output;
    Mlp mlp;            // where there are no experts
    Matrix router;      // hidden -> num_experts
    const Mlp *experts; // [num_experts]; NULL: none
    int64_t kind;       // its index in the model's
    int64_t part, place; // of a page: the part that has its keys and values, and which of its layers this is
} Layer;

typedef struct {
    const Variant *variant;
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, rotary_dim, vocabulary;
    int64_t num_experts, experts_per_token;
    // The embeddings that are here: those of the tokens from *first_token* on. Ranks that compute a model together each
    // have a part of them, of every head, MLP and expert, and of the head's outputs.
    int64_t first_token, num_embeddings;
    int32_t normalize; // the shares of a token's experts sum to 1
    int32_t gelu;      // gates are GELU with tanh, else SiLU
    float eps;
    float attention_scale, attention_cap; // of `Pages`
    float logits_cap, embedding_scale;
    int embedding_type;    // a `ggml_type`
    const void *embedding; // [num_embeddings][hidden]; NULL: the weights of the head, which is of blocks
    const Layer *layers;
    const float *norm; // [hidden]
    Matrix head;
    const Kind *kinds;
    int64_t num_kinds;
    int64_t num_parts, window; // parts of a page; all but the first are only there for the last *window* tokens
    int32_t threads;          // that compute, the caller among them
} Model;

typedef struct {
    int64_t num_tokens, num_rows;
    const int32_t *token_ids;     // [num_tokens], the rows one after the other
    const int32_t *starts;        // [num_rows + 1]: row b's tokens are [starts[b], starts[b + 1])
    const int32_t *lengths;       // [num_rows]: tokens of the row after this step, those of the step being the last
    const int32_t *tables;        // [num_rows][num_parts][table_width]: the pages of each row
    int64_t table_width;
    const float *frequencies; // [num_tokens][rotary_dim / 2], or NULL: those of the kinds of layers
    void *pages;              // [place][keys, values], each as in `Pages`
    int64_t num_pages, page_size; // all parts of pages are counted
    Format format; // of the pages
    float *x;      // [num_tokens][hidden]: here goes the last layer's output
    int64_t wrong; // the index of what was refused
} Step;

// Several steps in one call: each row has one token, and each step computes those that the step before has drawn. Nothing
// follows a step in which a row draws one of its ends, or no token.
typedef struct {
    int64_t num_steps; // the most
    const int32_t *ends, *end_starts; // row b ends with one of ends[end_starts[b]] .. ends[end_starts[b + 1] - 1]
    int32_t *best;                    // [num_rows]
    const int32_t *logits_rows;       // [num_rows]: its own number for a row that is drawn, else -1
    float *logits;                    // [num_rows][vocabulary], if some are drawn
    const int64_t *drawn;             // [num_drawn]: rows
    int64_t num_drawn;
    const float *divisors;   // [num_drawn]
    const int64_t *numbers;  // [num_steps][6][num_drawn]
    int64_t *tokens;         // [num_steps][num_rows]
    int64_t num_done;        // steps that have tokens
} Several;

typedef enum {
    DONE = 0,
    NO_MEMORY = 1,
    WRONG_TOKEN = 2,  // wrong: its index in token_ids
    WRONG_ROW = 3,    // wrong: a row that has no tokens, or fewer than the step computes, or more than its table holds
    WRONG_PAGE = 4,   // wrong: its row
} Outcome;
