// exp and tanh without libm.
#pragma once
#include <stdint.h>
#include <string.h>

// e^x to 2 units in the last place; compilers turn loops of it into vector instructions. Above 88.376 it is infinite,
// below the smallest normal number 0; NaN stays NaN. The polynomial is that of Cephes' expf (S. Moshier).
static inline __attribute__((always_inline)) float exp_of(float x) {
    float y = x < 88.3762626647949f ? x : 88.3762626647949f;
    y = y > -87.3365447505f ? y : -87.3365447505f;
    float n = __builtin_rintf(y * 1.44269504088896341f);
    float r = __builtin_fmaf(n, -0.693359375f, y);
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500E-4f;
    p = __builtin_fmaf(p, r, 1.3981999507E-3f);
    p = __builtin_fmaf(p, r, 8.3334519073E-3f);
    p = __builtin_fmaf(p, r, 4.1665795894E-2f);
    p = __builtin_fmaf(p, r, 1.6666665459E-1f);
    p = __builtin_fmaf(p, r, 5.0000001201E-1f);
    p = __builtin_fmaf(p, r * r, r + 1.0f);
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    p *= power;
    p = x < -87.3365447505f ? 0.0f : p;
    p = x > 88.3762626647949f ? __builtin_inff() : p;
    return x != x ? x : p;
}

// tanh(x) to 3 units in the last place. The polynomial near 0 is that of Cephes' tanhf.
static inline __attribute__((always_inline)) float tanh_of(float x) {
    float size = __builtin_fabsf(x), z = x * x, e = exp_of(-2.0f * size), p = -5.70498872745e-3f;
    p = __builtin_fmaf(p, z, 2.06390887954e-2f);
    p = __builtin_fmaf(p, z, -5.37397155531e-2f);
    p = __builtin_fmaf(p, z, 1.33314422036e-1f);
    p = __builtin_fmaf(p, z, -3.33332819422e-1f);
    p = __builtin_fmaf(p * z, size, size);
    return __builtin_copysignf(size < 0.625f ? p : (1.0f - e) / (1.0f + e), x);
}
