/* cpu_feature.h - what this CPU and this OS can run; asked once. Knows nothing of kernels. */
#ifndef SP_CPU_FEATURE_H
#define SP_CPU_FEATURE_H

/* NULL when kernels of that set can run here, else one line that says what is missing. Threads: any. */
const char *sp_cpu_lacks_avx2(void); /* avx2, bmi1, bmi2, popcnt, lzcnt, f16c, and ymm state kept by the OS */
const char *
sp_cpu_lacks_avx512(void); /* the above, avx512 f/bw/dq/vl/vbmi/vbmi2, and zmm state kept by the OS */

#endif
