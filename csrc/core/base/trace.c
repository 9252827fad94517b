/* trace.c - see trace.h. */
#include "core/base/trace.h"

#include "core/base/log.h"

sp_trace_event *sp_trace_add(sp_trace *trace, uint32_t seq, const char *what, const char *coll,
                             uint64_t n_elems)
{
    sp_trace_event *e = &trace->events[trace->n++ % SP_TRACE_EVENTS];
    e->time_ns = sp_now_ns();
    e->seq = seq;
    e->what = what;
    e->coll = coll;
    e->n_elems = n_elems;
    e->describe = NULL;
    return e;
}

void sp_trace_dump(const sp_trace *trace, int rank)
{
    int64_t now = sp_now_ns();
    uint64_t first = trace->n > SP_TRACE_EVENTS ? trace->n - SP_TRACE_EVENTS : 0;
    if (!sp_log_on(SP_LOG_INFO))
        return;
    for (uint64_t i = first; i < trace->n; i++) {
        const sp_trace_event *e = &trace->events[i % SP_TRACE_EVENTS];
        char text[SP_TRACE_TEXT_CAP] = "";
        if (e->describe != NULL)
            e->describe(e, text, sizeof text);
        sp_log(SP_LOG_INFO, rank, "trace: %9.3f ms ago  #%u %s of %llu elements: %s%s",
               (double)(now - e->time_ns) * 1e-6, e->seq, e->coll, (unsigned long long)e->n_elems, e->what,
               text);
    }
}
