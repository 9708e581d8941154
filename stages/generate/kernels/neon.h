// What lanes.h and vector.h have for AVX2, for NEON: instructions that every aarch64 CPU has. Two registers of 4 floats
// are one of 8, and each lane does what a lane of AVX2 does. So the bits are the same, but for those of a NaN.
#pragma once
#include <arm_neon.h>
#include <math.h>
#include <stdint.h>

#define LANES 8
typedef struct {
    float32x4_t low, high;
} Lanes;

INLINE Lanes load(const void *source) { return (Lanes){vld1q_f32(source), vld1q_f32((const float *)source + 4)}; }
INLINE void store(void *target, Lanes x) { vst1q_f32(target, x.low), vst1q_f32((float *)target + 4, x.high); }
INLINE Lanes all(float x) { return (Lanes){vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE Lanes add(Lanes a, Lanes b) { return (Lanes){vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
INLINE Lanes subtract(Lanes a, Lanes b) { return (Lanes){vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
INLINE Lanes times(Lanes a, Lanes b) { return (Lanes){vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
INLINE Lanes divide(Lanes a, Lanes b) { return (Lanes){vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
INLINE Lanes fma_of(Lanes a, Lanes b, Lanes c) {
    return (Lanes){vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}

INLINE Lanes load_float16(const void *source) {
    float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(source));
    return (Lanes){vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
INLINE void store_float16(uint16_t *target, Lanes x) {
    vst1q_u16(target, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high)));
}

// ---- lanes.h

INLINE float32x4_t greater_of_four(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
// b where one of them is NaN.
INLINE Lanes greater(Lanes a, Lanes b) {
    return (Lanes){greater_of_four(a.low, b.low), greater_of_four(a.high, b.high)};
}
INLINE Lanes nearest(Lanes x) { return (Lanes){vrndnq_f32(x.low), vrndnq_f32(x.high)}; }

INLINE float32x4_t power_of_two_of_four(float32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
// 2^n of whole numbers in [-127, 127]; 2^-127 is 0.
INLINE Lanes power_of_two(Lanes n) { return (Lanes){power_of_two_of_four(n.low), power_of_two_of_four(n.high)}; }

INLINE float32x4_t only_of_four(float32x4_t x, int32_t start, int32_t first, int32_t end, float32x4_t other) {
    int32x4_t lane = vaddq_s32((int32x4_t){0, 1, 2, 3}, vdupq_n_s32(start));
    uint32x4_t inside = vandq_u32(vcltq_s32(lane, vdupq_n_s32(end)), vcgeq_s32(lane, vdupq_n_s32(first)));
    return vbslq_f32(inside, x, other);
}
// x where the number of the lane, counted from *start*, is in [first, end), and *other* elsewhere.
INLINE Lanes only(Lanes x, int32_t start, int32_t first, int32_t end, Lanes other) {
    return (Lanes){only_of_four(x.low, start, first, end, other.low),
                   only_of_four(x.high, start + 4, first, end, other.high)};
}

INLINE float32x4_t unless_four(float32x4_t x, uint32x4_t zero) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), zero));
}
// x where y is not -inf, and 0 elsewhere.
INLINE Lanes unless_minus_infinity(Lanes x, Lanes y) {
    float32x4_t infinity = vdupq_n_f32(-INFINITY);
    return (Lanes){unless_four(x.low, vceqq_f32(y.low, infinity)), unless_four(x.high, vceqq_f32(y.high, infinity))};
}

INLINE Lanes load_bfloat16(const uint16_t *source) {
    uint16x8_t words = vld1q_u16(source);
    return (Lanes){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(words), 16)),
                   vreinterpretq_f32_u32(vshll_high_n_u16(words, 16))};
}

INLINE float greatest_of(Lanes x) {
    float32x4_t four = greater_of_four(x.low, x.high);
    four = greater_of_four(four, vcombine_f32(vget_high_f32(four), vget_high_f32(four)));
    float first = vgetq_lane_f32(four, 0), second = vgetq_lane_f32(four, 1);
    return first > second ? first : second;
}

INLINE float sum_of(Lanes x) {
    float32x4_t four = vaddq_f32(x.low, x.high);
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

// 8 words, which may be pairs of bfloat16.
typedef Lanes Words;

INLINE Words load_words(const void *source) { return load(source); }
INLINE Words load_halves(const void *source) { return load_float16(source); }
INLINE void store_words(float *target, Words x) { store(target, x); }

INLINE float32x4_t even_of_four(uint32x4_t pairs) { return vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)); }
// Assembly, because compilers would keep a mask in a register, and the sums of a product need all registers.
INLINE float32x4_t odd_of_four(uint32x4_t pairs) {
    __asm__("bic %0.4s, #255\n\tbic %0.4s, #255, lsl #8" : "+w"(pairs));
    return vreinterpretq_f32_u32(pairs);
}
// The first and the second bfloat16 of each pair.
INLINE Lanes even_of(Words x) {
    return (Lanes){even_of_four(vreinterpretq_u32_f32(x.low)), even_of_four(vreinterpretq_u32_f32(x.high))};
}
INLINE Lanes odd_of(Words x) {
    return (Lanes){odd_of_four(vreinterpretq_u32_f32(x.low)), odd_of_four(vreinterpretq_u32_f32(x.high))};
}

// Exchange rows and columns of 4 x 4 words.
INLINE void exchange_four(float32x4_t *a, float32x4_t *b, float32x4_t *c, float32x4_t *d) {
    float64x2_t even_ab = vreinterpretq_f64_f32(vtrn1q_f32(*a, *b)), odd_ab = vreinterpretq_f64_f32(vtrn2q_f32(*a, *b));
    float64x2_t even_cd = vreinterpretq_f64_f32(vtrn1q_f32(*c, *d)), odd_cd = vreinterpretq_f64_f32(vtrn2q_f32(*c, *d));
    *a = vreinterpretq_f32_f64(vtrn1q_f64(even_ab, even_cd)), *b = vreinterpretq_f32_f64(vtrn1q_f64(odd_ab, odd_cd));
    *c = vreinterpretq_f32_f64(vtrn2q_f64(even_ab, even_cd)), *d = vreinterpretq_f32_f64(vtrn2q_f64(odd_ab, odd_cd));
}

INLINE Lanes even_lanes(Lanes x) { return even_of(x); }
INLINE Lanes odd_lanes(Lanes x) { return odd_of(x); }

// Exchange rows and columns of 8 x 8 words.
INLINE void exchange(Words x[8]) {
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        exchange_four(&x[i].low, &x[i + 1].low, &x[i + 2].low, &x[i + 3].low);
        exchange_four(&x[i].high, &x[i + 1].high, &x[i + 2].high, &x[i + 3].high);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        float32x4_t high = x[i].high;
        x[i].high = x[i + 4].low;
        x[i + 4].low = high;
    }
}

// ---- vector.h

typedef Lanes Vector;
typedef struct {
    int32x4_t low, high;
} Integers;

INLINE Vector spread(float number) { return all(number); }
INLINE Vector multiplied(Vector a, Vector b) { return times(a, b); }
INLINE Vector from_halves(const void *from) { return load_float16(from); }
INLINE Vector from_even(const void *from) { return even_of(load_words(from)); }
INLINE Vector from_odd(const void *from) { return odd_of(load_words(from)); }
INLINE Vector to_floats(Integers a) { return (Vector){vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
INLINE Integers no_integers(void) { return (Integers){vdupq_n_s32(0), vdupq_n_s32(0)}; }

// 4 bytes, again and again.
INLINE Integers spread_word(const void *word) { return (Integers){vld1q_dup_s32(word), vdupq_n_s32(0)}; }
// Bytes of weights and of activations: 4 products of neighbours are added to each integer, twice.
#define BYTES_ARE_UNSIGNED 0
INLINE Vector from_wide(int16x8_t wide) {
    return (Vector){vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
}
INLINE Vector from_signed(const void *from) { return from_wide(vmovl_s8(vld1_s8(from))); }
INLINE Vector from_unsigned(const void *from) { return from_wide(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(from)))); }
INLINE Integers load_bytes(const void *from) { return (Integers){vld1q_s32(from), vld1q_s32((const int32_t *)from + 4)}; }
INLINE int32x4_t low_of_four(int32x4_t a) {
    return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(a), vdupq_n_u8(15)));
}
INLINE int32x4_t high_of_four(int32x4_t a) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a), 4)); }
INLINE Integers low_nibbles(Integers a) { return (Integers){low_of_four(a.low), low_of_four(a.high)}; }
INLINE Integers high_nibbles(Integers a) { return (Integers){high_of_four(a.low), high_of_four(a.high)}; }
INLINE Integers spread_integer(int32_t number) { return (Integers){vdupq_n_s32(number), vdupq_n_s32(number)}; }
// A product is at most 128 * 127, which fits into 16 bits.
INLINE int32x4_t add_bytes_of_four(int32x4_t sum, int32x4_t weights, int8x8_t x) {
    int8x16_t bytes = vreinterpretq_s8_s32(weights);
    int16x8_t low = vmull_s8(vget_low_s8(bytes), x), high = vmull_s8(vget_high_s8(bytes), x);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
INLINE Integers add_bytes(Integers sum, Integers weights, Integers x) {
    int8x8_t four = vreinterpret_s8_s32(vget_low_s32(x.low));
    return (Integers){add_bytes_of_four(sum.low, weights.low, four), add_bytes_of_four(sum.high, weights.high, four)};
}
#define ADD_BYTES(sum, a, x, b, y) ((sum) = add_bytes(add_bytes(sum, a, x), b, y))

#define MULTIPLY_ADD(sum, a, b) ((sum) = fma_of(a, b, sum))
