/* cores.c - see cores.h. */
#include "core/base/cores.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

uint32_t sp_cores_of_cpu_max(const char *text)
{
    char *end;
    unsigned long long quota = strtoull(text, &end, 10), period;
    if (end == text || *end != ' ')
        return 0;
    period = strtoull(end, NULL, 10);
    return period == 0 || quota / period > 100000 ? 0 : (uint32_t)((quota + period - 1) / period);
}

/* Of a container's own cgroup (version 2). */
static uint32_t cgroup_cores(void)
{
    char text[64] = "";
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (f == NULL)
        return 0;
    if (fgets(text, sizeof text, f) == NULL)
        text[0] = '\0';
    (void)fclose(f);
    return sp_cores_of_cpu_max(text);
}

uint32_t sp_usable_cores(void)
{
    cpu_set_t set;
    uint32_t limit = cgroup_cores(), n = 0;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        n = (uint32_t)CPU_COUNT(&set);
    else if (sysconf(_SC_NPROCESSORS_ONLN) > 0) /* more than 1024 cores */
        n = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    n = limit != 0 && limit < n ? limit : n;
    return n != 0 ? n : 1;
}
