// Computes products, attention and steps of one variant from fixed numbers, and prints a hash of the bits of each.
// The argument is the variant.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "entry.h"
#include "rows.h"
#include "step.h"

// cpu.c and step.c
const char *cpu_variants(void);
const Variant *kernels_variant(const char *name);
int64_t kernels_packed_bytes(const Variant *variant, Format format, int64_t outputs, int64_t inputs, int pair);
void kernels_pack(const Variant *variant, Format format, Format source, const void *first, const void *second,
                  int64_t outputs, int64_t inputs, int threads, void *out);
void kernels_pack_blocks(int type, const uint8_t *const *rows, int64_t num_panels, int64_t inputs, int threads, void *out);
int kernels_forward(const Model *model, Step *step);
int kernels_head(const Model *model, const float *x, int64_t num_tokens, const int32_t *rows, int64_t num_rows,
                 const int32_t *logits_rows, float *logits, const uint32_t *const *allowed, int32_t *best);
int kernels_sample(const float *logits, int64_t vocabulary, const int64_t *rows, int64_t num_rows,
                   const float *divisors, const int64_t *numbers, int threads, int64_t *tokens);

// A way to round that no call may use and each must leave as it was: towards zero, denormals are zero.
#ifdef __aarch64__
#define STRANGE (1u << 24 | 3u << 22)
#else
#define STRANGE (0x1f80u | 0x8040u | 0x6000u)
#endif

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof(*(array))))
static const char *const names[] = {"float32", "bfloat16", "float16", "int8", "int4"};
static const Format formats[] = {FLOAT32, BFLOAT16, FLOAT16, Q8_0, INT4_32};
static const Variant *variant;

static void *memory(int64_t bytes, int filling) {
    void *new = aligned_alloc(64, (size_t)round_up(bytes + 1, 64));
    if (!new) abort();
    return memset(new, filling, (size_t)round_up(bytes + 1, 64));
}

static float number(void) { // in [-1, 1)
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)((int32_t)(state >> 32) >> 8) * 0x1p-23f;
}

static void fill(Format format, void *to, int64_t count, float scale) {
    for (int64_t i = 0; i < count; i++) {
        float x = number() * scale;
        shrink(format, &x, 1, (char *)to + i * bytes_of(format));
    }
}

static void *numbers(Format format, int64_t count, float scale) {
    void *new = memory(count * bytes_of(format), 0);
    fill(format, new, count, scale);
    return new;
}

static void report(const void *bytes, int64_t count, const char *what, ...) {
    uint64_t hash = 14695981039346656037u; // FNV-1a
    for (int64_t i = 0; i < count; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    va_list arguments;
    va_start(arguments, what);
    vprintf(what, arguments);
    va_end(arguments);
    printf(": %016llx\n", (unsigned long long)hash);
}

static Matrix matrix_of(Format format, int64_t outputs, int64_t inputs, int pair, float scale) {
    const Format source = format >= Q4_0 ? BFLOAT16 : format;
    const int64_t all = round_up(outputs, PANEL) * (pair + 1);
    char *weights = numbers(source, outputs * inputs * (pair + 1), scale);
    char *panels = memory(kernels_packed_bytes(variant, format, outputs, inputs, pair), 0xff);
    const void *second = pair ? weights + outputs * inputs * bytes_of(source) : NULL;
    kernels_pack(variant, format, source, weights, second, outputs, inputs, 2, panels);
    float *bias = memory(all * 4, 0);
    for (int64_t i = 0; i < all; i++)
        if ((pair ? i / PANEL / 2 * PANEL + i % PANEL : i) < outputs) bias[i] = number() * scale;
    return (Matrix){panels, bias, pair ? all : outputs, inputs, format};
}

static void multiply_all(void) {
    static const int64_t shapes[][2] = {{17, 6}, {16, 1}, {40, 36}, {33, 65}, {80, 520}, {64, 1030}, {200, 300}};
    static const int64_t counts[] = {1, 2, 3, 4, 5, 6, 7, 70};
    static const float scales[] = {1, 0x1p-130f, 0x1p100f};
    for (int s = 0; s < 3 * COUNT(shapes); s++)
        for (int which = 0; which < COUNT(formats); which++) {
        const Format format = formats[which];
            const int has_few_exponents = format == FLOAT16 || format == INT4_32;
            const int64_t outputs = shapes[s / 3][0], inputs = shapes[s / 3][1], stride = round_up(outputs, PANEL);
            const Matrix matrix = matrix_of(format, outputs, inputs, 0, has_few_exponents ? 0.5f : scales[s % 3]);
            const int64_t bytes = variant->activation_bytes(format, inputs);
            report(matrix.panels, kernels_packed_bytes(variant, format, outputs, inputs, 0), "%s panels %ld x %ld",
                   names[which], (long)outputs, (long)inputs);
            for (int64_t c = 0; c < COUNT(counts); c++) {
                char *rows = memory(counts[c] * bytes, 0);
                for (int64_t row = 0; row < counts[c]; row++) {
                    float *x = memory(round_up(inputs, ROW_MULTIPLE) * 4, 0);
                    fill(FLOAT32, x, inputs, s % 3 && row % 2 ? 0x1p-20f : 1);
                    variant->prepare(format, x, inputs, rows + row * bytes);
                    free(x);
                }
                float *out = memory(counts[c] * stride * 4, 0xff);
                variant->multiply(&matrix, rows, counts[c], 0, stride / PANEL, out, stride);
                report(out, counts[c] * stride * 4, "%s %ld x %ld, scale %d, rows %ld", names[which], (long)outputs,
                       (long)inputs, s % 3, (long)counts[c]);
                free(rows), free(out);
            }
        }
}

// Any bytes as blocks of every type, whose scales are at their ends: they may be large, but not infinite.
static void multiply_blocks(void) {
    static const struct {
        int type, weights, bytes, scales[2];
        Format format;
    } types[] = {{2, 32, 18, {0, 0}, Q4_0},     {3, 32, 20, {0, 2}, Q4_1},     {6, 32, 22, {0, 0}, Q8_0},
                 {7, 32, 24, {0, 2}, Q5_1},     {8, 32, 34, {0, 0}, Q8_0},     {12, 256, 144, {0, 2}, Q4_K},
                 {13, 256, 176, {0, 2}, Q5_K},  {14, 256, 210, {208, 208}, Q6_K},
                 {100, 32, 20, {0, 0}, INT4_32}, {101, 64, 36, {0, 0}, INT4_64}, {102, 128, 68, {0, 0}, INT4_128}};
    static const int64_t counts[] = {1, 2, 3, 4, 5, 6, 7, 70};
    enum { OUTPUTS = 37, PANELS = 3 };
    for (int64_t t = 0; t < COUNT(types); t++) {
        const int64_t inputs = types[t].weights == 32 ? 608 : 768, line = inputs / types[t].weights * types[t].bytes;
        uint8_t *blocks = memory(OUTPUTS * line, 0);
        const uint8_t *outputs[PANELS * PANEL] = {0};
        for (int64_t i = 0; i < OUTPUTS * line; i++) blocks[i] = (uint8_t)(int8_t)(number() * 127);
        for (int64_t i = 0; i < OUTPUTS * line; i += types[t].bytes)
            for (int k = 0; k < 2; k++) fill(FLOAT16, blocks + i + types[t].scales[k], 1, 1);
        for (int64_t o = 0; o < OUTPUTS; o++) outputs[o] = blocks + o * line;
        const int64_t panel_bytes = variant->panel_bytes(types[t].format, inputs);
        char *panels = memory(PANELS * panel_bytes, 0xff);
        kernels_pack_blocks(types[t].type, outputs, PANELS, inputs, 2, panels);
        report(panels, PANELS * panel_bytes, "blocks of type %d, panels", types[t].type);
        const Matrix matrix = {panels, NULL, OUTPUTS, inputs, types[t].format};
        const int64_t bytes = variant->activation_bytes(matrix.format, inputs);
        for (int64_t c = 0; c < COUNT(counts); c++) {
            char *rows = memory(counts[c] * bytes, 0);
            float *x = memory(round_up(inputs, ROW_MULTIPLE) * 4, 0), *out = memory(counts[c] * PANELS * PANEL * 4, 0xff);
            for (int64_t row = 0; row < counts[c]; row++) {
                fill(FLOAT32, x, inputs, row % 2 ? 0x1p-20f : 1);
                variant->prepare(matrix.format, x, inputs, rows + row * bytes);
            }
            variant->multiply(&matrix, rows, counts[c], 0, PANELS, out, PANELS * PANEL);
            report(out, counts[c] * PANELS * PANEL * 4, "blocks of type %d, rows %ld", types[t].type, (long)counts[c]);
            free(rows), free(x), free(out);
        }
    }
}

// Tokens of a row that attends to what is before it; all that no token sees is NaN.
static void attend_all(void) {
    static const int64_t shapes[][5] = {// group, head_dim, page_size, window, length
                                        {1, 64, 64, 0, 200},  {2, 128, 64, 0, 130}, {3, 64, 16, 100, 230},
                                        {4, 2, 1, 5, 70},     {5, 20, 2, 1, 40},    {6, 6, 2048, 64, 150},
                                        {7, 80, 256, 300, 90}, {12, 32, 64, 65, 140}, {1, 6, 16, 1500, 2600}};
    for (int64_t s = 0; s < COUNT(shapes); s++)
        for (Format format = FLOAT32; format <= FLOAT16; format++) {
            const int64_t group = shapes[s][0], head_dim = shapes[s][1], page_size = shapes[s][2];
            const int64_t window = shapes[s][3], length = shapes[s][4], num_pages = length / page_size + 1;
            const int64_t stride = 2 * group * head_dim, line = head_dim * bytes_of(format);
            char *planes[2];
            for (int i = 0; i < 2; i++) planes[i] = memory(num_pages * 2 * page_size * line, 0xff);
            int32_t *table = memory(num_pages * 4, 0);
            for (int64_t page = 0; page < num_pages; page++) table[page] = (int32_t)(num_pages - 1 - page);
            for (int64_t slot = 0; slot < 2 * length; slot++) { // of both heads
                int64_t page = table[slot / 2 / page_size];
                int64_t place = (page * 2 + slot % 2) * page_size + slot / 2 % page_size;
                for (int i = 0; i < 2; i++) fill(format, planes[i] + place * line, head_dim, 2);
            }
            const Pages pages = {planes[0], planes[1], 2 * group, 2, head_dim, page_size, window, format, 0.25f};
            float *q = numbers(FLOAT32, length * stride, 4), *o = memory(length * stride * 4, 0xff);
            char *scratch = memory(variant->attend_scratch(&pages), 0xff);
            for (int64_t head = 0; head < 2; head++)
                for (int64_t first = 0, count; first < length; first += count) {
                    const int64_t at = first * stride + head * group * head_dim;
                    count = least(variant->queries(&pages), length - first);
                    variant->attend(&pages, table, first, count, head, q + at, stride, o + at, stride, scratch);
                }
            report(o, length * stride * 4, "attention %s, shape %ld", names[format], (long)s);
            const int64_t last = length - 1, tokens = segment_tokens(page_size), end = last / tokens + 1;
            const int64_t first = window ? most(0, length - window) / tokens : 0;
            const int64_t part = group * variant->part_floats(&pages);
            float *parts = memory((end - first) * part * 4, 0xff);
            for (int64_t i = first; i < end; i++)
                variant->attend_segment(&pages, table, last, 1, i, q + last * stride + group * head_dim,
                                        parts + (i - first) * part, scratch);
            variant->merge(&pages, parts, end - first, o);
            if (memcmp(o, o + last * stride + group * head_dim, (size_t)(group * head_dim) * 4))
                printf("attention %s, shape %ld: merged parts are something else\n", names[format], (long)s);
        }
}

#define HIDDEN 96
#define HEADS 6
#define KV_HEADS 2
#define HEAD_DIM 20
#define INNER 50
#define EXPERTS 5
#define VOCABULARY 300
#define LAYERS 2
#define PAGE_SIZE 64
#define WIDTH 24

static Mlp mlp_of(Format format) {
    return (Mlp){matrix_of(format, INNER, HIDDEN, 1, 0.25f), matrix_of(format, HIDDEN, INNER, 0, 0.25f)};
}

// A layer with experts and one without, tokens of four rows: whole and parts of prompts, and decode rows, of which one
// is long.
static void compute_steps(void) {
    static const int32_t starts[] = {0, 37, 38, 43, 44}, lengths[] = {37, 1500, 130, 1};
    enum { TOKENS = 44, ROWS = 4, PAGES = ROWS * WIDTH };
    for (int which = 0; which < COUNT(formats); which++) {
        const Format format = formats[which];
        const Format plain = format >= Q4_0 ? BFLOAT16 : format;
        Mlp experts[EXPERTS];
        Layer layers[LAYERS] = {0};
        for (int i = 0; i < EXPERTS; i++) experts[i] = mlp_of(format);
        for (int i = 0; i < LAYERS; i++)
            layers[i] = (Layer){
                .input_norm = numbers(FLOAT32, HIDDEN, 2), .mlp_norm = numbers(FLOAT32, HIDDEN, 2),
                .q_norm = i ? NULL : numbers(FLOAT32, HEAD_DIM, 2), .k_norm = i ? NULL : numbers(FLOAT32, HEAD_DIM, 2),
                .qkv = {matrix_of(format, (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, 0, 0.5f)},
                .output = matrix_of(format, HIDDEN, HEADS * HEAD_DIM, 0, 0.25f), .mlp = mlp_of(format),
                .router = matrix_of(plain, EXPERTS, HIDDEN, 0, 0.25f), .experts = i ? experts : NULL, .kind = i,
                .norm_after_attention = which % 2 ? numbers(FLOAT32, HIDDEN, 2) : NULL,
                .norm_after_mlp = which % 2 ? numbers(FLOAT32, HIDDEN, 2) : NULL};
        Kind kinds[LAYERS] = {{.frequencies = numbers(FLOAT32, HEAD_DIM / 2, 1), .rope_factor = 1.25f},
                              {.frequencies = numbers(FLOAT32, HEAD_DIM / 2, 1), .rope_factor = 1}};
        Model model = {.variant = variant, .num_layers = LAYERS, .hidden = HIDDEN, .num_heads = HEADS,
                       .num_kv_heads = KV_HEADS, .head_dim = HEAD_DIM, .vocabulary = VOCABULARY,
                       .num_embeddings = VOCABULARY, .num_experts = EXPERTS, .experts_per_token = 2, .normalize = 1,
                       .eps = 0x1p-20f, .embedding_type = plain == BFLOAT16 ? 30 : plain == FLOAT16, // a `ggml_type`
                       .embedding = numbers(plain, VOCABULARY * HIDDEN, 1), .layers = layers,
                       .norm = numbers(FLOAT32, HIDDEN, 2), .head = matrix_of(format, VOCABULARY, HIDDEN, 0, 0.5f),
                       .rotary_dim = HEAD_DIM, .attention_scale = 0.22f, .embedding_scale = 1.5f, .gelu = which % 2,
                       .kinds = kinds, .num_kinds = LAYERS};
        const int64_t num_numbers = LAYERS * 2 * PAGES * KV_HEADS * PAGE_SIZE * HEAD_DIM;
        void *before = numbers(plain, num_numbers, 2);
        int32_t token_ids[TOKENS], tables[2 * PAGES], rows[TOKENS], places[TOKENS], best[TOKENS], allowed_best[TOKENS];
        uint32_t bits[(VOCABULARY + 31) / 32];
        const uint32_t *allowed[TOKENS];
        for (int i = 0; i < COUNT(bits); i++) bits[i] = i % 3 ? 0x9e3779b9u * (uint32_t)i : UINT32_MAX;
        for (int i = 0; i < TOKENS; i++) allowed[i] = i % 5 ? bits : NULL;
        for (int i = 0; i < TOKENS; i++) token_ids[i] = i * 37 % VOCABULARY, rows[i] = i, places[i] = TOKENS - 1 - i;
        for (int way = 0; way < 3; way++) {
            void *pages = memory(num_numbers * bytes_of(plain), 0);
            float *x = memory(TOKENS * HIDDEN * 4, 0xff), *logits = memory(TOKENS * VOCABULARY * 4, 0xff);
            memcpy(pages, before, (size_t)(num_numbers * bytes_of(plain)));
            model.threads = way == 0 ? 1 : 3;
            // With a window and caps; the pages of the second layer are parts of their own.
            model.num_parts = way == 2 ? 2 : 1;
            kinds[1].window = model.window = way == 2 ? 100 : 0;
            model.attention_cap = model.logits_cap = way == 2 ? 30 : 0;
            for (int i = 0; i < LAYERS; i++) layers[i].part = way == 2 ? i : 0, layers[i].place = way == 2 ? 0 : i;
            const int num_pages = (int)model.num_parts * PAGES;
            for (int i = 0; i < num_pages; i++) tables[i] = i * 5 % num_pages;
            Step step = {TOKENS, ROWS, token_ids, starts, lengths, tables, WIDTH,
                         .pages = pages, .num_pages = num_pages, .page_size = PAGE_SIZE, .format = plain, .x = x};
            const uint32_t usual = enter();
            leave(STRANGE);
            int outcome = kernels_forward(&model, &step);
            outcome |= kernels_head(&model, x, TOKENS, rows, TOKENS, places, logits, NULL, best);
            outcome |= kernels_head(&model, x, TOKENS, rows, TOKENS, places, logits, allowed, allowed_best);
            if (enter() != STRANGE || outcome) printf("outcome %d, or the way to round has changed\n", outcome);
            leave(usual);
            report(x, TOKENS * HIDDEN * 4, "step %s %d, outputs", names[which], way);
            report(pages, num_numbers * bytes_of(plain), "step %s %d, pages", names[which], way);
            report(logits, TOKENS * VOCABULARY * 4, "step %s %d, logits", names[which], way);
            report(best, TOKENS * 4, "step %s %d, best", names[which], way);
            report(allowed_best, TOKENS * 4, "step %s %d, best of those allowed", names[which], way);
            for (int i = 0; i < TOKENS * VOCABULARY; i++)
                if (!(logits[i] > -1e30f && logits[i] < 1e30f)) return (void)puts("a logit is not a number");
            free(pages), free(x), free(logits);
        }
    }
}

// Rows of the same logits, each drawn with another share of the weights before its token.
static void draw_all(void) {
    enum { ROWS = 64, FRACTION = 1 << 30 };
    static const int64_t sizes[] = {11, 1000, 5003};
    static const int64_t ways[][3] = {{0, FRACTION, 0}, {50, FRACTION / 10 * 9, 0}, {0, FRACTION / 2, 0}, {0, FRACTION, 1 << 30}};
    for (int64_t s = 0; s < COUNT(sizes); s++)
        for (int64_t way = 0; way < COUNT(ways); way++) {
            float *logits = numbers(FLOAT32, ROWS * sizes[s], 8), divisors[ROWS];
            int64_t rows[ROWS], draws[6][ROWS], tokens[ROWS];
            for (int64_t row = 0; row < ROWS; row++) {
                const int64_t draw[] = {ways[way][0], ways[way][1], 0, ways[way][2], row * (FRACTION / ROWS), row};
                for (int i = 0; i < 6; i++) draws[i][row] = draw[i];
                rows[row] = ROWS - 1 - row, divisors[row] = 0.01f * (float)(row + 1);
            }
            const uint32_t usual = enter();
            leave(STRANGE);
            int outcome = kernels_sample(logits, sizes[s], rows, ROWS, divisors, draws[0], 2, tokens);
            if (enter() != STRANGE || outcome) printf("outcome %d, or the way to round has changed\n", outcome);
            leave(usual);
            for (int64_t row = 0; row < ROWS; row++)
                if (tokens[row] < 0 || tokens[row] >= sizes[s]) return (void)puts("a token is not of the vocabulary");
            report(tokens, sizeof tokens, "tokens of %ld, way %ld", (long)sizes[s], (long)way);
            free(logits);
        }
}

int main(int count, char **arguments) {
    variant = count == 2 ? kernels_variant(arguments[1]) : NULL;
    if (!variant || !strstr(cpu_variants(), arguments[1])) return fprintf(stderr, "which variant?\n"), 2;
    multiply_all();
    multiply_blocks();
    attend_all();
    compute_steps();
    draw_all();
    return 0;
}
