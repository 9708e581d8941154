// What is done to one row of activations at a time. Plain C: sums have 16 lanes on every CPU, so their order is fixed.
#pragma once
#include <stdint.h>

#include "kernels.h"

// Bytes of one number.
int64_t bytes_of(Format format);
// out = in, from any format of floats, exactly.
void expand(Format format, const void *in, int64_t count, float *out);
// Bytes of a row of a `ggml_type`, and the row as floats: see blocks.c.
int64_t bytes_of_row(int type, int64_t inputs);
void widen_row(int type, const void *row, int64_t inputs, float *out);
// The weights of an output of a packed matrix of blocks, as floats.
void widen_output(const Matrix *matrix, int64_t number, float *out);
// out = in, rounded to the nearest even, to any format of floats.
void shrink(Format format, const float *in, int64_t count, void *out);
// out = in / sqrt(mean(in^2) + eps) * weight: root mean square normalisation (https://arxiv.org/abs/1910.07467).
void rms_norm(const float *in, const float *weight, int64_t count, float eps, float *out);
// x[i], x[i + half] rotated by the angle i: rotary position embedding (https://arxiv.org/abs/2104.09864).
void rotate(float *x, const float *cosines, const float *sines, int64_t half);
// Cosine and sine of position * frequency, times *factor. The angle is rounded to float32, as in transformers.
void angles(int64_t position, const float *frequencies, int64_t half, float factor, float *cosines, float *sines);
// out = gate / (1 + exp(-gate)) * up: SwiGLU (https://arxiv.org/abs/2002.05202).
void swiglu(const float *gate, const float *up, int64_t count, float *out);
// out = gelu(gate) * up, with tanh in place of the error function: GeGLU, there.
void geglu(const float *gate, const float *up, int64_t count, float *out);
// x = cap * tanh(x / cap)
void soft_cap(float *x, int64_t count, float cap);
// out += in
void add(const float *in, int64_t count, float *out);
// out += weight * in
void add_weighted(const float *in, float weight, int64_t count, float *out);
// The largest number, or NaN if any of them is.
float maximum(const float *x, int64_t count);
// The index of the largest number, the first one of several, and itself in *best; -1 if any of them is NaN.
int64_t largest(const float *x, int64_t count, float *best);
// Logits of the tokens from *first* on: those that are not in the bits *allowed*, of all tokens, become minus infinity.
void refuse(float *logits, int64_t count, const uint32_t *allowed, int64_t first);
// The *num_chosen* largest of *logits*, the first ones of equals, in falling order, and their shares of the softmax over
// all; with *normalize* the shares are scaled to sum to 1. With a NaN all shares are NaN.
void choose(float *logits, int64_t count, int64_t num_chosen, int normalize, int32_t *chosen, float *shares);
