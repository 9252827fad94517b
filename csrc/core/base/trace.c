/* trace.c - see trace.h. */
#include "core/base/trace.h"

#include "core/base/log.h"

spccl_status sp_trace_init(sp_trace *trace, uint32_t cap)
{
    *trace = (sp_trace){0};
    if (cap == 0)
        return SPCCL_OK;
    trace->events = sp_calloc(cap, sizeof *trace->events);
    if (trace->events == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "trace of %u events", cap);
    trace->cap = cap;
    return SPCCL_OK;
}

void sp_trace_fini(sp_trace *trace)
{
    sp_free(trace->events);
    *trace = (sp_trace){0};
}

sp_trace_event *sp_trace_add(sp_trace *trace, uint32_t seq, const char *what, const char *coll,
                             uint64_t n_elems)
{
    sp_trace_event *e;
    if (trace->cap == 0)
        return NULL;
    e = &trace->events[trace->n++ % trace->cap];
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
    uint64_t first = trace->n > trace->cap ? trace->n - trace->cap : 0;
    if (!sp_log_on(SP_LOG_INFO))
        return;
    for (uint64_t i = first; i < trace->n; i++) {
        const sp_trace_event *e = &trace->events[i % trace->cap];
        char text[SP_TRACE_TEXT_CAP] = "";
        if (e->describe != NULL)
            e->describe(e, text, sizeof text);
        sp_log(SP_LOG_INFO, rank, "trace: %9.3f ms ago  #%u %s of %llu elements: %s%s",
               (double)(now - e->time_ns) * 1e-6, e->seq, e->coll, (unsigned long long)e->n_elems, e->what,
               text);
    }
}
