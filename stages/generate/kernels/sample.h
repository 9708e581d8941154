// The token of one row, drawn from its logits. `forward/sampler.py` says the same in torch, bit for bit.
#pragma once
#include <stdint.h>

// As `Draws` of forward/draws.py. A fraction is high / 2^30 + low / 2^60.
typedef struct {
    int64_t top_k; // 0: off
    int64_t top_p_high, top_p_low;
    int64_t least_weight; // that min_p leaves; the most probable token weighs 2^40
    int64_t share_high, share_low; // of the weights that lie before the token
} Draw;

// Bytes that `draw_token` needs for *count* logits.
int64_t draw_scratch(int64_t count);
// Logits further from the largest one by *divisor* weigh half. Returns -1 if a logit is NaN or the largest is infinite.
int64_t draw_token(const float *logits, int64_t count, float divisor, const Draw *draw, void *scratch);
