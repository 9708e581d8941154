#include "sample.h"

#include <string.h>

#include "kernels.h"
#include "rows.h"

#define LANES 16
#define BLOCK 64       // logits whose smallest distance, or whose sum of weights, is looked at first
#define BINS 2048      // of a histogram: 11 bits of a distance
#define FARTHEST 50.0f // halvings after which a weight is 0
#define EXPONENT 167   // of the largest weight, 2^40, in float32
#define MAGIC 0x1.8p52 // added to a small double, it is rounded to a whole number, which its lowest bits hold
#define ALL (1 << 30)  // the upper half of the fraction 1

static inline uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

int64_t draw_scratch(int64_t count) {
    count = round_up(count, BLOCK);
    int64_t bytes = count * (int64_t)(sizeof(int64_t) + sizeof(float) + sizeof(int32_t));
    return round_up(bytes + count / BLOCK * (int64_t)sizeof(float), 64); // that of the next thread is aligned, too
}

// weights = rint(2^(40 - distance / divisor)); the polynomial is 2^f in [-0.5, 0.5].
static void weigh(const float *distances, int64_t count, float divisor, int64_t *weights) {
    const double magic = MAGIC;
    int64_t magic_bits;
    memcpy(&magic_bits, &magic, 8);
    for (int64_t i = 0; i < count; i++) {
        float halvings = distances[i] / divisor;
        halvings = halvings < FARTHEST ? halvings : FARTHEST;
        float whole = __builtin_rintf(halvings), f = whole - halvings;
        float power = f * 0.0013264729641377926f;
        power = (power + 0.009671512991189957f) * f;
        power = (power + 0.05550733581185341f) * f;
        power = (power + 0.24022242426872253f) * f;
        power = (power + 0.6931470036506653f) * f;
        power = power + 1.0f;
        int32_t exponent = (EXPONENT - (int32_t)whole) << 23;
        float scale;
        memcpy(&scale, &exponent, 4);
        double rounded = (double)(power * scale) + magic;
        int64_t weight;
        memcpy(&weight, &rounded, 8);
        weights[i] = weight - magic_bits;
    }
}

static int64_t sum_of(const int64_t *weights, int64_t count) {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += weights[i];
    return sum;
}

// high / 2^30 + low / 2^60 of a sum below 2^60, rounded down.
static int64_t share_of(int64_t sum, int64_t high, int64_t low) {
    int64_t upper = sum >> 30, lower = sum & ((1 << 30) - 1);
    return upper * high + ((upper * low + lower * high + ((lower * low) >> 30)) >> 30);
}

// The smallest distance within which the weights sum to *wanted*, or within which there are as many tokens if there are no
// weights. Radix select: the bits of distances, which are not negative, are in their order.
static float border(const float *distances, const int64_t *weights, int64_t count, int64_t wanted) {
    static const int shifts[] = {21, 10, 0};
    int64_t sums[BINS];
    uint32_t found = 0;
    for (int level = 0; level < 3; level++) {
        int shift = shifts[level], before = level ? shifts[level - 1] : 31;
        memset(sums, 0, sizeof sums);
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = bits_of(distances[i]);
            if (bits >> before == found) sums[bits >> shift & ((1u << (before - shift)) - 1)] += weights ? weights[i] : 1;
        }
        uint32_t bin = 0;
        while (bin < BINS - 1 && sums[bin] < wanted) wanted -= sums[bin++];
        found = found << (before - shift) | bin;
    }
    float distance;
    memcpy(&distance, &found, 4);
    return distance;
}

static int64_t keep(float *distances, int32_t *ids, int64_t count, float last) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++)
        if (distances[i] <= last) {
            distances[kept] = distances[i];
            ids[kept++] = ids[i];
        }
    return kept;
}

// Keep the *top_k* nearest and those that equal the last of them; *ids* are their tokens. As many blocks have at least one
// token each within the distance *within*, so all that are kept lie within it.
static int64_t keep_nearest(float *distances, int32_t *ids, int64_t count, int64_t top_k, float *nearest) {
    int64_t blocks = round_up(count, BLOCK) / BLOCK, kept = 0;
    for (int64_t b = 0; b < blocks; b++) {
        float lanes[LANES];
        const float *block = distances + b * BLOCK;
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = block[lane];
        for (int i = LANES; i < BLOCK; i += LANES)
            for (int lane = 0; lane < LANES; lane++)
                lanes[lane] = block[i + lane] < lanes[lane] ? block[i + lane] : lanes[lane];
        nearest[b] = lanes[0];
        for (int lane = 1; lane < LANES; lane++) nearest[b] = lanes[lane] < nearest[b] ? lanes[lane] : nearest[b];
    }
    float within = top_k <= blocks ? border(nearest, 0, blocks, top_k) : __builtin_inff();
    for (int64_t b = 0; b < blocks; b++) {
        if (nearest[b] > within) continue;
        for (int64_t i = b * BLOCK; i < least((b + 1) * BLOCK, count); i++)
            if (distances[i] <= within) {
                distances[kept] = distances[i];
                ids[kept++] = (int32_t)i;
            }
    }
    return keep(distances, ids, kept, border(distances, 0, kept, top_k));
}

int64_t draw_token(const float *logits, int64_t count, float divisor, const Draw *draw, void *scratch) {
    int64_t room = round_up(count, BLOCK), kept = count;
    int64_t *weights = scratch;
    float *distances = (float *)(weights + room), *nearest = distances + room;
    int32_t *ids = (int32_t *)(nearest + room / BLOCK);
    int is_few = draw->top_k > 0 && draw->top_k < count;
    float best = maximum(logits, count);
    if (best - best != 0) return -1; // NaN or infinite
    best += 0.0f; // no distance may be -0, whose bits are not the smallest
    for (int64_t i = 0; i < count; i++) distances[i] = best - logits[i];
    for (int64_t i = count; i < room; i++) distances[i] = __builtin_inff();
    if (is_few) kept = keep_nearest(distances, ids, count, draw->top_k, nearest);
    weigh(distances, kept, divisor, weights);
    int64_t sum = sum_of(weights, kept);
    if (draw->top_p_high < ALL) {
        int64_t wanted = most(1, share_of(sum, draw->top_p_high, draw->top_p_low));
        float last = border(distances, weights, kept, wanted);
        for (int64_t i = 0; i < kept; i++) weights[i] = distances[i] <= last ? weights[i] : 0;
    }
    for (int64_t i = 0; i < kept; i++) weights[i] = weights[i] >= draw->least_weight ? weights[i] : 0;
    int64_t before = share_of(sum_of(weights, kept), draw->share_high, draw->share_low), i = 0;
    for (int64_t block; i + BLOCK <= kept && before >= (block = sum_of(weights + i, BLOCK)); i += BLOCK) before -= block;
    for (; i < kept - 1 && before >= weights[i]; i++) before -= weights[i];
    return is_few ? ids[i] : i;
}
