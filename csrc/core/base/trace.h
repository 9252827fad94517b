/* trace.h - a fixed buffer with the last events of one communicator. They are logged when the communicator breaks. */
#ifndef SP_TRACE_H
#define SP_TRACE_H

#include "core/base/clock.h"

#include <stddef.h>
#include <stdint.h>

#define SP_TRACE_EVENTS 64
#define SP_TRACE_VALUES 12
#define SP_TRACE_TEXT_CAP 300

typedef struct sp_trace_event sp_trace_event;
struct sp_trace_event {
    int64_t time_ns;
    uint32_t seq;     /* of the collective */
    const char *what; /* static text: "issued", "first slice", "done" */
    const char *coll; /* static text */
    uint64_t n_elems;
    /* Writes more text, from `values`, when the event is printed. NULL: there is none. */
    void (*describe)(const sp_trace_event *e, char *text, size_t cap);
    double values[SP_TRACE_VALUES];
};

/* Starts zeroed. */
typedef struct sp_trace {
    sp_trace_event events[SP_TRACE_EVENTS]; /* the last ones; event i is events[i % SP_TRACE_EVENTS] */
    uint64_t n;                             /* events recorded so far */
} sp_trace;

/* Returns the event, for `describe` and `values`. Valid until the next event. */
sp_trace_event *sp_trace_add(sp_trace *trace, uint32_t seq, const char *what, const char *coll,
                             uint64_t n_elems);
/* Log the events that are kept, oldest first, one line of level "info" each. */
void sp_trace_dump(const sp_trace *trace, int rank);

#endif
