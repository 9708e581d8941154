#include "pool.h"
#include "rows.h"
#include "work.h"

typedef struct {
    const Work *work;
    int64_t num_tokens; // of these
    float *sums;        // their rows
    Product *products;
    int64_t num_products;
} Mixture;

static void choose_chunk(void *job, int64_t chunk, int thread) {
    const Mixture *m = job;
    const Model *model = m->work->model;
    int64_t each = model->experts_per_token, end = least((chunk + 1) * ROWS_AT_ONCE, m->num_tokens);
    (void)thread;
    for (int64_t t = chunk * ROWS_AT_ONCE; t < end; t++)
        choose(m->work->router + t * m->work->router_stride, model->num_experts, each, model->normalize,
               m->work->chosen + t * each, m->work->shares + t * each);
}

// Put the pairs of each expert side by side, in the order of their tokens.
static void group_chunk(void *job, int64_t chunk, int thread) {
    const Mixture *m = job;
    const Work *work = m->work;
    (void)chunk, (void)thread;
    const Model *model = work->model;
    int64_t each = model->experts_per_token, num_pairs = m->num_tokens * each;
    int32_t *first = work->first_pair;
    for (int64_t expert = 0; expert <= model->num_experts; expert++) first[expert] = 0;
    for (int64_t pair = 0; pair < num_pairs; pair++) first[work->chosen[pair] + 1]++;
    for (int64_t expert = 0; expert < model->num_experts; expert++) first[expert + 1] += first[expert];
    for (int64_t pair = 0; pair < num_pairs; pair++) { // `first` moves on to the expert's end, which is the next one's begin
        int32_t place = first[work->chosen[pair]]++;
        work->pair_of[pair] = place;
        work->pair_tokens[place] = (int32_t)(pair / each);
    }
    for (int64_t expert = model->num_experts; expert > 0; expert--) first[expert] = first[expert - 1];
    first[0] = 0;
}

// Return the product that has a chunk of all of them, which becomes a chunk of that product.
static Product *product_with(const Mixture *m, int64_t *chunk) {
    Product *product = m->products;
    for (; *chunk >= product->num_chunks; product++) *chunk -= product->num_chunks;
    return product;
}

static void experts_chunk(void *job, int64_t chunk, int thread) {
    Product *product = product_with(job, &chunk);
    product_chunk(product, chunk, thread);
}

static void publish_experts(void *job, int64_t chunk, int thread) {
    Product *product = product_with(job, &chunk);
    publish_product(product, chunk, thread);
}

// Multiply the pairs of each expert with its own matrix: gate and up, or down. A thread that is late may find any numbers of
// pairs.
static void multiply_pairs(Mixture *m, const Layer *layer, int is_down, Then then, float *out, int64_t stride) {
    const Work *work = m->work;
    int64_t num_chunks = 0;
    m->num_products = 0;
    for (int64_t expert = 0; expert < work->model->num_experts; expert++) {
        int64_t first = work->first_pair[expert], count = work->first_pair[expert + 1] - first;
        const Matrix *matrix = is_down ? &layer->experts[expert].down : &layer->experts[expert].gate_up;
        if (count <= 0) continue;
        const char *rows = work->pair_activations +
                           first * work->model->variant->activation_bytes(matrix->format, matrix->inputs);
        Product product = product_of(work, matrix, rows, count, then, out + first * stride, stride);
        m->products[m->num_products++] = product;
        num_chunks += product.num_chunks;
    }
    pool_share(work->me, experts_chunk, publish_experts, m, num_chunks);
}

static void sum_chunk(void *job, int64_t chunk, int thread) {
    const Mixture *m = job;
    const Work *work = m->work;
    int64_t hidden = work->model->hidden, each = work->model->experts_per_token;
    int64_t end = least((chunk + 1) * ROWS_AT_ONCE, m->num_tokens);
    float *sum = scratch_of(work, thread);
    for (int64_t t = chunk * ROWS_AT_ONCE; t < end; t++) {
        for (int64_t i = 0; i < hidden; i++) sum[i] = 0;
        for (int64_t pair = t * each; pair < (t + 1) * each; pair++)
            add_weighted(work->pair_out + work->pair_of[pair] * work->pair_out_stride, work->shares[pair], hidden, sum);
        add(sum, hidden, m->sums + t * hidden);
    }
}

void mix_experts(const Work *work, const Layer *layer) {
    const Model *model = work->model;
    for (int64_t begin = 0; begin < work->step->num_tokens; begin += EXPERT_TOKENS) {
        int64_t count = least(EXPERT_TOKENS, work->step->num_tokens - begin), chunks = parts(count, ROWS_AT_ONCE);
        int64_t num_pairs = count * model->experts_per_token;
        const float *x = work->step->x + begin * model->hidden;
        Product *products = work->products + work->me->thread * model->num_experts;
        Mixture mixture = {work, count, work->sums + begin * model->hidden, products, 0};
        const char *rows = prepare(work, x, model->hidden, 0, count, layer->mlp_norm, &layer->router, work->activations);
        multiply(work, &layer->router, rows, count, STORE, work->router, work->router_stride);
        pool_share(work->me, choose_chunk, 0, &mixture, chunks);
        pool_share(work->me, group_chunk, 0, &mixture, 1);
        prepare_for_all(work, x, model->hidden, work->pair_tokens, num_pairs, layer->mlp_norm, &layer->experts->gate_up,
                work->pair_activations);
        multiply_pairs(&mixture, layer, 0, GATE, work->pair_inner, work->pair_inner_stride);
        prepare_for_all(work, work->pair_inner, work->pair_inner_stride, 0, num_pairs, 0, &layer->experts->down,
                work->pair_activations);
        multiply_pairs(&mixture, layer, 1, STORE, work->pair_out, work->pair_out_stride);
        pool_share(work->me, sum_chunk, 0, &mixture, chunks);
    }
}
