/* cores.h - how many CPU cores this process may use. */
#ifndef SP_CORES_H
#define SP_CORES_H

#include <stdint.h>

/* The cores of the thread's affinity mask, or fewer where the cgroup limits CPU time (cpu.max). At least 1. */
uint32_t sp_usable_cores(void);
/* The limit of a cpu.max text ("400000 100000", "max 100000"), in whole cores, rounded up; 0: none, or not such a
 * text. */
uint32_t sp_cores_of_cpu_max(const char *text);

#endif
