#include "work.h"

#include <stdlib.h>
#include <string.h>

#include "rows.h"

#define ALIGNMENT 64
#define FEW_QUERIES 4 // of a row, which are split into segments where threads would be idle
#define LARGEST_TILE (64 * 1024) // floats of a product that wait in a thread's scratch memory

static char *memory;
static int64_t memory_bytes;

// Take *bytes* of the memory; with no memory yet, only count them.
static void *take(char *base, int64_t *taken, int64_t bytes) {
    char *place = base ? base + *taken : 0;
    *taken += round_up(bytes, ALIGNMENT);
    return place;
}

static int has_memory(int64_t bytes) {
    if (bytes <= memory_bytes) return 1;
    free(memory);
    memory_bytes = 0;
    memory = aligned_alloc(ALIGNMENT, (size_t)round_up(bytes, ALIGNMENT));
    if (!memory) return 0;
    memory_bytes = bytes;
    return 1;
}

void *lend(int64_t bytes) { return has_memory(bytes) ? memory : 0; }

static int64_t row_bytes(const Work *work, const Matrix *matrix) {
    return matrix->inputs ? work->model->variant->activation_bytes(matrix->format, matrix->inputs) : 0;
}

static Pages pages_of(const Work *work) {
    const Model *model = work->model;
    const Step *step = work->step;
    int64_t plane = step->num_pages * model->num_kv_heads * step->page_size * model->head_dim * bytes_of(step->format);
    char *keys = (char *)step->pages + model->layers[work->layer].place * 2 * plane;
    return (Pages){keys,           keys + plane, model->num_heads, model->num_kv_heads,    model->head_dim,
                   step->page_size, kind_of(work)->window, step->format, model->attention_scale, model->attention_cap};
}

// ---- what attention computes in a step: the same in every layer of a kind

static int64_t first_segment(const Work *work, const Kind *kind, int64_t position) {
    int64_t begin = kind->window ? most(0, position + 1 - kind->window) : 0;
    return begin / segment_tokens(work->step->page_size);
}

// List the segments that a query sees as chunks of their own, whose parts are merged.
static void list_segments(const Work *work, const Kind *kind, int64_t row, int32_t token, int64_t position, int64_t head,
                          AttentionList *list) {
    int64_t group = work->model->num_heads / work->model->num_kv_heads, first = first_segment(work, kind, position);
    int64_t end = position / segment_tokens(work->step->page_size) + 1;
    AttentionChunk merge = {(int32_t)row, token, 1, (int32_t)head, 1, (int32_t)(end - first),
                            list->num_parts * group * work->part_floats};
    if (list->merges) list->merges[list->num_merges] = merge;
    list->num_merges++;
    for (int64_t segment = first; segment < end; segment++, list->num_parts++, list->num_chunks++) {
        AttentionChunk chunk = {(int32_t)row, token, 1, (int32_t)head, 1, (int32_t)segment,
                                list->num_parts * group * work->part_floats};
        if (list->chunks) list->chunks[list->num_chunks] = chunk;
    }
}

// List the chunks of all rows, or count them where there is no list yet. Later queries come first: they cost more.
static void list_attention(const Work *work, const Kind *kind, AttentionList *list) {
    const Model *model = work->model;
    const Step *step = work->step;
    Pages pages = pages_of(work);
    int64_t heads = model->num_kv_heads, at_once = model->variant->queries(&pages);
    int64_t threads = pool_threads(), blocks = 0;
    for (int64_t row = 0; row < step->num_rows; row++)
        blocks += parts(step->starts[row + 1] - step->starts[row], at_once);
    int64_t heads_at_once = blocks >= 8 * threads ? heads : 1;
    int splits = threads > 1 && blocks * heads < 4 * threads;
    list->num_chunks = list->num_merges = list->num_parts = 0;
    for (int64_t row = 0; row < step->num_rows; row++) {
        int32_t start = step->starts[row], count = step->starts[row + 1] - start;
        if (splits && count <= FEW_QUERIES && step->lengths[row] > segment_tokens(step->page_size)) {
            for (int64_t i = 0; i < count * heads; i++)
                list_segments(work, kind, row, start + (int32_t)(i / heads), step->lengths[row] - count + i / heads,
                              i % heads, list);
            continue;
        }
        for (int64_t block = parts(count, at_once) - 1; block >= 0; block--)
            for (int64_t head = 0; head < heads; head += heads_at_once) {
                AttentionChunk chunk = {(int32_t)row, (int32_t)(start + block * at_once),
                                        (int32_t)least(at_once, count - block * at_once), (int32_t)head,
                                        (int32_t)least(heads_at_once, heads - head), -1, 0};
                if (list->chunks) list->chunks[list->num_chunks] = chunk;
                list->num_chunks++;
            }
    }
}

static const AttentionList *list_of(const Work *work) {
    return &work->attention[work->model->layers[work->layer].kind];
}

// Where the outputs of a chunk wait in the memory of a thread.
static float *outputs_of(const Work *work, int thread) {
    return (float *)((char *)scratch_of(work, thread) + work->attend_bytes);
}

// Outputs of one token of a chunk.
static int64_t outputs_of_token(const Model *model, const AttentionChunk *chunk) {
    return chunk->num_heads * (model->num_heads / model->num_kv_heads) * model->head_dim;
}

static void attention_chunk(void *job, int64_t index, int thread) {
    const Work *work = job;
    const Model *model = work->model;
    const AttentionChunk *chunk = &list_of(work)->chunks[index];
    Pages pages = pages_of(work);
    int64_t group = model->num_heads / model->num_kv_heads, position = work->positions[chunk->token];
    const int32_t *table = table_of(work, chunk->row);
    const float *q = work->qkv + chunk->token * work->qkv_stride + chunk->first_head * group * model->head_dim;
    float *o = outputs_of(work, thread), *scratch = scratch_of(work, thread);
    if (chunk->segment >= 0) {
        model->variant->attend_segment(&pages, table, position, chunk->first_head, chunk->segment, q, o, scratch);
        return;
    }
    for (int64_t head = 0; head < chunk->num_heads; head++) {
        int64_t offset = head * group * model->head_dim;
        model->variant->attend(&pages, table, position, chunk->count, chunk->first_head + head, q + offset,
                               work->qkv_stride, o + offset, outputs_of_token(model, chunk), scratch);
    }
}

static void publish_attention(void *job, int64_t index, int thread) {
    const Work *work = job;
    const Model *model = work->model;
    const AttentionChunk *chunk = &list_of(work)->chunks[index];
    int64_t group = model->num_heads / model->num_kv_heads, outputs = outputs_of_token(model, chunk);
    const float *o = outputs_of(work, thread);
    if (chunk->segment >= 0) {
        memcpy(work->attention_parts + chunk->part, o, (size_t)(group * work->part_floats) * sizeof(float));
        return;
    }
    float *to = work->attended + chunk->token * work->attended_stride + chunk->first_head * group * model->head_dim;
    for (int64_t token = 0; token < chunk->count; token++)
        memcpy(to + token * work->attended_stride, o + token * outputs, (size_t)outputs * sizeof(float));
}

static void merge_chunk(void *job, int64_t index, int thread) {
    const Work *work = job;
    const AttentionChunk *merge = &list_of(work)->merges[index];
    Pages pages = pages_of(work);
    int64_t group = work->model->num_heads / work->model->num_kv_heads;
    float *o = work->attended + merge->token * work->attended_stride + merge->first_head * group * work->model->head_dim;
    (void)thread;
    work->model->variant->merge(&pages, work->attention_parts + merge->part, merge->segment, o);
}

void attend(const Work *work) {
    const AttentionList *list = list_of(work);
    pool_share(work->me, attention_chunk, publish_attention, (void *)work, list->num_chunks);
    if (list->num_merges) pool_share(work->me, merge_chunk, 0, (void *)work, list->num_merges);
}

// ---- memory

static int64_t lay_out_experts(Work *work, char *base, int64_t taken) {
    const Model *model = work->model;
    const Layer *layer = 0;
    for (int64_t l = 0; l < model->num_layers; l++)
        if (model->layers[l].experts) layer = &model->layers[l];
    if (!layer) return taken;
    const Mlp *expert = &layer->experts[0];
    int64_t tokens = least(work->step->num_tokens, EXPERT_TOKENS), pairs = tokens * model->experts_per_token;
    work->router_stride = padded(model->num_experts);
    work->pair_inner_stride = padded(expert->down.inputs);
    work->pair_out_stride = padded(model->hidden);
    work->router = take(base, &taken, tokens * work->router_stride * 4);
    work->shares = take(base, &taken, pairs * 4);
    work->chosen = take(base, &taken, pairs * 4);
    work->pair_of = take(base, &taken, pairs * 4);
    work->pair_tokens = take(base, &taken, pairs * 4);
    work->first_pair = take(base, &taken, (model->num_experts + 1) * 4);
    work->products = take(base, &taken, pool_threads() * model->num_experts * (int64_t)sizeof(Product));
    work->pair_inner = take(base, &taken, pairs * work->pair_inner_stride * 4);
    work->pair_out = take(base, &taken, pairs * work->pair_out_stride * 4);
    work->pair_activations =
        take(base, &taken, pairs * most(row_bytes(work, &expert->gate_up), row_bytes(work, &expert->down)));
    return taken;
}

// *largest* has the largest number of each of all kinds of layers.
static int64_t lay_out(Work *work, char *base, const AttentionList *largest) {
    const Model *model = work->model;
    int64_t taken = 0, tokens = work->step->num_tokens, inner = 0, bytes = 0;
    int64_t angles = model->num_kinds * tokens * model->rotary_dim / 2, size = (int64_t)sizeof(AttentionChunk);
    int64_t widest = most(model->hidden, model->num_heads * model->head_dim), row_parts = 1;
    for (int64_t l = 0; l < model->num_layers; l++) {
        const Layer *layer = &model->layers[l];
        const Matrix *matrices[] = {&layer->qkv[0], &layer->qkv[1], &layer->qkv[2], &layer->output, &layer->mlp.gate_up,
                                    &layer->mlp.down, &layer->router,
                                    layer->experts ? &layer->experts->gate_up : &layer->output};
        for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) {
            bytes = most(bytes, row_bytes(work, matrices[i]));
            if (matrices[i]->order) row_parts = 2;
        }
        inner = most(inner, layer->mlp.down.inputs);
        widest = most(widest, layer->experts ? layer->experts->down.inputs : layer->mlp.down.inputs);
    }
    Pages pages = pages_of(work);
    work->qkv_stride = padded((model->num_heads + 2 * model->num_kv_heads) * model->head_dim);
    work->attended_stride = padded(model->num_heads * model->head_dim);
    work->inner_stride = padded(inner);
    work->positions = take(base, &taken, tokens * 4);
    work->rows = take(base, &taken, tokens * 4);
    work->cosines = take(base, &taken, angles * 4);
    work->sines = take(base, &taken, angles * 4);
    work->added = model->layers->norm_after_mlp ? take(base, &taken, tokens * model->hidden * 4) : 0;
    work->qkv = take(base, &taken, tokens * work->qkv_stride * 4);
    work->attended = take(base, &taken, tokens * work->attended_stride * 4);
    work->inner = take(base, &taken, tokens * work->inner_stride * 4);
    work->activations = take(base, &taken, tokens * bytes);
    work->own_bytes = least(tokens, ROWS_AT_ONCE) * bytes;
    work->own = take(base, &taken, work->own_bytes * pool_threads());
    work->attention = take(base, &taken, model->num_kinds * (int64_t)sizeof(AttentionList));
    for (int64_t kind = 0; kind < model->num_kinds; kind++) {
        AttentionList list = {take(base, &taken, largest->num_chunks * size), take(base, &taken, largest->num_merges * size)};
        if (base) work->attention[kind] = list;
    }
    work->attention_parts =
        take(base, &taken, largest->num_parts * model->num_heads / model->num_kv_heads * work->part_floats * 4);
    taken = lay_out_experts(work, base, taken);
    int64_t outputs = least(tokens, model->variant->queries(&pages)) * model->num_heads * model->head_dim;
    outputs = most(outputs, model->num_heads / model->num_kv_heads * work->part_floats);
    work->attend_bytes = round_up(model->variant->attend_scratch(&pages), ALIGNMENT);
    work->scratch_bytes = most(LARGEST_TILE * 4, work->attend_bytes + outputs * 4);
    work->scratch_bytes = parts(most(work->scratch_bytes, row_parts * padded(widest) * 4), 4096) * 4096;
    work->scratch = take(base, &taken, work->scratch_bytes * pool_threads());
    return taken;
}

Outcome begin_work(Work *work) {
    const Step *step = work->step;
    const Model *model = work->model;
    Pages pages = pages_of(work);
    AttentionList largest = {0};
    work->part_floats = model->variant->part_floats(&pages);
    for (const Kind *kind = model->kinds; kind < model->kinds + model->num_kinds; kind++) {
        AttentionList list = {0};
        list_attention(work, kind, &list);
        largest.num_chunks = most(largest.num_chunks, list.num_chunks);
        largest.num_merges = most(largest.num_merges, list.num_merges);
        largest.num_parts = most(largest.num_parts, list.num_parts);
    }
    int64_t bytes = lay_out(work, 0, &largest);
    if (!has_memory(bytes)) return NO_MEMORY;
    lay_out(work, memory, &largest);
    for (int64_t kind = 0; kind < model->num_kinds; kind++)
        list_attention(work, &model->kinds[kind], &work->attention[kind]);
    for (int64_t row = 0; row < step->num_rows; row++)
        for (int32_t t = step->starts[row]; t < step->starts[row + 1]; t++) {
            work->rows[t] = (int32_t)row;
            work->positions[t] = step->lengths[row] - (step->starts[row + 1] - t);
        }
    return DONE;
}

Outcome begin_head(Work *work, int64_t num_rows, int64_t tiles, int64_t tile_floats) {
    const Model *model = work->model;
    work->scratch_bytes = parts(most(tile_floats, padded(model->hidden)) * 4, 4096) * 4096;
    for (int pass = 0; pass < 2; pass++) {
        int64_t taken = 0;
        char *base = pass ? memory : 0;
        work->activations = take(base, &taken, num_rows * row_bytes(work, &model->head));
        work->own_bytes = least(num_rows, ROWS_AT_ONCE) * row_bytes(work, &model->head);
        work->own = take(base, &taken, work->own_bytes * pool_threads());
        work->best = take(base, &taken, num_rows * tiles * 4);
        work->best_ids = take(base, &taken, num_rows * tiles * 4);
        work->scratch = take(base, &taken, work->scratch_bytes * pool_threads());
        if (!pass && !has_memory(taken)) return NO_MEMORY;
    }
    return DONE;
}

// ---- rows

typedef struct {
    const Work *work;
    const float *in;
    int64_t in_stride;
    const int32_t *rows;
    int64_t num_rows;
    const float *norm;
    const Matrix *matrix;
    char *out;
} Preparation;

static void prepare_chunk(void *job, int64_t chunk, int thread) {
    const Preparation *p = job;
    const Variant *variant = p->work->model->variant;
    int64_t inputs = p->matrix->inputs, bytes = row_bytes(p->work, p->matrix);
    int64_t end = least((chunk + 1) * ROWS_AT_ONCE, p->num_rows);
    float *row = scratch_of(p->work, thread);
    memset(row + inputs, 0, (size_t)(padded(inputs) - inputs) * sizeof(float));
    for (int64_t r = chunk * ROWS_AT_ONCE; r < end; r++) {
        const float *in = p->in + (p->rows ? p->rows[r] : r) * p->in_stride;
        float *normed = p->matrix->order ? row + padded(inputs) : row;
        if (p->norm) rms_norm(in, p->norm, inputs, p->work->model->eps, normed), in = normed;
        else if (!p->matrix->order) memcpy(row, in, (size_t)inputs * sizeof(float));
        for (int64_t i = 0; p->matrix->order && i < inputs; i++) row[i] = in[p->matrix->order[i]];
        variant->prepare(p->matrix->format, row, inputs, p->out + r * bytes);
    }
}

void prepare_for_all(const Work *work, const float *in, int64_t in_stride, const int32_t *rows, int64_t num_rows,
                     const float *norm, const Matrix *matrix, char *out) {
    Preparation job = {work, in, in_stride, rows, num_rows, norm, matrix, out};
    pool_share(work->me, prepare_chunk, 0, &job, parts(num_rows, ROWS_AT_ONCE));
}

const char *prepare(const Work *work, const float *in, int64_t in_stride, const int32_t *rows, int64_t num_rows,
                    const float *norm, const Matrix *matrix, char *out) {
    if (num_rows > ROWS_AT_ONCE) {
        prepare_for_all(work, in, in_stride, rows, num_rows, norm, matrix, out);
        return out;
    }
    Preparation job = {work, in, in_stride, rows, num_rows, norm, matrix, work->own + work->me->thread * work->own_bytes};
    prepare_chunk(&job, 0, work->me->thread);
    return job.out;
}

typedef struct {
    const Work *work;
    const float *outputs, *norm;
    float *x;
} Addition;

static void add_normed_chunk(void *job, int64_t chunk, int thread) {
    const Addition *a = job;
    const Model *model = a->work->model;
    int64_t hidden = model->hidden, end = least((chunk + 1) * ROWS_AT_ONCE, a->work->step->num_tokens);
    float *row = scratch_of(a->work, thread);
    for (int64_t t = chunk * ROWS_AT_ONCE; t < end; t++) {
        rms_norm(a->outputs + t * hidden, a->norm, hidden, model->eps, row);
        add(row, hidden, a->x + t * hidden);
    }
}

void add_normed(const Work *work, const float *outputs, const float *norm, float *x) {
    Addition job = {work, outputs, norm, x};
    pool_share(work->me, add_normed_chunk, 0, &job, parts(work->step->num_tokens, ROWS_AT_ONCE));
}

// ---- products

Product product_of(const Work *work, const Matrix *matrix, const char *rows, int64_t num_rows, Then then, float *out,
                   int64_t stride) {
    Product product = {work, matrix, rows, num_rows, .then = then, .out = out, .stride = stride};
    work->model->variant->tile(matrix, num_rows, pool_threads(), &product.tile_rows, &product.tile_panels);
    product.tile_rows = least(product.tile_rows, num_rows);
    product.tile_panels = least(product.tile_panels, parts(matrix->outputs, PANEL));
    while (product.tile_rows * product.tile_panels * PANEL > LARGEST_TILE && product.tile_panels > 2)
        product.tile_panels = parts(product.tile_panels, 4) * 2;
    while (product.tile_rows * product.tile_panels * PANEL > LARGEST_TILE) product.tile_rows = parts(product.tile_rows, 2);
    product.row_tiles = parts(num_rows, product.tile_rows);
    product.num_chunks = product.row_tiles * parts(parts(matrix->outputs, PANEL), product.tile_panels);
    return product;
}

// A tile of a product, in the memory of a thread and where it goes.
typedef struct {
    int64_t first, count, first_panel, num_panels, stride;
    float *in, *out;
} Tile;

static Tile tile_of(const Product *p, int64_t chunk, int thread) {
    Tile tile = {.first = chunk % p->row_tiles * p->tile_rows, .first_panel = chunk / p->row_tiles * p->tile_panels};
    tile.count = least(p->tile_rows, p->num_rows - tile.first);
    tile.num_panels = least(p->tile_panels, parts(p->matrix->outputs, PANEL) - tile.first_panel);
    tile.stride = tile.num_panels * PANEL;
    tile.in = scratch_of(p->work, thread);
    tile.out = p->out + tile.first * p->stride + tile.first_panel * PANEL / (p->then == GATE ? 2 : 1);
    return tile;
}

void product_chunk(void *job, int64_t chunk, int thread) {
    const Product *p = job;
    Tile tile = tile_of(p, chunk, thread);
    const char *rows = p->rows + tile.first * row_bytes(p->work, p->matrix);
    p->work->model->variant->multiply(p->matrix, rows, tile.count, tile.first_panel, tile.num_panels, tile.in, tile.stride);
    if (p->then != GATE) return;
    void (*gate)(const float *, const float *, int64_t, float *) = p->work->model->gelu ? geglu : swiglu;
    for (int64_t r = 0; r < tile.count; r++) {
        float *in = tile.in + r * tile.stride;
        for (int64_t panel = 0; panel < tile.num_panels; panel += 2)
            gate(in + panel * PANEL, in + (panel + 1) * PANEL, PANEL, in + panel / 2 * PANEL);
    }
}

void publish_product(void *job, int64_t chunk, int thread) {
    const Product *p = job;
    Tile tile = tile_of(p, chunk, thread);
    int64_t outputs = p->then == GATE ? tile.stride / 2 : least(tile.stride, p->matrix->outputs - tile.first_panel * PANEL);
    for (int64_t r = 0; r < tile.count; r++) {
        const float *in = tile.in + r * tile.stride;
        float *out = tile.out + r * p->stride;
        if (p->then == ADD) add(in, outputs, out);
        else memcpy(out, in, (size_t)outputs * sizeof(float));
    }
}

void multiply(const Work *work, const Matrix *matrix, const char *rows, int64_t num_rows, Then then, float *out,
              int64_t stride) {
    Product product = product_of(work, matrix, rows, num_rows, then, out, stride);
    pool_share(work->me, product_chunk, publish_product, &product, product.num_chunks);
}
