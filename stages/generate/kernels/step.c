// The layers of one step: what they consist of is in gemm.c, attention.c and rows.c, the threads in pool.c.
#include "step.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "entry.h"
#include "pool.h"
#include "rows.h"
#include "sample.h"
#include "work.h"

// One step at a time: the threads and the memory belong to the process.
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

uint32_t begin(int threads) {
    pthread_mutex_lock(&one_at_a_time);
    pool_use(threads);
    return enter();
}

void end(uint32_t before) {
    leave(before);
    pthread_mutex_unlock(&one_at_a_time);
}

// ---- embedding, rope

static void angles_chunk(void *job, int64_t chunk, int thread) {
    const Work *work = job;
    const Model *model = work->model;
    const Step *step = work->step;
    int64_t half = model->rotary_dim / 2, end = least((chunk + 1) * ROWS_AT_ONCE, step->num_tokens);
    (void)thread;
    for (const Kind *kind = model->kinds; kind < model->kinds + model->num_kinds; kind++)
        for (int64_t t = chunk * ROWS_AT_ONCE; t < end && kind->frequencies; t++) {
            const float *frequencies = step->frequencies ? step->frequencies + t * half : kind->frequencies;
            int64_t place = ((kind - model->kinds) * step->num_tokens + t) * half;
            angles(work->positions[t], frequencies, half, kind->rope_factor, work->cosines + place, work->sines + place);
        }
}

static void embed_chunk(void *job, int64_t chunk, int thread) {
    const Work *work = job;
    const Model *model = work->model;
    const Step *step = work->step;
    int64_t hidden = model->hidden, bytes = bytes_of_row(model->embedding_type, hidden);
    int64_t end = least((chunk + 1) * ROWS_AT_ONCE, step->num_tokens);
    for (int64_t t = chunk * ROWS_AT_ONCE; t < end; t++) {
        int64_t row = step->token_ids[t] - model->first_token;
        float *out = work->sums + t * hidden;
        if (row < 0 || row >= model->num_embeddings) memset(out, 0, (size_t)hidden * sizeof(float)); // another rank has it
        else if (!model->embedding) widen_output(&model->head, row, out);
        else widen_row(model->embedding_type, (const char *)model->embedding + row * bytes, hidden, out);
        for (int64_t i = 0; i < hidden && model->embedding_scale != 1; i++) out[i] *= model->embedding_scale;
    }
    angles_chunk(job, chunk, thread);
}

static void *slot_of(const Work *work, int64_t token, int64_t kv_head, int values) {
    const Step *step = work->step;
    const Model *model = work->model;
    int64_t position = work->positions[token], row = work->rows[token];
    int64_t page = table_of(work, row)[position / step->page_size];
    int64_t plane = (model->layers[work->layer].place * 2 + values) * step->num_pages + page;
    int64_t slot = (plane * model->num_kv_heads + kv_head) * step->page_size + position % step->page_size;
    return (char *)step->pages + slot * model->head_dim * bytes_of(step->format);
}

static void store_key(const Work *work, int64_t token, int64_t kv_head, const float *key) {
    const Step *step = work->step;
    const int64_t head_dim = work->model->head_dim, size = bytes_of(step->format), word = step->format == FLOAT16 ? 2 : 4;
    char *slot = slot_of(work, token, kv_head, 0), numbers[head_dim * 4];
    if (step->page_size < KEY_GROUP) {
        shrink(step->format, key, head_dim, slot);
        return;
    }
    shrink(step->format, key, head_dim, numbers);
    const int64_t number = work->positions[token] % KEY_GROUP;
    char *to = slot - number * (head_dim * size - word);
    for (int64_t at = 0; at < head_dim * size; at += word, to += KEY_GROUP * word) memcpy(to, numbers + at, (size_t)word);
}

static void rope_chunk(void *job, int64_t chunk, int thread) {
    const Work *work = job;
    const Model *model = work->model;
    const Step *step = work->step;
    const Layer *layer = &model->layers[work->layer];
    int64_t head_dim = model->head_dim, half = model->rotary_dim / 2;
    int64_t end = least((chunk + 1) * ROWS_AT_ONCE, step->num_tokens);
    (void)thread;
    for (int64_t t = chunk * ROWS_AT_ONCE; t < end; t++) {
        int64_t place = (layer->kind * step->num_tokens + t) * half;
        float *head = work->qkv + t * work->qkv_stride;
        for (int64_t h = 0; h < model->num_heads + model->num_kv_heads; h++, head += head_dim) {
            const float *norm = h < model->num_heads ? layer->q_norm : layer->k_norm;
            if (norm) rms_norm(head, norm, head_dim, model->eps, head);
            if (kind_of(work)->frequencies) rotate(head, work->cosines + place, work->sines + place, half);
            int64_t kv_head = h - model->num_heads;
            if (kv_head >= 0) store_key(work, t, kv_head, head);
        }
        for (int64_t h = 0; h < model->num_kv_heads; h++, head += head_dim)
            shrink(step->format, head, head_dim, slot_of(work, t, h, 1));
    }
}

// ---- the layers

// Multiply by the last matrix of attention or MLP, and add the outputs to the sums, normalised if there is a *norm*. What
// a rank of several adds is not normalised here, but once it is summed with that of the others.
static void add_outputs(const Work *work, const Matrix *matrix, const char *rows, const float *norm) {
    const Model *model = work->model;
    int is_normed = norm && work->sums == work->step->x;
    multiply(work, matrix, rows, work->step->num_tokens, is_normed ? STORE : ADD, is_normed ? work->added : work->sums,
             model->hidden);
    if (is_normed) add_normed(work, work->added, norm, work->sums);
}

static void dense(const Work *work, const Layer *layer) {
    const Model *model = work->model;
    int64_t num_tokens = work->step->num_tokens;
    const char *rows = prepare(work, work->step->x, model->hidden, 0, num_tokens, layer->mlp_norm, &layer->mlp.gate_up,
                               work->activations);
    multiply(work, &layer->mlp.gate_up, rows, num_tokens, GATE, work->inner, work->inner_stride);
    rows = prepare(work, work->inner, work->inner_stride, 0, num_tokens, 0, &layer->mlp.down, work->activations);
    add_outputs(work, &layer->mlp.down, rows, layer->norm_after_mlp);
}

static void compute_attention(const Work *work) {
    const Model *model = work->model;
    const Layer *layer = &model->layers[work->layer];
    int64_t num_tokens = work->step->num_tokens;
    const char *rows;
    float *out = work->qkv;
    for (const Matrix *matrix = layer->qkv; matrix < layer->qkv + 3 && matrix->outputs; out += matrix->outputs, matrix++) {
        rows = prepare(work, work->step->x, model->hidden, 0, num_tokens, layer->input_norm, matrix, work->activations);
        multiply(work, matrix, rows, num_tokens, STORE, out, work->qkv_stride);
    }
    pool_share(work->me, rope_chunk, 0, (void *)work, parts(num_tokens, ROWS_AT_ONCE));
    attend(work);
    rows = prepare(work, work->attended, work->attended_stride, 0, num_tokens, 0, &layer->output, work->activations);
    add_outputs(work, &layer->output, rows, layer->norm_after_attention);
}

static void compute_mlp(const Work *work) {
    const Layer *layer = &work->model->layers[work->layer];
    if (layer->experts) mix_experts(work, layer);
    else dense(work, layer);
}

// ---- entries

static Outcome check(const Model *model, Step *step) {
    step->wrong = 0;
    if (step->starts[0] != 0 || step->starts[step->num_rows] != step->num_tokens) return WRONG_ROW;
    for (int64_t t = 0; t < step->num_tokens; t++)
        if (step->token_ids[t] < 0 || step->token_ids[t] >= model->vocabulary) return step->wrong = t, WRONG_TOKEN;
    for (int64_t row = 0; row < step->num_rows; row++) {
        int64_t start = step->starts[row], end = step->starts[row + 1], length = step->lengths[row];
        int64_t num_pages = parts(length, step->page_size);
        step->wrong = row;
        if (start < 0 || end <= start || end > step->num_tokens || length < end - start) return WRONG_ROW;
        if (num_pages > step->table_width) return WRONG_ROW;
        for (int64_t part = 0; part < model->num_parts; part++) {
            const int32_t *table = step->tables + (row * model->num_parts + part) * step->table_width;
            int64_t p = part ? most(0, length - (end - start) + 1 - model->window) / step->page_size : 0;
            for (; p < num_pages; p++)
                if (table[p] < 0 || table[p] >= step->num_pages) return WRONG_PAGE;
        }
    }
    return DONE;
}

static void forward_together(void *argument, Member *me) {
    Work work = *(const Work *)argument;
    work.me = me;
    pool_share(me, embed_chunk, 0, &work, parts(work.step->num_tokens, ROWS_AT_ONCE));
    for (; work.layer < work.model->num_layers; work.layer++) {
        compute_attention(&work);
        compute_mlp(&work);
    }
}

// Compute one step: write the keys and values of its tokens to the pages and the last layer's output to `x`.
API int kernels_forward(const Model *model, Step *step) {
    Outcome outcome = check(model, step);
    if (outcome || !step->num_tokens) return outcome;
    uint32_t before = begin(model->threads);
    Work work = {.model = model, .step = step, .sums = step->x};
    outcome = begin_work(&work);
    if (!outcome) pool_together(forward_together, &work);
    end(before);
    return outcome;
}

typedef struct {
    const Work *work;
    int64_t part;
    const float *outputs; // the sum of all ranks, which is normalised and added to x; NULL: they are computed
} Part;

static void part_together(void *argument, Member *me) {
    const Part *job = argument;
    Work work = *job->work;
    work.me = me;
    int64_t chunks = parts(work.step->num_tokens, ROWS_AT_ONCE);
    if (job->outputs) {
        const Layer *layer = &work.model->layers[work.layer];
        add_normed(&work, job->outputs, job->part % 2 ? layer->norm_after_attention : layer->norm_after_mlp, work.step->x);
    } else if (job->part == 0) pool_share(me, embed_chunk, 0, &work, chunks);
    else if (job->part % 2 == 0) compute_mlp(&work);
    else {
        pool_share(me, angles_chunk, 0, &work, chunks);
        compute_attention(&work);
    }
}

// Compute one part of a step, for a rank of several. *sums*, [num_tokens][hidden], are zeros before, and are then what the
// rank adds to `x`, which the caller does when it has those of all ranks. Part 0 is the embedding, which checks the step.
// The parts after it are each layer's attention and MLP. With *is_summed* the rank adds nothing: *sums* are those of all
// ranks, and are normalised and added to `x` here.
API int kernels_part(const Model *model, Step *step, int64_t part, float *sums, int is_summed) {
    Outcome outcome = part ? DONE : check(model, step);
    if (outcome || !step->num_tokens) return outcome;
    uint32_t before = begin(model->threads);
    Work work = {.model = model, .step = step, .layer = (part - 1) / 2, .sums = sums};
    outcome = begin_work(&work); // nothing stays from the part before: another model may have used the memory
    if (!outcome) {
        Part job = {&work, part, is_summed ? sums : 0};
        pool_together(part_together, &job);
    }
    end(before);
    return outcome;
}

typedef struct {
    const Work *work;
    const float *x;
    const int32_t *rows, *logits_rows;
    float *logits;
    const uint32_t *const *allowed; // [num_rows]
    int64_t tiles, tile_panels;
    const char *prepared;
    int64_t num_rows, tile_rows, row_tiles;
    float *best;        // [num_rows][tiles]
    int32_t *best_ids;
} Head;

// A tile of the head's product: its first row and panel, their numbers, and where it lies in the memory of a thread, with
// the best of each row and room for one row behind it.
typedef struct {
    int64_t number, row, count, first_panel, stride, outputs;
    float *out, *best, *copy;
    int32_t *best_ids;
} Tile;

static Tile tile_of(const Head *h, int64_t chunk, int thread) {
    const Matrix *head = &h->work->model->head;
    Tile tile = {.number = chunk / h->row_tiles, .row = chunk % h->row_tiles * h->tile_rows};
    tile.first_panel = tile.number * h->tile_panels;
    tile.count = least(h->tile_rows, h->num_rows - tile.row);
    tile.stride = least(h->tile_panels, parts(head->outputs, PANEL) - tile.first_panel) * PANEL;
    tile.outputs = least(tile.stride, head->outputs - tile.first_panel * PANEL);
    tile.out = scratch_of(h->work, thread);
    tile.best = tile.out + h->tile_rows * h->tile_panels * PANEL;
    tile.best_ids = (int32_t *)(tile.best + h->tile_rows);
    tile.copy = tile.best + 2 * h->tile_rows;
    return tile;
}

// As `largest`, of the tokens that the bits *allowed* have, or of all if that is NULL. The logits are those of the tokens
// from *first* on. Returns -1 also if one is plus infinity, and looks for that and for NaN at all of them. May overwrite them.
static int64_t best_of(float *logits, int64_t count, const uint32_t *allowed, int64_t first, float *best) {
    int64_t found = largest(logits, count, best);
    if (found < 0 || *best == __builtin_inff()) return -1;
    if (!allowed || allowed[(first + found) / 32] >> ((first + found) % 32) & 1) return found;
    refuse(logits, count, allowed, first);
    return largest(logits, count, best);
}

static void head_chunk(void *job, int64_t chunk, int thread) {
    const Head *h = job;
    const Matrix *head = &h->work->model->head;
    const Variant *variant = h->work->model->variant;
    Tile tile = tile_of(h, chunk, thread);
    variant->multiply(head, h->prepared + tile.row * variant->activation_bytes(head->format, head->inputs), tile.count,
                      tile.first_panel, tile.stride / PANEL, tile.out, tile.stride);
    for (int64_t r = 0; r < tile.count; r++) {
        int64_t row = tile.row + r, first = tile.first_panel * PANEL;
        float *logits = tile.out + r * tile.stride;
        if (h->work->model->logits_cap) soft_cap(logits, tile.outputs, h->work->model->logits_cap);
        const uint32_t *allowed = h->allowed ? h->allowed[row] : 0;
        if (allowed && h->logits_rows[row] >= 0) logits = memcpy(tile.copy, logits, (size_t)tile.outputs * sizeof(float));
        int64_t found = best_of(logits, tile.outputs, allowed, first, &tile.best[r]);
        tile.best_ids[r] = (int32_t)(found < 0 ? -1 : found + first);
    }
}

static void publish_head(void *job, int64_t chunk, int thread) {
    const Head *h = job;
    Tile tile = tile_of(h, chunk, thread);
    for (int64_t r = 0; r < tile.count; r++) {
        int64_t row = tile.row + r;
        h->best[row * h->tiles + tile.number] = tile.best[r];
        h->best_ids[row * h->tiles + tile.number] = tile.best_ids[r];
        if (h->logits_rows[row] >= 0)
            memcpy(h->logits + h->logits_rows[row] * h->work->model->head.outputs + tile.first_panel * PANEL,
                   tile.out + r * tile.stride, (size_t)tile.outputs * sizeof(float));
    }
}

static void head_together(void *argument, Member *me) {
    Head job = *(const Head *)argument;
    Work work = *job.work;
    const Model *model = work.model;
    work.me = me;
    job.work = &work;
    job.prepared = prepare(&work, job.x, model->hidden, job.rows, job.num_rows, model->norm, &model->head, work.activations);
    pool_share(me, head_chunk, publish_head, &job, job.tiles * job.row_tiles);
}

// Compute logits of some tokens of `x`, [num_tokens][hidden]: *rows* are their indices. best[r] is the token with the largest
// logit of row r, the first one of several, or -1 if one is NaN or the largest is infinite. The logits of row r go to row logits_rows[r] of *logits*,
// [.., vocabulary], in float32, or nowhere where that is -1. best[r] is chosen of the tokens that are in the bits
// allowed[r], -1 if that leaves none. Where *allowed* or allowed[r] is NULL, all are.
API int kernels_head(const Model *model, const float *x, int64_t num_tokens, const int32_t *rows, int64_t num_rows,
                     const int32_t *logits_rows, float *logits, const uint32_t *const *allowed, int32_t *best) {
    if (!num_rows) return DONE;
    for (int64_t r = 0; r < num_rows; r++)
        if (rows[r] < 0 || rows[r] >= num_tokens) return WRONG_TOKEN;
    uint32_t before = begin(model->threads);
    Work work = {.model = model};
    Head job = {.work = &work, .x = x, .rows = rows, .logits_rows = logits_rows, .logits = logits, .allowed = allowed,
                .num_rows = num_rows};
    model->variant->tile(&model->head, num_rows, pool_threads(), &job.tile_rows, &job.tile_panels);
    job.row_tiles = parts(num_rows, job.tile_rows);
    job.tiles = parts(parts(model->head.outputs, PANEL), job.tile_panels);
    Outcome outcome = begin_head(&work, num_rows, job.tiles, (job.tile_rows + 1) * (job.tile_panels * PANEL + 2));
    if (!outcome) {
        job.best = work.best;
        job.best_ids = work.best_ids;
        pool_together(head_together, &job);
        for (int64_t row = 0; row < num_rows; row++) {
            const float *bests = job.best + row * job.tiles;
            const int32_t *ids = job.best_ids + row * job.tiles;
            int64_t tile = 0;
            for (int64_t other = 1; other < job.tiles; other++)
                if (ids[tile] >= 0 && (ids[other] < 0 || bests[other] > bests[tile])) tile = other;
            best[row] = bests[tile] - bests[tile] == 0 ? ids[tile] : -1;
        }
    }
    end(before);
    return outcome;
}

// ---- tokens

typedef struct {
    const float *logits, *divisors;
    const int64_t *rows, *numbers;
    int64_t vocabulary, num_rows, *tokens;
    char *scratch;
    int64_t scratch_bytes;
} Sampling;

static void sample_chunk(void *job, int64_t i, int thread) {
    const Sampling *s = job;
    const int64_t *n = s->numbers + i, count = s->num_rows;
    Draw draw = {n[0], n[count], n[2 * count], n[3 * count], n[4 * count], n[5 * count]};
    s->tokens[s->rows[i]] = draw_token(s->logits + s->rows[i] * s->vocabulary, s->vocabulary, s->divisors[i], &draw,
                                       s->scratch + thread * s->scratch_bytes);
}

static void sample_together(void *argument, Member *me) {
    pool_share(me, sample_chunk, 0, argument, ((const Sampling *)argument)->num_rows);
}

// Draw a token for some rows of *logits*, [..][vocabulary]: that of row rows[i] goes to tokens[rows[i]]. *numbers* are
// those of `Draw`, [6][num_rows].
API int kernels_sample(const float *logits, int64_t vocabulary, const int64_t *rows, int64_t num_rows,
                       const float *divisors, const int64_t *numbers, int threads, int64_t *tokens) {
    uint32_t before = begin(threads);
    Sampling job = {logits, divisors, rows, numbers, vocabulary, num_rows, tokens, .scratch_bytes = draw_scratch(vocabulary)};
    job.scratch = lend(job.scratch_bytes * pool_threads());
    if (job.scratch) pool_together(sample_together, &job);
    end(before);
    return job.scratch ? DONE : NO_MEMORY;
}

// As that many calls of kernels_forward, kernels_head and kernels_sample. The tokens and lengths of *step* are overwritten.
API int kernels_steps(const Model *model, Step *step, int32_t *token_ids, int32_t *lengths, Several *several) {
    const int64_t rows = step->num_rows, drawn = several->num_drawn;
    for (int goes_on = 1; goes_on && several->num_done < several->num_steps; several->num_done++) {
        int64_t *tokens = several->tokens + several->num_done * rows;
        int outcome = kernels_forward(model, step);
        if (!outcome) // row b's token is the one with the number b
            outcome = kernels_head(model, step->x, rows, step->starts, rows, several->logits_rows, several->logits, 0,
                                   several->best);
        for (int64_t b = 0; b < rows; b++) tokens[b] = several->best[b];
        if (!outcome && drawn)
            outcome = kernels_sample(several->logits, model->vocabulary, several->drawn, drawn, several->divisors,
                                     several->numbers + several->num_done * 6 * drawn, model->threads, tokens);
        if (outcome) return several->num_done ? DONE : outcome; // the next call will say it
        for (int64_t b = 0; b < rows; b++) {
            if (several->best[b] < 0) tokens[b] = -1;
            for (int64_t i = several->end_starts[b]; i < several->end_starts[b + 1]; i++)
                goes_on &= tokens[b] != several->ends[i];
            goes_on &= tokens[b] >= 0;
            token_ids[b] = (int32_t)tokens[b];
            lengths[b]++;
        }
    }
    return DONE;
}

typedef struct {
    float *logits;
    int64_t vocabulary;
    const int64_t *rows;
    int64_t num_rows;
    const uint32_t *const *allowed;
} Refusing;

static void refuse_chunk(void *job, int64_t i, int thread) {
    const Refusing *r = job;
    (void)thread;
    refuse(r->logits + r->rows[i] * r->vocabulary, r->vocabulary, r->allowed[i], 0);
}

static void refuse_together(void *argument, Member *me) {
    pool_share(me, refuse_chunk, 0, argument, ((const Refusing *)argument)->num_rows);
}

// Make the logits minus infinity of those tokens that a row cannot have. The bits allowed[i] belong to row rows[i] of
// *logits*, [..][vocabulary].
API void kernels_refuse(float *logits, int64_t vocabulary, const int64_t *rows, int64_t num_rows,
                        const uint32_t *const *allowed, int threads) {
    uint32_t before = begin(threads);
    Refusing job = {logits, vocabulary, rows, num_rows, allowed};
    pool_together(refuse_together, &job);
    end(before);
}

// ---- packing

typedef struct {
    const Variant *variant;
    Format format, source;
    const char *first, *second;
    int64_t outputs, inputs, num_panels;
    char *out;
} Packing;

static void pack_chunk(void *job, int64_t panel, int thread) {
    const Packing *p = job;
    const char *matrix = p->second && panel & 1 ? p->second : p->first;
    int64_t output = (p->second ? panel / 2 : panel) * PANEL, bytes = p->inputs * bytes_of(p->source);
    const void *rows[PANEL];
    (void)thread;
    for (int64_t i = 0; i < PANEL; i++) rows[i] = output + i < p->outputs ? matrix + (output + i) * bytes : 0;
    p->variant->pack(p->format, rows, p->source, p->inputs, p->out + panel * p->variant->panel_bytes(p->format, p->inputs));
}

static void pack_together(void *argument, Member *me) {
    pool_share(me, pack_chunk, 0, argument, ((const Packing *)argument)->num_panels);
}

// Bytes of a packed matrix. Of a pair, whose panels come in turn, *outputs* counts one.
API int64_t kernels_packed_bytes(const Variant *variant, Format format, int64_t outputs, int64_t inputs, int pair) {
    return parts(outputs, PANEL) * (pair ? 2 : 1) * variant->panel_bytes(format, inputs);
}

// Pack [outputs][inputs] numbers; with *second*, which may be NULL, a pair of matrices whose panels come in turn.
API void kernels_pack(const Variant *variant, Format format, Format source, const void *first, const void *second,
                      int64_t outputs, int64_t inputs, int threads, void *out) {
    uint32_t before = begin(threads);
    int64_t num_panels = parts(outputs, PANEL) * (second ? 2 : 1);
    Packing job = {variant, format, source, first, second, outputs, inputs, num_panels, out};
    pool_together(pack_together, &job);
    end(before);
}
