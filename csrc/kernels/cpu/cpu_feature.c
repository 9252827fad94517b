/* cpu_feature.c - asks CPUID and XGETBV once which instruction sets can run.
 * Bit numbers are from the Intel SDM: volume 2A (CPUID), and volume 1, section 13.3 (XCR0). */
#include "kernels/cpu/cpu_feature.h"

#include <stddef.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <pthread.h>
#include <stdint.h>

struct feature {
    const char *lack; /* text for a user whose CPU has the bit clear */
    uint32_t leaf;
    int reg; /* 0 eax, 1 ebx, 2 ecx, 3 edx */
    int bit;
};
static const struct feature avx2_features[] = {
    {"this CPU lacks avx", 1, 2, 28},
    {"this CPU lacks f16c", 1, 2, 29},
    {"this CPU lacks popcnt", 1, 2, 23},
    {"this CPU lacks bmi1", 7, 1, 3},
    {"this CPU lacks avx2", 7, 1, 5},
    {"this CPU lacks bmi2", 7, 1, 8},
    {"this CPU lacks lzcnt", 0x80000001u, 2, 5},
};
static const struct feature avx512_features[] = {
    {"this CPU lacks avx512f", 7, 1, 16},    {"this CPU lacks avx512dq", 7, 1, 17},
    {"this CPU lacks avx512bw", 7, 1, 30},   {"this CPU lacks avx512vl", 7, 1, 31},
    {"this CPU lacks avx512_vbmi", 7, 2, 1}, {"this CPU lacks avx512_vbmi2", 7, 2, 6},
};
#define XCR0_YMM 0x06u /* xmm and ymm */
#define XCR0_ZMM 0xe6u /* xmm, ymm, mask registers, and both halves of zmm */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const char *lacks_avx2, *lacks_avx512;

static const char *first_lack(const struct feature *f, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned r[4] = {0, 0, 0, 0};
        if (!__get_cpuid_count(f[i].leaf, 0, &r[0], &r[1], &r[2], &r[3]) || !(r[f[i].reg] >> f[i].bit & 1))
            return f[i].lack;
    }
    return NULL;
}

/* The register state that the OS saves, as bits of XCR0. 0 if the OS did not enable XSAVE (CPUID.1:ECX.27).
 */
static uint32_t os_state(void)
{
    unsigned eax, ebx, ecx, edx;
    uint32_t lo, hi;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx >> 27 & 1))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return lo;
}

static void detect(void)
{
    uint32_t state = os_state();
    lacks_avx2 = first_lack(avx2_features, sizeof avx2_features / sizeof avx2_features[0]);
    if (lacks_avx2 == NULL && (state & XCR0_YMM) != XCR0_YMM)
        lacks_avx2 = "the OS does not save ymm registers (XCR0)";
    lacks_avx512 = lacks_avx2 != NULL
                       ? lacks_avx2
                       : first_lack(avx512_features, sizeof avx512_features / sizeof avx512_features[0]);
    if (lacks_avx512 == NULL && (state & XCR0_ZMM) != XCR0_ZMM)
        lacks_avx512 = "the OS does not save zmm registers (XCR0)";
}

const char *sp_cpu_lacks_avx2(void)
{
    pthread_once(&once, detect);
    return lacks_avx2;
}
const char *sp_cpu_lacks_avx512(void)
{
    pthread_once(&once, detect);
    return lacks_avx512;
}

#else

const char *sp_cpu_lacks_avx2(void)
{
    return "not an x86-64 build";
}
const char *sp_cpu_lacks_avx512(void)
{
    return "not an x86-64 build";
}

#endif
