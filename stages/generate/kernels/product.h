// Small matrix products for attention, and how keys and values get into the form that they want.
#pragma once
#include "kernels.h"
#include "lanes.h"
#include <stddef.h>
#include <string.h>

#ifdef __AVX512BF16__
#define PAIRS 1
#else
#define PAIRS 0
#endif

// Rows of one block, so that their sums stay in registers.
#define BLOCK_ROWS 6

typedef enum {
    SUM_FLOAT32 = 0, // c = c * scale + a b, b is of this format
    SUM_BFLOAT16 = 1,
    SUM_FLOAT16 = 2,
    SCORE_FLOATS, // c = a b, *b_group* bytes from KEY_GROUP columns to the next
    SCORE_HALVES,
    SCORE_WORDS, // of two bfloat16, which are multiplied one after the other
    SCORE_PAIRS, // the same at once
} Kind;

INLINE int64_t size_of_kind(const int kind) {
    return kind == SUM_BFLOAT16 || kind == SUM_FLOAT16 || kind == SCORE_HALVES ? 2 : 4;
}

// The registers of columns from number i on.
INLINE const char *columns_at(const int kind, const char *b, int64_t b_group, int64_t i) {
    const int64_t size = size_of_kind(kind);
    if (kind < SCORE_FLOATS) return b + i * LANES * size;
    return b + i * LANES / KEY_GROUP * b_group + i * LANES % KEY_GROUP * size;
}

INLINE Lanes load_columns(const int kind, const void *from) {
    return kind == SUM_BFLOAT16                          ? load_bfloat16(from)
           : kind == SUM_FLOAT16 || kind == SCORE_HALVES ? load_float16(from)
                                                         : load(from);
}

INLINE Lanes multiply_add(const int kind, const float *a, Lanes b, Lanes c) {
#if PAIRS
    if (kind == SCORE_PAIRS) {
        int32_t pair;
        memcpy(&pair, a, 4);
        return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
    }
#endif
    (void)kind;
    return fma_of(all(*a), b, c);
}

// One block: constant *rows* and *columns* (registers), so that compilers keep all sums in registers.
INLINE void block(const int kind, const int rows, const int columns, const float *a, int64_t a_stride, const char *b,
                  int64_t b_stride, int64_t b_group, int64_t depth, const float *scales, float *c, int64_t c_stride) {
    Lanes sums[BLOCK_ROWS][8];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < columns; i++)
            sums[r][i] = kind >= SCORE_FLOATS ? all(0) : times(load(c + r * c_stride + i * LANES), all(scales[r]));
    const int words = kind == SCORE_WORDS ? 2 : 1;
    for (int64_t k = 0; k < depth; k++, b += b_stride * size_of_kind(kind))
#pragma GCC unroll 2
        for (int word = 0; word < words; word++) {
            Lanes line[8];
#pragma GCC unroll 8
            for (int i = 0; i < columns; i++) {
                line[i] = load_columns(kind, columns_at(kind, b, b_group, i));
                if (kind == SCORE_WORDS) line[i] = word ? odd_lanes(line[i]) : even_lanes(line[i]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int i = 0; i < columns; i++)
                    sums[r][i] = multiply_add(kind, a + r * a_stride + k * words + word, line[i], sums[r][i]);
        }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < columns; i++)
            store(c + r * c_stride + i * LANES, sums[r][i]);
}

// As many registers of columns as fit beside each other, then the rest.
#define BLOCK(columns) \
    block(kind, rows, columns, a, a_stride, columns_at(kind, b, b_group, i), b_stride, b_group, depth, scales, \
          c + i * LANES, c_stride)
INLINE void blocks(const int kind, const int rows, const int columns, int64_t vectors, const float *a, int64_t a_stride,
                   const void *b, int64_t b_stride, int64_t b_group, int64_t depth, const float *scales, float *c,
                   int64_t c_stride) {
    int64_t i = 0;
    for (; i + columns <= vectors; i += columns) BLOCK(columns);
    for (; columns > 4 && kind >= SCORE_FLOATS && i + 4 <= vectors; i += 4) BLOCK(4);
    for (; columns > 2 && i + 2 <= vectors; i += 2) BLOCK(2);
    for (; i < vectors; i++) BLOCK(1);
}

#define ROWS(kind, rows, columns)                                                                                     \
    case rows:                                                                                                        \
        blocks(kind, rows, columns, vectors, a, a_stride, b, b_stride, b_group, depth, scales, c, c_stride);          \
        break;

#if LANES == 16
#define ALL_ROWS(kind)                                                                                                \
    ROWS(kind, 1, 8) ROWS(kind, 2, 8) ROWS(kind, 3, 4) ROWS(kind, 4, 4) ROWS(kind, 5, 4) ROWS(kind, 6, 4)
#elif defined(__aarch64__) // which cannot multiply with numbers in memory, so it needs registers for b, too
#define ALL_ROWS(kind)                                                                                                \
    ROWS(kind, 1, 4) ROWS(kind, 2, 4) ROWS(kind, 3, 2) ROWS(kind, 4, 2) ROWS(kind, 5, 2) ROWS(kind, 6, 2)
#else
#define ALL_ROWS(kind)                                                                                                \
    ROWS(kind, 1, 8) ROWS(kind, 2, 4) ROWS(kind, 3, 4) ROWS(kind, 4, 2) ROWS(kind, 5, 2) ROWS(kind, 6, 2)
#endif

#define PRODUCT(name, kind)                                                                                           \
    static void name(int64_t rows, int64_t vectors, const float *a, int64_t a_stride, const void *b, int64_t b_stride, \
                     int64_t b_group, int64_t depth, const float *scales, float *c, int64_t c_stride) {               \
        switch (rows) { ALL_ROWS(kind) }                                                                              \
    }

PRODUCT(sum_float32, SUM_FLOAT32)
PRODUCT(sum_bfloat16, SUM_BFLOAT16)
PRODUCT(sum_float16, SUM_FLOAT16)
PRODUCT(score_floats, SCORE_FLOATS)
PRODUCT(score_halves, SCORE_HALVES)
PRODUCT(score_words, SCORE_WORDS)
PRODUCT(score_pairs, SCORE_PAIRS)

// c of 1 to BLOCK_ROWS rows and any number of registers of columns. Each number is one FMA chain over the depth.
INLINE void product(int kind, int64_t rows, int64_t vectors, const float *a, int64_t a_stride, const void *b,
                    int64_t b_stride, int64_t b_group, int64_t depth, const float *scales, float *c, int64_t c_stride) {
    static void (*const kinds[])(int64_t, int64_t, const float *, int64_t, const void *, int64_t, int64_t, int64_t,
                                 const float *, float *, int64_t) = {
        sum_float32, sum_bfloat16, sum_float16, score_floats, score_halves, score_words, score_pairs};
    kinds[kind](rows, vectors, a, a_stride, b, b_stride, b_group, depth, scales, c, c_stride);
}

// ---- the forms of queries, keys and values

// Round floats to bfloat16, in place.
INLINE void round_to_pairs(float *x, int64_t count) {
#if PAIRS
    for (int64_t i = 0; i < count; i += 16)
        _mm256_storeu_si256((__m256i *)((char *)x + 2 * i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i)));
#else
    (void)x, (void)count;
#endif
}

INLINE Lanes load_as(const Format format, const void *source) {
    return format == BFLOAT16  ? load_bfloat16(source)
           : format == FLOAT16 ? load_float16(source)
                               : load(source);
}

// Expand *count* numbers to floats, with zeros up to a multiple of LANES.
INLINE void expand(const Format format, const char *source, int64_t count, float *target) {
    const int64_t size = format == FLOAT32 ? 4 : 2;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store(target + i, load_as(format, source + i * size));
    if (i < count) {
        char last[LANES * 4] = {0};
        memcpy(last, source + i * size, (size_t)((count - i) * size));
        store(target + i, load_as(format, last));
    }
}

// 32 bytes of 8 keys become 8 columns of 8 words, or 16 of bfloat16 that are expanded.
INLINE void turn_words(const Format format, const char *const keys[8], int64_t offset, int64_t columns, float *target,
                       int64_t stride) {
    Words x[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        x[i] = format == FLOAT16 ? load_halves(keys[i] + offset) : load_words(keys[i] + offset);
    exchange(x);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        if (i >= columns)
            break;
        if (format == BFLOAT16 && !PAIRS) {
            store_words(target + 2 * i * stride, even_of(x[i]));
            store_words(target + (2 * i + 1) * stride, odd_of(x[i]));
        } else {
            store_words(target + i * stride, x[i]);
        }
    }
}

// Turn 8 keys into columns of 8: floats, or pairs of bfloat16 where the CPU multiplies them.
INLINE void turn(const Format format, const char *const keys[8], int64_t head_dim, float *target, int64_t stride) {
    const int64_t bytes = format == FLOAT16 ? 16 : 32, size = format == FLOAT32 ? 4 : 2;
    const int64_t columns_each = format == BFLOAT16 && !PAIRS ? 2 : 1;
    const int64_t words = format == BFLOAT16 ? head_dim / 2 : head_dim;
    int64_t word = 0;
    for (; word + 8 <= words; word += 8)
        turn_words(format, keys, word / 8 * bytes, 8, target + word * columns_each * stride, stride);
    if (word == words)
        return;
    char last[8][32] = {{0}};
    const char *lasts[8];
    for (int i = 0; i < 8; i++) {
        memcpy(last[i], keys[i] + word / 8 * bytes, (size_t)(head_dim * size - word / 8 * bytes));
        lasts[i] = last[i];
    }
    turn_words(format, lasts, 0, words - word, target + word * columns_each * stride, stride);
}
