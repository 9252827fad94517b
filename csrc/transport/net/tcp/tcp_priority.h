/* tcp_priority.h - which socket may send first, when messages of several collectives wait for the same wire.
 *
 * Each message belongs to a call: the number of its collective. Collectives finish in the order of their
 * calls. So bytes of a later call that take the wire from an earlier one only delay the earlier one. A socket
 * whose first waiting message belongs to a later call is therefore held: it does not send while a socket with
 * an earlier call has bytes that the kernel does not take.
 *
 * A peer that does not read can stop the earlier call for any time. So holding ends when no byte of the
 * earliest call has left for `hold_timeout_ns`. It begins again when such bytes leave.
 *
 * This file knows no sockets and no clock: the caller gives the time. */
#ifndef SP_TCP_PRIORITY_H
#define SP_TCP_PRIORITY_H

#include <stdbool.h>
#include <stdint.h>

typedef struct sp_tcp_priority {
    int64_t hold_timeout_ns;
    uint32_t n_waiting;  /* sockets with bytes that the kernel has not taken */
    uint32_t earliest;   /* the earliest call of their first messages; valid if n_waiting != 0 */
    uint32_t n_earliest; /* how many of them have it */
    int64_t moved_ns; /* when bytes of the earliest call last left, or when that call became the earliest */
} sp_tcp_priority;

/* True if call a is before call b. Numbers wrap around. */
static inline bool sp_tcp_call_before(uint32_t a, uint32_t b)
{
    return (int32_t)(a - b) < 0;
}

/* A socket has waiting bytes, and did not have any: the first belong to `call`. */
void sp_tcp_priority_begin(sp_tcp_priority *p, uint32_t call, int64_t now_ns);
/* Bytes of a socket left whose first waiting bytes belong to `call`. */
void sp_tcp_priority_moved(sp_tcp_priority *p, uint32_t call, int64_t now_ns);
/* A socket has no waiting bytes of `call` any more. Returns true if sockets still wait, but none with the
 * earliest call. The caller then calls sp_tcp_priority_forget, and sp_tcp_priority_begin for every socket that
 * waits. */
bool sp_tcp_priority_end(sp_tcp_priority *p, uint32_t call);
/* Forget all waiting sockets. */
void sp_tcp_priority_forget(sp_tcp_priority *p);
/* True if a socket whose first waiting bytes belong to `call` may send now. */
bool sp_tcp_priority_may_send(const sp_tcp_priority *p, uint32_t call, int64_t now_ns);

#endif
