/* cpu_feature.h - which instruction sets this CPU and this OS can run. */
#ifndef SP_CPU_FEATURE_H
#define SP_CPU_FEATURE_H

/* Both functions return NULL if kernels of that set can run here, else one line that says what is missing.
 * Any thread may call them. */

/* Needs avx2, bmi1, bmi2, popcnt, lzcnt, f16c, and an OS that saves the ymm registers. */
const char *sp_cpu_lacks_avx2(void);
/* Needs all that the AVX2 kernels need, avx512 f/bw/dq/vl/vbmi/vbmi2, and an OS that saves the zmm registers.
 */
const char *sp_cpu_lacks_avx512(void);

#endif
