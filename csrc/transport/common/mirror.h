/* mirror.h - a mirrored ring: a circular buffer whose memory is mapped twice, end to end. Up to `cap` bytes
 * are contiguous at any offset. So messages need no skip records, and are read and written in place. For one
 * thread. */
#ifndef SP_MIRROR_H
#define SP_MIRROR_H

#include "spccl.h"

#include <stdbool.h>

typedef struct sp_mirror {
    uint8_t *data;        /* cap bytes, mapped at [0, cap) and [cap, 2 cap); untouched pages cost nothing */
    size_t cap, at, used; /* [at, at + used) is filled; at < cap */
    bool held;            /* a caller writes to the free part: it must not move */
} sp_mirror;

/* Allocate a capacity of `bytes`, rounded up to pages. Errors: NOMEM. */
spccl_status sp_mirror_open(sp_mirror *m, size_t bytes);
/* Accepts a zeroed ring. */
void sp_mirror_close(sp_mirror *m);

static inline size_t sp_mirror_space(const sp_mirror *m)
{
    return m->cap - m->used;
}
static inline uint8_t *sp_mirror_first(const sp_mirror *m)
{
    return m->data + m->at;
}
/* Start of the free part, which has sp_mirror_space bytes. */
static inline uint8_t *sp_mirror_free(const sp_mirror *m)
{
    return m->data + m->at + m->used;
}
/* Drop the first n bytes. An empty ring starts again at offset 0, so that few pages and cache lines are
 * touched while the other side keeps up. */
static inline void sp_mirror_drop(sp_mirror *m, size_t n)
{
    m->used -= n;
    m->at += n;
    if (m->at >= m->cap)
        m->at -= m->cap;
    if (m->used == 0 && !m->held)
        m->at = 0;
}

#endif
