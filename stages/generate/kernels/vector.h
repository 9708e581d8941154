// The widest vector of floats that this variant has, and what a line of a panel becomes in it.
#pragma once
#include "gemm.h"

#ifdef __aarch64__
#include "neon.h"
#else
#include <immintrin.h>
#endif

#if defined(__AVX512F__)

#define LANES 16
typedef __m512 Vector;
typedef __m512i Integers;

INLINE Vector load(const void *from) { return _mm512_loadu_ps(from); }
INLINE void store(void *to, Vector a) { _mm512_storeu_ps(to, a); }
INLINE Vector spread(float number) { return _mm512_set1_ps(number); }
INLINE Integers spread_word(const void *word) { return _mm512_set1_epi32(*(const int32_t *)word); }
INLINE Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
INLINE Vector multiplied(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
INLINE Vector from_halves(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256(from)); }
INLINE Vector from_even(const void *from) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(from), 16)); }
INLINE Vector from_odd(const void *from) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32((int)0xffff0000)));
}
INLINE Vector to_floats(Integers a) { return _mm512_cvtepi32_ps(a); }
INLINE Integers no_integers(void) { return _mm512_setzero_si512(); }

// Bytes of weights and of activations: 4 products of neighbours are added to each integer.
INLINE Vector from_signed(const void *from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from))); }
INLINE Vector from_unsigned(const void *from) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from))); }
INLINE Integers load_bytes(const void *from) { return _mm512_loadu_si512(from); }
INLINE Integers low_nibbles(Integers a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE Integers high_nibbles(Integers a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
INLINE Integers spread_integer(int32_t number) { return _mm512_set1_epi32(number); }
#ifdef __AVX512VNNI__
#define BYTES_ARE_UNSIGNED 1
INLINE Integers from_signed_bytes(Integers a) { return _mm512_xor_si512(a, _mm512_set1_epi8(-128)); }
#define ADD_FOUR(sum, weights, x) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x))
#define ADD_BYTES(sum, a, x, b, y) do { ADD_FOUR(sum, a, x); ADD_FOUR(sum, b, y); } while (0)
#define MULTIPLY_ADD_PAIRS(sum, a, b) __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))
#else
#define BYTES_ARE_UNSIGNED 0
INLINE Integers even_shorts(Integers a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
INLINE Integers odd_shorts(Integers a) { return _mm512_srai_epi16(a, 8); }
INLINE Integers with_halves(Integers sum, __m512i halves) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(halves, _mm512_set1_epi16(1)));
}
INLINE __m512i halves_of_two(Integers a, Integers x, Integers b, Integers y) {
    return _mm512_add_epi16(_mm512_maddubs_epi16(a, x), _mm512_maddubs_epi16(b, y));
}
#define MULTIPLY_ADD_PAIRS(sum, a, b) ((sum) = _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)))
#endif

#define MULTIPLY_ADD(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))

#elif defined(__AVX2__)

#define LANES 8
typedef __m256 Vector;
typedef __m256i Integers;

INLINE Vector load(const void *from) { return _mm256_loadu_ps(from); }
INLINE void store(void *to, Vector a) { _mm256_storeu_ps(to, a); }
INLINE Vector spread(float number) { return _mm256_set1_ps(number); }
INLINE Integers spread_word(const void *word) { return _mm256_set1_epi32(*(const int32_t *)word); }
INLINE Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
INLINE Vector multiplied(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
INLINE Vector from_halves(const void *from) { return _mm256_cvtph_ps(_mm_loadu_si128(from)); }
INLINE Vector from_even(const void *from) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(from), 16)); }
INLINE Vector from_odd(const void *from) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(from), _mm256_set1_epi32((int)0xffff0000)));
}
INLINE Vector to_floats(Integers a) { return _mm256_cvtepi32_ps(a); }
INLINE Integers no_integers(void) { return _mm256_setzero_si256(); }

// Bytes of weights and of activations. 4 products with weights up to 63 fit into 16 bits.
#define BYTES_ARE_UNSIGNED 0
INLINE Integers even_shorts(Integers a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
INLINE Integers odd_shorts(Integers a) { return _mm256_srai_epi16(a, 8); }
INLINE Vector from_signed(const void *from) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from))); }
INLINE Vector from_unsigned(const void *from) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from))); }
INLINE Integers load_bytes(const void *from) { return _mm256_loadu_si256(from); }
INLINE Integers low_nibbles(Integers a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
INLINE Integers high_nibbles(Integers a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
INLINE Integers spread_integer(int32_t number) { return _mm256_set1_epi32(number); }
INLINE Integers with_halves(Integers sum, __m256i halves) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(halves, _mm256_set1_epi16(1)));
}
INLINE __m256i halves_of_two(Integers a, Integers x, Integers b, Integers y) {
    return _mm256_add_epi16(_mm256_maddubs_epi16(a, x), _mm256_maddubs_epi16(b, y));
}
// Assembly, because gcc 12 picks forms of the instruction that need more registers than there are.
#define MULTIPLY_ADD(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b))
#define MULTIPLY_ADD_PAIRS(sum, a, b) \
    do { \
        __m256i products_ = _mm256_madd_epi16(a, b); \
        __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products_)); \
    } while (0)

#endif

#if BYTES_AS_SHORTS
#define ADD_BYTES(sum, a, x, b, y) ((sum) = with_halves(sum, halves_of_two(a, x, b, y)))
#endif

// Vectors of a panel.
#define VECTORS (PANEL / LANES)
