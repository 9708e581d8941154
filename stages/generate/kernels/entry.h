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
#elif defined(__aarch64__)
#define DEFAULT_FPCR 0
static inline void leave(uint32_t before) { __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)before) : "memory"); }
static inline uint32_t enter(void) {
    uint64_t before; // the upper half is reserved
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    leave(DEFAULT_FPCR);
    return (uint32_t)before;
}
// `yield` takes no time on most CPUs, this takes some dozens of cycles.
static inline void pause_briefly(void) { __asm__ volatile("isb" ::: "memory"); }
#endif
