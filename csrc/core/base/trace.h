/* trace.h - the last events of one communicator in a fixed buffer, printed when it breaks. Base of the map.
 */
#ifndef SP_TRACE_H
#define SP_TRACE_H

#include "core/base/clock.h"
#include "core/base/mem.h"

typedef struct sp_trace_event {
    int64_t time_ns;
    uint32_t seq;     /* of the collective */
    const char *what; /* static text: "issued", "first slice", "done" */
    const char *coll; /* static text */
    uint64_t n_elems;
} sp_trace_event;

typedef struct sp_trace {
    sp_trace_event *events;
    uint32_t cap;
    uint64_t n; /* ever recorded */
} sp_trace;

/* Room for `cap` events; 0 turns it off. */
spccl_status sp_trace_init(sp_trace *trace, uint32_t cap);
void sp_trace_fini(sp_trace *trace);
void sp_trace_add(sp_trace *trace, uint32_t seq, const char *what, const char *coll, uint64_t n_elems);
/* Print what is kept, oldest first, one warning line each. */
void sp_trace_dump(const sp_trace *trace, int rank);

#endif
