// How a thread rounds: to the nearest, with denormals, whatever the rest of the process has chosen.
#pragma once
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define DEFAULT_MXCSR 0x1f80u
static inline uint32_t enter(void) {
    uint32_t before = _mm_getcsr();
    _mm_setcsr(DEFAULT_MXCSR);
    return before;
}
static inline void leave(uint32_t before) { _mm_setcsr(before); }
static inline void pause_briefly(void) { _mm_pause(); }
#endif
