/* log.c - see log.h. One fwrite writes a whole line, so lines of several ranks do not mix. */
#include "core/base/log.h"

#include "core/base/clock.h"
#include "core/base/env.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static atomic_int threshold = -1;

static const char *const level_names[] = {"off", "error", "warn", "info", "debug"};

int sp_log_on(sp_log_level level)
{
    int t = atomic_load_explicit(&threshold, memory_order_relaxed);
    if (t < 0) {
        const char *text = sp_env_text(SP_ENV_LOG);
        int first = -1;
        for (int i = SP_LOG_OFF; i <= SP_LOG_DEBUG; i++)
            if (strcmp(text, level_names[i]) == 0)
                t = i;
        if (t < 0) {
            t = SP_LOG_WARN;
            if (atomic_compare_exchange_strong(&threshold, &first, t))
                fprintf(stderr, "spccl error: SPCCL_LOG=\"%s\": wanted %s; it is taken as warn\n", text,
                        sp_env_describe(SP_ENV_LOG)->choices);
        }
        atomic_store_explicit(&threshold, t, memory_order_relaxed);
    }
    return (int)level <= t;
}

void sp_log(sp_log_level level, int rank, const char *fmt, ...)
{
    char line[1200];
    va_list ap;
    int n;
    size_t used;
    if (!sp_log_on(level))
        return;
    n = rank >= 0 ? snprintf(line, sizeof line, "spccl[%d] %s: ", rank, level_names[level])
                  : snprintf(line, sizeof line, "spccl %s: ", level_names[level]);
    used = n > 0 ? (size_t)n : 0;
    va_start(ap, fmt);
    n = vsnprintf(line + used, sizeof line - used - 1, fmt, ap);
    va_end(ap);
    used += n > 0 ? (size_t)n : 0;
    if (used > sizeof line - 2)
        used = sizeof line - 2;
    line[used++] = '\n';
    fwrite(line, 1, used, stderr);
}
