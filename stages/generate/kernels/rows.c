#include "rows.h"

#include <string.h>

#include "vexp.h"

#define LANES 16

// The same tree on every CPU: lane i and i + 8, then i + 4, ..
static inline float sum_of_lanes(float lanes[LANES]) {
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

static inline float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 0x40) : rounded); // NaN stays NaN
}

int64_t bytes_of(Format format) { return format == FLOAT32 ? 4 : 2; }

void expand(Format format, const void *in, int64_t count, float *out) {
    const uint16_t *half = in;
    const _Float16 *fp16 = in;
    if (format == FLOAT32) memcpy(out, in, (size_t)count * 4);
    else if (format == BFLOAT16)
        for (int64_t i = 0; i < count; i++) out[i] = from_bfloat16(half[i]);
    else
        for (int64_t i = 0; i < count; i++) out[i] = (float)fp16[i];
}

void shrink(Format format, const float *in, int64_t count, void *out) {
    uint16_t *half = out;
    _Float16 *fp16 = out;
    if (format == FLOAT32) memcpy(out, in, (size_t)count * 4);
    else if (format == BFLOAT16)
        for (int64_t i = 0; i < count; i++) half[i] = to_bfloat16(in[i]);
    else
        for (int64_t i = 0; i < count; i++) fp16[i] = (_Float16)in[i];
}

void rms_norm(const float *in, const float *weight, int64_t count, float eps, float *out) {
    float lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = __builtin_fmaf(in[i + lane], in[i + lane], lanes[lane]);
    for (int lane = 0; i + lane < count; lane++) lanes[lane] = __builtin_fmaf(in[i + lane], in[i + lane], lanes[lane]);
    float scale = 1.0f / __builtin_sqrtf(sum_of_lanes(lanes) / (float)count + eps);
    for (i = 0; i < count; i++) out[i] = in[i] * scale * weight[i];
}

void rotate(float *x, const float *cosines, const float *sines, int64_t half) {
    float *y = x + half;
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = y[i];
        x[i] = __builtin_fmaf(first, cosines[i], -(second * sines[i]));
        y[i] = __builtin_fmaf(second, cosines[i], first * sines[i]);
    }
}

// Sine and cosine of r in [-pi/4, pi/4]: the polynomials of fdlibm's __kernel_sin and __kernel_cos (Sun Microsystems).
static inline double sine_near_zero(double r) {
    double z = r * r, p = 1.58969099521155010221e-10;
    p = __builtin_fma(p, z, -2.50507602534068634195e-08);
    p = __builtin_fma(p, z, 2.75573137070700676789e-06);
    p = __builtin_fma(p, z, -1.98412698298579493134e-04);
    p = __builtin_fma(p, z, 8.33333333332248946124e-03);
    p = __builtin_fma(p, z, -1.66666666666666324348e-01);
    return __builtin_fma(r * z, p, r);
}

static inline double cosine_near_zero(double r) {
    double z = r * r, p = -1.13596475577881948265e-11;
    p = __builtin_fma(p, z, 2.08757232129817482790e-09);
    p = __builtin_fma(p, z, -2.75573143513906633035e-07);
    p = __builtin_fma(p, z, 2.48015872894767294178e-05);
    p = __builtin_fma(p, z, -1.38888888888741095749e-03);
    p = __builtin_fma(p, z, 4.16666666666666019037e-02);
    return __builtin_fma(z * z, p, __builtin_fma(z, -0.5, 1.0));
}

void angles(int64_t position, const float *frequencies, int64_t half, float factor, float *cosines, float *sines) {
    const double two_over_pi = 0.63661977236758134308, half_pi = 1.57079632679489655800,
                 half_pi_rest = 6.12323399573676603587e-17; // what half_pi lacks
    for (int64_t i = 0; i < half; i++) {
        double angle = (double)((float)position * frequencies[i]);
        double turns = __builtin_rint(angle * two_over_pi); // quarters; below 2^20 for every context
        double r = __builtin_fma(-turns, half_pi_rest, __builtin_fma(-turns, half_pi, angle));
        double s = sine_near_zero(r), c = cosine_near_zero(r);
        int64_t quarter = (int64_t)turns & 3;
        double sine = quarter & 1 ? c : s, cosine = quarter & 1 ? s : c;
        sines[i] = (float)(quarter & 2 ? -sine : sine) * factor;
        cosines[i] = (float)((quarter + 1) & 2 ? -cosine : cosine) * factor;
    }
}

void swiglu(const float *gate, const float *up, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) out[i] = gate[i] / (1.0f + exp_of(-gate[i])) * up[i];
}

void geglu(const float *gate, const float *up, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) {
        float x = gate[i], cube = x * x * x;
        float u = 0.79788456080286536f * __builtin_fmaf(0.044715f, cube, x); // sqrt(2 / pi)
        out[i] = x / (1.0f + exp_of(-2.0f * u)) * up[i]; // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
    }
}

void soft_cap(float *x, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i++) x[i] = cap * tanh_of(x[i] / cap);
}

void add(const float *in, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) out[i] += in[i];
}

void add_weighted(const float *in, float weight, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) out[i] = __builtin_fmaf(weight, in[i], out[i]);
}

float maximum(const float *x, int64_t count) {
    float lanes[LANES];
    int nan[LANES] = {0};
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = -__builtin_inff();
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float value = x[i + lane];
            nan[lane] |= value != value;
            lanes[lane] = value > lanes[lane] ? value : lanes[lane];
        }
    for (int lane = 0; i + lane < count; lane++) {
        nan[lane] |= x[i + lane] != x[i + lane];
        lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
    }
    for (int lane = 1; lane < LANES; lane++) {
        nan[0] |= nan[lane];
        lanes[0] = lanes[lane] > lanes[0] ? lanes[lane] : lanes[0];
    }
    return nan[0] ? __builtin_nanf("") : lanes[0];
}

int64_t largest(const float *x, int64_t count, float *best) {
    *best = maximum(x, count);
    if (*best != *best) return -1;
    for (int64_t i = 0; i < count; i++)
        if (x[i] == *best) return i;
    return 0;
}

static inline float only_if(uint32_t word, int64_t bit, float x) { return word >> bit & 1 ? x : -__builtin_inff(); }

void refuse(float *logits, int64_t count, const uint32_t *allowed, int64_t first) {
    int64_t i = 0;
    for (; i < count && (first + i) % 32; i++) logits[i] = only_if(allowed[(first + i) / 32], (first + i) % 32, logits[i]);
    for (; i + 32 <= count; i += 32) {
        uint32_t word = allowed[(first + i) / 32];
        if (word == UINT32_MAX) continue; // grammars mostly allow almost all, or almost none
        for (int bit = 0; bit < 32; bit++) logits[i + bit] = only_if(word, bit, logits[i + bit]);
    }
    for (; i < count; i++) logits[i] = only_if(allowed[(first + i) / 32], (first + i) % 32, logits[i]);
}

void choose(float *logits, int64_t count, int64_t num_chosen, int normalize, int32_t *chosen, float *shares) {
    float most = maximum(logits, count), sum = 0, sum_of_chosen = 0, share;
    for (int64_t i = 0; i < count; i++) logits[i] = exp_of(logits[i] - most);
    for (int64_t i = 0; i < count; i++) sum += logits[i];
    for (int64_t n = 0; n < num_chosen; n++) {
        int64_t best = largest(logits, count, &share);
        chosen[n] = (int32_t)(best < 0 ? n : best); // NaN: the shares will say so
        shares[n] = share / sum;
        sum_of_chosen += shares[n];
        logits[chosen[n]] = -1; // below all others
    }
    if (normalize)
        for (int64_t n = 0; n < num_chosen; n++) shares[n] /= sum_of_chosen;
}
