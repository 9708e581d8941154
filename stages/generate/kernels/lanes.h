// One vector register of floats, and what attention does with it, for each variant.
#pragma once
#include <math.h>
#include <stdint.h>

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(function) JOIN(function, VARIANT)
#define INLINE static inline __attribute__((always_inline))

#ifdef __aarch64__
#include "neon.h"
#else
#include <immintrin.h>
#endif

#if defined(__AVX512F__)

#define LANES 16
typedef __m512 Lanes;

// Of words of two bfloat16, the first or the second number.
INLINE Lanes even_lanes(Lanes x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16)); }
INLINE Lanes odd_lanes(Lanes x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0xffff0000)));
}
INLINE Lanes load(const float *source) { return _mm512_loadu_ps(source); }
INLINE void store(float *target, Lanes x) { _mm512_storeu_ps(target, x); }
INLINE Lanes all(float x) { return _mm512_set1_ps(x); }
INLINE Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
INLINE Lanes subtract(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
INLINE Lanes times(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
INLINE Lanes divide(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
INLINE Lanes fma_of(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
// b where one of them is NaN.
INLINE Lanes greater(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
INLINE Lanes nearest(Lanes x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// 2^n of whole numbers in [-127, 127]; 2^-127 is 0.
INLINE Lanes power_of_two(Lanes n) {
    __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}

// x where the number of the lane, counted from *start*, is in [first, end), and *other* elsewhere.
INLINE Lanes only(Lanes x, int32_t start, int32_t first, int32_t end, Lanes other) {
    __m512i lane = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                    _mm512_set1_epi32(start));
    __mmask16 inside = _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end)) &
                       _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first));
    return _mm512_mask_blend_ps(inside, other, x);
}

// x where y is not -inf, and 0 elsewhere.
INLINE Lanes unless_minus_infinity(Lanes x, Lanes y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, all(-INFINITY), _CMP_NEQ_UQ), x);
}

INLINE __m256 fold_max(Lanes x) {
    return _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}
INLINE __m256 fold_sum(Lanes x) {
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}

INLINE Lanes load_bfloat16(const uint16_t *source) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)source));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE Lanes load_float16(const uint16_t *source) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)source));
}

#elif defined(__AVX2__)

#define LANES 8
typedef __m256 Lanes;

INLINE Lanes load(const float *source) { return _mm256_loadu_ps(source); }
INLINE void store(float *target, Lanes x) { _mm256_storeu_ps(target, x); }
INLINE Lanes all(float x) { return _mm256_set1_ps(x); }
INLINE Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
INLINE Lanes subtract(Lanes a, Lanes b) { return _mm256_sub_ps(a, b); }
INLINE Lanes times(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
INLINE Lanes divide(Lanes a, Lanes b) { return _mm256_div_ps(a, b); }
INLINE Lanes fma_of(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
// b where one of them is NaN.
INLINE Lanes greater(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
INLINE Lanes nearest(Lanes x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// 2^n of whole numbers in [-127, 127]; 2^-127 is 0.
INLINE Lanes power_of_two(Lanes n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

// x where the number of the lane, counted from *start*, is in [first, end), and *other* elsewhere.
INLINE Lanes only(Lanes x, int32_t start, int32_t first, int32_t end, Lanes other) {
    __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(start));
    __m256i below_end = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
    __m256i before_first = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_andnot_si256(before_first, below_end)));
}

// x where y is not -inf, and 0 elsewhere.
INLINE Lanes unless_minus_infinity(Lanes x, Lanes y) {
    return _mm256_and_ps(_mm256_cmp_ps(y, all(-INFINITY), _CMP_NEQ_UQ), x);
}

INLINE __m256 fold_max(Lanes x) { return x; }
INLINE __m256 fold_sum(Lanes x) { return x; }

INLINE Lanes load_bfloat16(const uint16_t *source) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)source));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE Lanes load_float16(const uint16_t *source) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)source)); }

#endif

#ifdef __AVX2__

INLINE float greatest_of(Lanes x) {
    __m256 eight = fold_max(x);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

INLINE float sum_of(Lanes x) {
    __m256 eight = fold_sum(x);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// 8 words, which may be pairs of bfloat16.
typedef __m256 Words;

INLINE Words load_words(const void *source) { return _mm256_loadu_ps(source); }
INLINE Words load_halves(const void *source) { return _mm256_cvtph_ps(_mm_loadu_si128(source)); }
INLINE void store_words(float *target, Words x) { _mm256_storeu_ps(target, x); }

// The first and the second bfloat16 of each pair.
INLINE Words even_of(Words x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16)); }
INLINE Words odd_of(Words x) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32((int32_t)0xffff0000)));
}

#if LANES == 8
INLINE Lanes even_lanes(Lanes x) { return even_of(x); }
INLINE Lanes odd_lanes(Lanes x) { return odd_of(x); }
#endif

// Exchange rows and columns of 8 x 8 words.
INLINE void exchange(Words x[8]) {
    Words y[8], z[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        z[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
        z[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
        z[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
        z[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2f128_ps(z[i], z[i + 4], 0x20);
        x[i + 4] = _mm256_permute2f128_ps(z[i], z[i + 4], 0x31);
    }
}

#endif

INLINE float first_lane(Lanes x) {
    float numbers[LANES];
    store(numbers, x);
    return numbers[0];
}

// 2^x of x <= 0, to 1 unit in the last place; 0 below 2^-126 (of -inf too), NaN of NaN, and exactly 1 of 0. The
// polynomial has the least greatest relative error in [-1/2, 1/2] (found with Lawson's iteration).
INLINE Lanes exp2_of(Lanes x) {
    x = greater(all(-127), x);
    Lanes whole = nearest(x), rest = subtract(x, whole);
    Lanes y = all(0.00015353362f);
    y = fma_of(y, rest, all(0.0013398874f));
    y = fma_of(y, rest, all(0.009618437f));
    y = fma_of(y, rest, all(0.055503324f));
    y = fma_of(y, rest, all(0.24022648f));
    y = fma_of(y, rest, all(0.6931472f));
    y = fma_of(y, rest, all(1));
    return times(y, power_of_two(whole));
}
