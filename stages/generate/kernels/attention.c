// Causal grouped-query attention over pages, softmax(q k scale) v, with scores, softmax and sums in float32.
//
// A query head of a token is a row here. Keys come in tiles of TILE tokens. Tiles begin at multiples of TILE, whatever
// the size of a page. Tiles come in segments of SEGMENT tokens, or of one page if a page is larger. The order of the
// operations of a row is fixed:
//
//   score    One FMA chain over the dimensions. The query includes the scale and log2 e, or 1 / cap. Where the CPU multiplies pairs
//            of bfloat16 and the pages have them, the query is rounded to bfloat16 and the chain is over pairs.
//   tile     The greatest score so far is the reference. The sums and the output are scaled to it, then the tile is
//            added: each lane sums every LANES-th weight, and each dimension is one FMA chain over the keys.
//   segment  Begins without scores and sums. It is merged into those before it.
//
// The number of rows that are computed together changes the speed and nothing else. Slots that a row does not see are
// skipped, not added with a weight of 0: they may be NaN.
#include "kernels.h"
#include "lanes.h"
#include "product.h"
#include "vexp.h"
#include <stdbool.h>
#include <string.h>

#define TILE 64
#define LOG2_E 1.44269504088896341f

// Rows that share an expanded tile.
#define SHARED_ROWS 96

// Values that are fetched and added at a time.
#define STEP 16

typedef struct {
    float *outputs, *sums, *most; // [rows][width], [rows][LANES], [rows]
} State;

typedef struct {
    const Pages *pages;
    const int32_t *table;
    int64_t position, kv_head;
    int64_t group, width, rows; // query heads of a kv head; head_dim, rounded up to LANES; all heads of all tokens
    int64_t depth;              // steps of the chain of a score
    int64_t turned;             // slots whose keys are turned at a time
    bool ahead;                 // one token: memory is slower than the computation, so pages are fetched ahead
    bool direct;                // few rows: values are expanded as they are added
    float *queries;             // [rows][width], or [rows][depth] of pairs, also *width* words apart
    float *columns, *values;    // a tile: keys [depth][turned], values [TILE][width]
    float *scores;              // [rows][TILE], later the weights
    float *reference, *decay;   // [rows]
    int32_t *first, *end;       // [rows], the slots of the tile that they see
    int64_t *places, *next;     // [TILE], the index of the first number of a slot; the same of the next tile
    int64_t next_end;           // the end of the slots in *next*
    State segment, total;       // of this segment, and of all before it
} Work;

// Of a power of two.
INLINE int64_t round_down(int64_t number, int64_t multiple) { return number & -multiple; }
INLINE int64_t within(int64_t number, int64_t low, int64_t high) { return least(most(number, low), high); }

INLINE int64_t size_of(Format format) { return format == FLOAT32 ? 4 : 2; }
INLINE bool in_pairs(const Pages *pages) { return PAIRS && pages->format == BFLOAT16; }
INLINE int64_t group_of(const Pages *pages) { return pages->num_heads / pages->num_kv_heads; }
INLINE int64_t width_of(const Pages *pages) { return round_up(pages->head_dim, LANES); }

int64_t NAME(queries)(const Pages *pages) { return most(1, SHARED_ROWS / group_of(pages)); }

int64_t NAME(part_floats)(const Pages *pages) { return width_of(pages) + 2; }

static char *take(char **scratch, int64_t bytes) {
    char *taken = *scratch;
    *scratch += round_up(bytes, 64);
    return taken;
}

static void take_state(State *state, char **scratch, int64_t rows, int64_t width) {
    state->outputs = (float *)take(scratch, rows * width * 4);
    state->sums = (float *)take(scratch, rows * LANES * 4);
    state->most = (float *)take(scratch, rows * 4);
}

// Lay the arrays out for *rows* rows. Returns where they end.
static char *lay_out(Work *work, const Pages *pages, int64_t rows, char *scratch) {
    int64_t padded = round_up(rows, LANES), width = width_of(pages);
    work->queries = (float *)take(&scratch, rows * width * 4);
    work->columns = (float *)take(&scratch, width * TILE * 4);
    work->values = (float *)take(&scratch, width * TILE * 4);
    work->scores = (float *)take(&scratch, rows * TILE * 4);
    work->reference = (float *)take(&scratch, padded * 4);
    work->decay = (float *)take(&scratch, padded * 4);
    work->first = (int32_t *)take(&scratch, rows * 4);
    work->end = (int32_t *)take(&scratch, rows * 4);
    work->places = (int64_t *)take(&scratch, TILE * 8);
    work->next = (int64_t *)take(&scratch, TILE * 8);
    take_state(&work->segment, &scratch, padded, width);
    take_state(&work->total, &scratch, padded, width);
    return scratch;
}

int64_t NAME(attend_scratch)(const Pages *pages) {
    Work work;
    char *nowhere = (char *)64;
    return lay_out(&work, pages, NAME(queries)(pages) * group_of(pages), nowhere) - nowhere + 64;
}

// ---- queries

static void take_query(const Work *work, const float *q, int64_t row) {
    const Pages *pages = work->pages;
    float *query = work->queries + row * work->width, factor = pages->cap ? pages->scale / pages->cap : pages->scale * LOG2_E;
    for (int64_t d = 0; d < pages->head_dim; d++)
        query[d] = q[d] * factor;
    if (in_pairs(pages)) {
        for (int64_t d = pages->head_dim; d < work->width; d++)
            query[d] = 0;
        round_to_pairs(query, work->width);
    }
}

static void begin(Work *work, const Pages *pages, const int32_t *table, int64_t position, int64_t count,
                  int64_t kv_head, const float *q, int64_t q_stride, void *scratch) {
    int64_t group = group_of(pages);
    *work = (Work){.pages = pages, .table = table, .position = position, .kv_head = kv_head, .group = group,
                   .width = width_of(pages), .rows = count * group};
    work->depth = in_pairs(pages) ? pages->head_dim / 2 : pages->head_dim;
    work->ahead = count == 1;
    work->direct = work->rows <= BLOCK_ROWS && work->width == pages->head_dim;
    work->turned = work->ahead && work->depth > 64 ? TILE / 2 : TILE; // so that they fit into a small cache
    lay_out(work, pages, work->rows, (char *)(((uintptr_t)scratch + 63) / 64 * 64));
    for (int64_t token = 0; token < count; token++)
        for (int64_t head = 0; head < group; head++)
            take_query(work, q + token * q_stride + head * pages->head_dim, token * group + head);
}

// The first position that a token sees.
INLINE int64_t first_seen(const Work *work, int64_t token) {
    int64_t window = work->pages->window, end = work->position + token + 1;
    return window && end > window ? end - window : 0;
}

// ---- a tile

// The end of the slots that lie on the page of *slot*, at most *end*.
INLINE int64_t page_end(const Pages *pages, int64_t slot, int64_t end) {
    return least(end, round_down(slot, pages->page_size) + pages->page_size);
}

// Find the slots [first, end) in the pages.
static void find_places(const Work *work, int64_t tile, int64_t first, int64_t end, int64_t *places) {
    const Pages *pages = work->pages;
    int64_t shift = __builtin_ctzll((uint64_t)pages->page_size);
    for (int64_t slot = first, until; slot < end; slot = until) {
        int64_t position = tile + slot, offset = position & (pages->page_size - 1);
        int64_t head = work->table[position >> shift] * pages->num_kv_heads + work->kv_head;
        int64_t index = ((head << shift) + offset) * pages->head_dim;
        until = page_end(pages, slot, end);
        for (int64_t i = slot; i < until; i++, index += pages->head_dim)
            places[i] = index;
    }
}

INLINE const char *place(const Work *work, const void *numbers, int64_t slot) {
    return (const char *)numbers + work->places[slot] * size_of(work->pages->format);
}

// Fetch the numbers of the slots [first, end). The processor does it by itself only within a page.
INLINE void fetch(const Work *work, const void *numbers, const int64_t *places, int64_t first, int64_t end) {
    int64_t size = size_of(work->pages->format), bytes = work->pages->head_dim * size;
    for (int64_t slot = first, until; slot < end; slot = until) {
        until = page_end(work->pages, slot, end);
        const char *line = (const char *)numbers + places[slot] * size, *last = line + (until - slot) * bytes;
        for (; line < last; line += 64)
            __builtin_prefetch(line, 0, 3);
    }
}

// Fetch the next tile's keys of the STEP slots from *slot* on.
static void fetch_next(const Work *work, int64_t slot) {
    fetch(work, work->pages->keys, work->next, slot, least(round_down(slot, STEP) + STEP, work->next_end));
}

// Turn keys [slot][d] into columns [d][slot], *stride* apart, from a slot that is a multiple of 8. Columns beside
// [first, end) are copies of other keys and are not used.
static void turn_keys(const Work *work, int64_t start, int64_t first, int64_t end, int64_t stride) {
    const Pages *pages = work->pages;
    for (int64_t slot = round_down(most(start, first), 8); slot < end; slot += 8) {
        const char *keys[8];
        float *columns = work->columns + slot - start;
        for (int i = 0; i < 8; i++)
            keys[i] = place(work, pages->keys, within(slot + i, first, end - 1));
        if (work->ahead)
            fetch(work, pages->values, work->places, most(slot, first), least(slot + 8, end));
        switch (pages->format) {
        case FLOAT32:
            turn(FLOAT32, keys, pages->head_dim, columns, stride);
            break;
        case BFLOAT16:
            turn(BFLOAT16, keys, pages->head_dim, columns, stride);
            break;
        default:
            turn(FLOAT16, keys, pages->head_dim, columns, stride);
        }
    }
}

// Expand the values of [first, end) to floats.
static void expand_values(const Work *work, int64_t first, int64_t end) {
    const Pages *pages = work->pages;
    for (int64_t slot = first; slot < end; slot++) {
        if (work->ahead && slot % STEP == 0)
            fetch_next(work, slot);
        expand(pages->format, place(work, pages->values, slot), pages->head_dim, work->values + slot * work->width);
    }
}

// Add weight * value of the slots [first, end) to the outputs of some rows, after scaling these.
static void add_values(const Work *work, int64_t row, int64_t rows, int64_t first, int64_t end, const float *scales) {
    static const float ones[BLOCK_ROWS] = {1, 1, 1, 1, 1, 1};
    const Pages *pages = work->pages;
    int64_t width = work->width, vectors = width / LANES;
    float *outputs = work->segment.outputs + row * width;
    const float *weights = work->scores + row * TILE;
    if (!work->direct) {
        product(SUM_FLOAT32, rows, vectors, weights + first, TILE, work->values + first * width, width, 0, end - first,
                scales, outputs, width);
        return;
    }
    do {
        int64_t until = page_end(pages, first, least(end, round_down(first, STEP) + STEP));
        if (work->ahead)
            fetch_next(work, first);
        product(SUM_FLOAT32 + pages->format, rows, vectors, weights + first, TILE, place(work, pages->values, first),
                width, 0, until - first, scales, outputs, width);
        first = until, scales = ones;
    } while (first < end);
}

// Add all values that some rows see, which may differ.
static void add_seen_values(const Work *work, int64_t row, int64_t rows) {
    const int32_t *first = work->first + row, *end = work->end + row;
    int64_t common = first[rows - 1], common_end = end[0];
    if (common >= common_end) {
        for (int64_t i = 0; i < rows; i++)
            add_values(work, row + i, 1, first[i], end[i], work->decay + row + i);
        return;
    }
    if (first[0] == common) {
        add_values(work, row, rows, common, common_end, work->decay + row);
    } else {
        float ones[BLOCK_ROWS];
        for (int64_t i = 0; i < rows; i++) {
            add_values(work, row + i, 1, first[i], common, work->decay + row + i);
            ones[i] = 1;
        }
        add_values(work, row, rows, common, common_end, ones);
    }
    for (int64_t i = 0; i < rows; i++) {
        const float one = 1;
        if (end[i] > common_end)
            add_values(work, row + i, 1, common_end, end[i], &one);
    }
}

// Leave -inf in the slots that a row does not see, and return the greatest score.
INLINE float greatest_score(const Work *work, int64_t row) {
    int32_t first = work->first[row], end = work->end[row];
    float *scores = work->scores + row * TILE;
    Lanes greatest = all(-INFINITY);
    for (int32_t slot = first / LANES * LANES; slot < end; slot += LANES) {
        Lanes score = load(scores + slot);
        if (slot < first || slot + LANES > end) {
            score = only(score, slot, first, end, all(-INFINITY));
            store(scores + slot, score);
        }
        greatest = greater(greatest, score);
    }
    return greatest_of(greatest);
}

// Make weights of scores, and add them to the sums.
INLINE void weigh(const Work *work, int64_t row) {
    float *scores = work->scores + row * TILE, *sums = work->segment.sums + row * LANES;
    Lanes reference = all(work->reference[row]), sum = times(load(sums), all(work->decay[row]));
    for (int32_t slot = work->first[row] / LANES * LANES; slot < work->end[row]; slot += LANES) {
        Lanes weight = exp2_of(subtract(load(scores + slot), reference));
        store(scores + slot, weight);
        sum = add(sum, weight);
    }
    store(sums, sum);
}

// The rows of a block, when *rows* rows are left to split evenly.
INLINE int64_t block_of(int64_t rows) {
    int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    return (rows + blocks - 1) / blocks;
}

// Compute the scores of the rows [row, row_end), of which one at least sees each slot of [first, end).
static void score(const Work *work, int64_t row, int64_t row_end, int64_t first, int64_t end) {
    const Pages *pages = work->pages;
    const int lies_turned = pages->page_size >= KEY_GROUP;
    const int64_t size = size_of(pages->format);
    static const int kinds[] = {[FLOAT32] = SCORE_FLOATS, [BFLOAT16] = SCORE_WORDS, [FLOAT16] = SCORE_HALVES};
    const int kind = in_pairs(pages) ? SCORE_PAIRS : lies_turned ? kinds[pages->format] : SCORE_FLOATS;
    for (int64_t start = round_down(first, lies_turned ? KEY_GROUP : LANES), until; start < end; start = until) {
        until = least(end, start + work->turned);
        if (lies_turned)
            until = page_end(pages, start, until);
        int64_t vectors = round_up(until - start, LANES) / LANES, stride = lies_turned ? KEY_GROUP : work->turned;
        const char *keys = (const char *)work->columns;
        if (lies_turned) {
            int64_t seen = most(start, first);
            keys = place(work, pages->keys, seen) - (seen - start) * pages->head_dim * size;
            if (work->ahead)
                fetch(work, pages->values, work->places, seen, until);
        } else {
            turn_keys(work, start, first, until, stride);
        }
        for (int64_t r = row, rows; r < row_end; r += rows) {
            rows = block_of(row_end - r);
            product(kind, rows, vectors, work->queries + r * work->width, work->width, keys, stride,
                    lies_turned ? KEY_GROUP * pages->head_dim * size : KEY_GROUP * 4,
                    kind == SCORE_WORDS ? work->depth / 2 : work->depth, NULL, work->scores + r * TILE + start, TILE);
        }
    }
}

// Cap the scores that a row sees, which come divided by the cap, and multiply them with log2 e.
static void cap_scores(const Work *work, int64_t row) {
    float *scores = work->scores + row * TILE;
    const float factor = work->pages->cap * LOG2_E;
    for (int32_t slot = work->first[row]; slot < work->end[row]; slot++)
        scores[slot] = factor * tanh_of(scores[slot]);
}

// Find the references of the rows [row, row_end), and what their sums decay by.
static void find_references(const Work *work, int64_t row, int64_t row_end) {
    float *most = work->segment.most;
    for (int64_t r = row; r < row_end; r++) {
        if (work->pages->cap)
            cap_scores(work, r);
        work->reference[r] = greatest_score(work, r);
    }
    for (int64_t r = round_down(row, LANES); r < row_end; r += LANES) {
        Lanes before = load(most + r), now = greater(before, load(work->reference + r));
        if (r < row || r + LANES > row_end)
            now = only(now, (int32_t)r, (int32_t)row, (int32_t)row_end, before);
        Lanes reference = unless_minus_infinity(now, now);
        store(most + r, now);
        store(work->reference + r, reference);
        store(work->decay + r, exp2_of(subtract(before, reference)));
    }
}

// Add a tile to all rows that see something of it.
static void add_tile(Work *work, int64_t tile) {
    const Pages *pages = work->pages;
    int64_t count = work->rows / work->group, token = most(0, tile - work->position), token_end = count;
    if (pages->window)
        token_end = least(count, tile + TILE + pages->window - 1 - work->position);
    if (token >= token_end)
        return;
    int64_t row = token * work->group, row_end = token_end * work->group;
    for (int64_t r = row, t = token; t < token_end; t++) {
        int32_t first = (int32_t)within(first_seen(work, t) - tile, 0, TILE);
        int32_t end = (int32_t)within(work->position + t + 1 - tile, 0, TILE);
        for (int64_t head = 0; head < work->group; head++, r++)
            work->first[r] = first, work->end[r] = end;
    }
    int64_t first = work->first[row], end = work->end[row_end - 1];
    find_places(work, tile, first, end, work->places);
    if (work->ahead) {
        work->next_end = within(work->position + count - tile - TILE, 0, TILE);
        find_places(work, tile + TILE, 0, work->next_end, work->next);
    }
    score(work, row, row_end, first, end);
    find_references(work, row, row_end);
    for (int64_t r = row; r < row_end; r++)
        weigh(work, r);
    if (!work->direct)
        expand_values(work, first, end);
    for (int64_t r = row, rows; r < row_end; r += rows) {
        rows = block_of(row_end - r);
        add_seen_values(work, r, rows);
    }
}

// ---- segments

// Compute what the rows see of one segment by itself. The result of rows that see nothing of it has no meaning.
static void compute_segment(Work *work, int64_t segment) {
    const State *state = &work->segment;
    for (int64_t row = 0; row < work->rows; row++)
        state->most[row] = -INFINITY;
    memset(state->sums, 0, (size_t)(work->rows * LANES) * sizeof(float));
    memset(state->outputs, 0, (size_t)(work->rows * work->width) * sizeof(float));
    int64_t tokens = segment_tokens(work->pages->page_size);
    int64_t begin = most(segment * tokens, first_seen(work, 0) / TILE * TILE);
    int64_t end = least((segment + 1) * tokens, work->position + work->rows / work->group);
    for (int64_t tile = begin; tile < end; tile += TILE)
        add_tile(work, tile);
}

// What a part, and what is before it, are scaled with when they become one.
typedef struct {
    Lanes before, part, greatest;
} Shares;

INLINE Shares shares_of(Lanes greatest, Lanes part_greatest) {
    Lanes now = greater(greatest, part_greatest), reference = unless_minus_infinity(now, now);
    return (Shares){exp2_of(subtract(greatest, reference)), exp2_of(subtract(part_greatest, reference)), now};
}

INLINE Lanes join(Lanes before, Lanes part, Shares shares) {
    return fma_of(part, shares.part, times(before, shares.before));
}

// Store the dimensions from *d* on, at most LANES.
INLINE void store_output(const Pages *pages, int64_t d, Lanes output, float *o) {
    float last[LANES];
    if (d + LANES <= pages->head_dim) {
        store(o + d, output);
        return;
    }
    store(last, output);
    memcpy(o + d, last, (size_t)(pages->head_dim - d) * sizeof(float));
}

void NAME(attend)(const Pages *pages, const int32_t *table, int64_t position, int64_t count, int64_t kv_head,
                  const float *q, int64_t q_stride, float *o, int64_t o_stride, void *scratch) {
    Work work;
    begin(&work, pages, table, position, count, kv_head, q, q_stride, scratch);
    const State *total = &work.total;
    int64_t width = work.width, tokens = segment_tokens(pages->page_size);
    for (int64_t segment = first_seen(&work, 0) / tokens; segment * tokens < position + count; segment++) {
        compute_segment(&work, segment);
        for (int64_t row = 0; row < work.rows; row++) {
            int64_t token = row / work.group, first = first_seen(&work, token) / tokens;
            if (segment < first || segment * tokens > position + token)
                continue;
            float sum = sum_of(load(work.segment.sums + row * LANES)), greatest = work.segment.most[row];
            const float *outputs = work.segment.outputs + row * width;
            float *total_outputs = total->outputs + row * width;
            if (segment == first) {
                total->sums[row] = sum, total->most[row] = greatest;
                memcpy(total_outputs, outputs, (size_t)width * sizeof(float));
                continue;
            }
            Shares shares = shares_of(all(total->most[row]), all(greatest));
            total->sums[row] = first_lane(join(all(total->sums[row]), all(sum), shares));
            total->most[row] = first_lane(shares.greatest);
            for (int64_t d = 0; d < width; d += LANES)
                store(total_outputs + d, join(load(total_outputs + d), load(outputs + d), shares));
        }
    }
    for (int64_t row = 0; row < work.rows; row++) {
        float *target = o + row / work.group * o_stride + row % work.group * pages->head_dim;
        Lanes sum = all(total->sums[row]);
        for (int64_t d = 0; d < width; d += LANES)
            store_output(pages, d, divide(load(total->outputs + row * width + d), sum), target);
    }
}

void NAME(attend_segment)(const Pages *pages, const int32_t *table, int64_t position, int64_t kv_head, int64_t segment,
                          const float *q, float *part, void *scratch) {
    Work work;
    begin(&work, pages, table, position, 1, kv_head, q, 0, scratch);
    compute_segment(&work, segment);
    for (int64_t row = 0; row < work.rows; row++, part += work.width + 2) {
        memcpy(part, work.segment.outputs + row * work.width, (size_t)work.width * sizeof(float));
        part[work.width] = sum_of(load(work.segment.sums + row * LANES));
        part[work.width + 1] = work.segment.most[row];
    }
}

void NAME(merge)(const Pages *pages, const float *parts, int64_t num_parts, float *o) {
    int64_t group = group_of(pages), width = width_of(pages), stride = group * (width + 2);
    for (int64_t head = 0; head < group; head++, parts += width + 2, o += pages->head_dim)
        for (int64_t d = 0; d < width; d += LANES) {
            const float *part = parts;
            Lanes outputs = load(part + d), sum = all(part[width]), greatest = all(part[width + 1]);
            for (int64_t i = 1; i < num_parts; i++) {
                part += stride;
                Shares shares = shares_of(greatest, all(part[width + 1]));
                outputs = join(outputs, load(part + d), shares);
                sum = join(sum, all(part[width]), shares);
                greatest = shares.greatest;
            }
            store_output(pages, d, divide(outputs, sum), o);
        }
}
