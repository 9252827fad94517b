/* clock.h - monotonic time in ns, and deadlines. */
#ifndef SP_CLOCK_H
#define SP_CLOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

/* A deadline is an absolute monotonic time in ns. SP_NEVER is a deadline that never passes. */
#define SP_NEVER INT64_MAX

static inline int64_t sp_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
static inline int64_t sp_deadline_after_ms(int64_t now_ns, int64_t ms)
{
    return ms < 0 || ms > INT64_MAX / 2000000 ? SP_NEVER : now_ns + ms * 1000000;
}
static inline int64_t sp_deadline_in_ms(int64_t ms)
{
    return sp_deadline_after_ms(sp_now_ns(), ms);
}
static inline bool sp_deadline_passed(int64_t deadline_ns)
{
    return deadline_ns != SP_NEVER && sp_now_ns() >= deadline_ns;
}
/* Milliseconds left, rounded up, in [0, cap_ms]: the time-out argument of poll and epoll_wait. */
static inline int sp_deadline_left_ms(int64_t deadline_ns, int cap_ms)
{
    int64_t left;
    if (deadline_ns == SP_NEVER)
        return cap_ms;
    left = deadline_ns - sp_now_ns();
    if (left <= 0)
        return 0;
    left = (left + 999999) / 1000000;
    return left > cap_ms ? cap_ms : (int)left;
}

#endif
