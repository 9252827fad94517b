/* mirror.h - a ring of bytes whose memory is mapped twice, end to end: any run of up to `cap` bytes is
 * contiguous, whatever its place, so messages need no skip records and are used in place. One thread. */
#ifndef SP_MIRROR_H
#define SP_MIRROR_H

#include "spccl.h"

#include <stdbool.h>

typedef struct sp_mirror {
    uint8_t *data;        /* 2 * cap bytes of addresses, cap bytes of memory; untouched pages cost nothing */
    size_t cap, at, used; /* [at, at + used) is filled; at < cap */
    bool held;            /* somebody has a pointer into the free part: it must not move */
} sp_mirror;

/* Room for at least `bytes`, rounded up to pages. Errors: NOMEM. */
spccl_status sp_mirror_open(sp_mirror *m, size_t bytes);
/* Accepts a zeroed one. */
void sp_mirror_close(sp_mirror *m);

static inline size_t sp_mirror_space(const sp_mirror *m)
{
    return m->cap - m->used;
}
static inline uint8_t *sp_mirror_first(const sp_mirror *m)
{
    return m->data + m->at;
}
/* Start of the free part: sp_mirror_space bytes. */
static inline uint8_t *sp_mirror_free(const sp_mirror *m)
{
    return m->data + m->at + m->used;
}
/* Forget the first n bytes. A drained ring starts again at its beginning: the pages and cache lines touched
 * stay few while the other side keeps up. */
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
