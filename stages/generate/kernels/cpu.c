// What this library is, and which of its variants this CPU runs. Compiled without any of their instructions, because it
// runs before anything is known of the CPU.
#include "kernels.h"

#include <string.h>

#define EXPORT __attribute__((visibility("default")))

// build.py finds these words in the file, without loading it.
EXPORT const char kernels_origin[] = "minisgl kernels, sources " SOURCES ", by " COMPILER;

#if defined(__clang__)
EXPORT const char kernels_compiler[] = COMPILER " (" __VERSION__ ")";
#else
EXPORT const char kernels_compiler[] = COMPILER " (gcc " __VERSION__ ")";
#endif

static const Variant *const compiled[] = {
#if HAS_AVX512
    &variant_avx512,
#endif
#if HAS_AVX512VNNI
    &variant_avx512vnni,
#endif
#if HAS_AVX512F
    &variant_avx512f,
#endif
#if HAS_AVX2
    &variant_avx2,
#endif
#if HAS_NEON
    &variant_neon,
#endif
    NULL,
};

// The variant of this name, NULL: this library was compiled without it.
EXPORT const Variant *kernels_variant(const char *name) {
    for (const Variant *const *variant = compiled; *variant; variant++)
        if (!strcmp((*variant)->name, name)) return *variant;
    return NULL;
}

#if defined(__x86_64__)
#include <cpuid.h>

// cpuid, leaf 1, ecx
#define FMA (1u << 12)
#define OSXSAVE (1u << 27)
#define F16C (1u << 29)
// leaf 7, ebx and ecx; leaf 7.1, eax
#define AVX2 (1u << 5)
#define AVX512 (1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) // F, DQ, BW, VL
#define AVX512_VNNI (1u << 11)
#define AVX512_BF16 (1u << 5)
// Registers that the operating system saves: XMM and YMM; opmasks and both halves of ZMM, too
#define SAVES_AVX 0x06u
#define SAVES_AVX512 0xe6u

static int has(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

// "Auth", of AuthenticAMD: ebx of leaf 0
#define AMD 0x68747541u

// The names of the variants that this CPU runs, best first, with spaces between them. The order follows from the CPU alone,
// never from a measurement: two engines on equal machines must choose the same, or a request that moves changes its tokens.
// AMD (Zen 4 and later) multiplies pairs of bfloat16 at twice the rate of floats, Intel at half of it.
EXPORT const char *cpu_variants(void) {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !has(ecx, FMA | OSXSAVE | F16C)) return "";
    unsigned saved, high;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!has(saved, SAVES_AVX) || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !has(ebx, AVX2)) return "";
    if (!has(saved, SAVES_AVX512) || !has(ebx, AVX512)) return "avx2";
    if (!has(ecx, AVX512_VNNI)) return "avx512f avx2"; // Skylake
    // eax of leaf 7 is the last one of its sub-leaves.
    if (eax < 1 || !__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !has(eax, AVX512_BF16))
        return "avx512vnni avx512f avx2"; // Cascade Lake, Ice Lake
    __get_cpuid(0, &eax, &ebx, &ecx, &edx);
    return ebx == AMD ? "avx512 avx512vnni avx512f avx2" : "avx512vnni avx512 avx512f avx2";
}
#elif defined(__aarch64__)
EXPORT const char *cpu_variants(void) { return "neon"; } // every such CPU
#endif
