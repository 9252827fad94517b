/* channel_memories.c - one-sided channels: memories of the caller that the ranks add to a set. See channels.h.
 *
 * As in channels.c all ranks exchange what they were called with, decide the same, and agree after each step that can
 * fail. A peer uses a memory only once all ranks have agreed that all have it. */
#include "core/gpu/channels/channels.h"

#include <inttypes.h>
#include <stdio.h>

#define CALL "spccl_channels_add_memory"
#define MAGIC (0x4e435053u + SPCCL_CHANNEL_LAYOUT) /* "SPCN" */

/* What each rank tells the others. */
struct facts {
    uint32_t magic, number; /* the memory's */
    uint64_t bytes;
    int32_t status; /* not SPCCL_OK: its call was wrong; `error` is the reason */
    uint32_t set;   /* its number */
    uint8_t address[SP_GPU_SHARE_ADDRESS_BYTES];
    char error[428];
};
_Static_assert(sizeof(struct facts) == 512, "no padding, and the same for every compiler");

struct addition {
    spccl_channels *c;
    sp_gpu_share *share; /* of memory channels */
    sp_channels_memory made;
    struct facts mine, all[SP_GPU_RANKS_MAX];
    sp_channels_deadlines deadlines;
    bool compared; /* all ranks called it in the same way */
};

/* The memory's addresses. */
static spccl_status take(struct addition *n, void *memory)
{
    const sp_gpu_comm *g = n->c->g;
    void *device = memory;
    spccl_status st;
    int before;
    SP_TRY(g->ops->enter(g->device.ordinal, &before));
    if (n->c->kind == SPCCL_CHANNEL_MEMORY) {
        st = g->ops->memory_borrow(g->device.ordinal, memory, (size_t)n->made.bytes, &n->made.own);
    } else {
        st = g->ops->pinned_find(memory, (size_t)n->made.bytes, &device);
        n->made.host = memory;
    }
    g->ops->leave(before);
    n->made.device = device;
    return st;
}

static spccl_status read_call(struct addition *n, void *memory, bool has_out)
{
    spccl_channels *c = n->c;
    uint64_t bytes = n->mine.bytes;
    if (!has_out)
        return SP_FAIL(SPCCL_ERR_ARG, "number is NULL");
    if (c->n_memories == SP_CHANNELS_MEMORIES_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "the set has %u memories, the most that a set can have", c->n_memories);
    if (memory == NULL || (uintptr_t)memory % 16 != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "memory is %p, wanted an address that is a multiple of 16", memory);
    if (bytes == 0 || bytes % 16 != 0 || bytes > SP_CHANNELS_WINDOW_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "bytes is %" PRIu64 ", wanted a multiple of 16, 16 to 2^40", bytes);
    n->made.bytes = bytes;
    SP_TRY(take(n, memory));
    if (c->kind == SPCCL_CHANNEL_PORT)
        return SPCCL_OK;
    return sp_gpu_share_begin(c->g, CALL, "a memory of channels", n->deadlines.step_ns, &n->share,
                              n->mine.address);
}

/* Errors: those of a rank whose call was wrong; MISMATCH. All ranks come to the same result. */
static spccl_status compare(const struct addition *n)
{
    const spccl_comm *comm = n->c->g->comm;
    const struct facts *first = &n->all[0];
    for (int r = 0; r < comm->world_size; r++) {
        const struct facts *f = &n->all[r];
        if (f->magic != MAGIC)
            return SP_FAIL(SPCCL_ERR_MISMATCH,
                           "group \"%s\": rank %d did not call " CALL ", or has another version of spccl",
                           comm->name, r);
        if (f->status != SPCCL_OK)
            return SP_FAIL((spccl_status)f->status, "rank %d: " CALL ": %.*s", r, (int)sizeof f->error - 1,
                           f->error);
        if (f->bytes != first->bytes || f->number != first->number || f->set != first->set)
            return SP_FAIL(SPCCL_ERR_MISMATCH,
                           "group \"%s\": rank %d called " CALL " with %" PRIu64
                           " bytes, for memory %u of set %u; rank 0 with %" PRIu64
                           ", for memory %u of set %u: all ranks must give the same",
                           comm->name, r, f->bytes, f->number, f->set, first->bytes, first->number,
                           first->set);
    }
    return SPCCL_OK;
}

static spccl_status run(struct addition *n, void *memory, bool has_out)
{
    spccl_comm *comm = n->c->g->comm;
    spccl_status st = read_call(n, memory, has_out);
    n->mine.status = (int32_t)st;
    if (st != SPCCL_OK)
        snprintf(n->mine.error, sizeof n->mine.error, "%s", spccl_last_error());
    SP_TRY(sp_comm_all_gather(comm, &n->mine, n->all, sizeof n->mine,
                              (sp_time_limit){.deadline_ns = n->deadlines.call_ns}, NULL));
    SP_TRY(compare(n));
    n->compared = true;
    if (n->c->kind == SPCCL_CHANNEL_MEMORY) {
        st = sp_gpu_share_exchange(n->share, n->made.own, (size_t)n->made.bytes, n->all[0].address,
                                   sizeof n->all[0], n->made.peers);
        sp_gpu_share_close(
            n->share); /* before the ranks agree, so that no peer waits for a rank that failed */
        n->share = NULL;
    }
    /* Before any rank may send to it: */
    n->c->memories[n->mine.number] = n->made;
    __atomic_store_n(&n->c->n_memories, n->mine.number + 1, __ATOMIC_RELEASE);
    st = sp_gpu_agree_by(comm, st, n->deadlines.call_ns);
    if (st != SPCCL_OK) {
        __atomic_store_n(&n->c->n_memories, n->mine.number, __ATOMIC_RELEASE);
        n->c->memories[n->mine.number] = (sp_channels_memory){.bytes = 0};
    }
    return st;
}

/* All ranks unmap the memory before any of them returns to its caller, who may free it. */
static void end_failed(struct addition *n)
{
    const sp_gpu_comm *g = n->c->g;
    int before;
    sp_gpu_share_close(n->share);
    if (g->ops->enter(g->device.ordinal, &before) == SPCCL_OK) {
        sp_channels_drop_memory(g, &n->made);
        g->ops->leave(before);
    }
    if (n->compared && sp_comm_broken(g->comm) == SPCCL_OK)
        (void)sp_gpu_agree_by(g->comm, SPCCL_OK, n->deadlines.call_ns);
}

spccl_status spccl_channels_add_memory(spccl_channels *c, void *memory, uint64_t bytes, uint32_t *number)
{
    struct addition n = {.c = c, .mine = {.magic = MAGIC, .bytes = bytes}};
    char text[1024];
    spccl_status st;
    if (c == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, CALL ": channels is NULL");
    SP_TRY(sp_comm_check(c->g->comm, CALL));
    n.mine.number = c->n_memories;
    n.mine.set = c->number;
    n.deadlines = sp_channels_find_deadlines(c->g->comm);
    st = run(&n, memory, number != NULL);
    if (st == SPCCL_OK) {
        *number = n.mine.number;
        return SPCCL_OK;
    }
    snprintf(text, sizeof text, "%s", spccl_last_error());
    end_failed(&n);
    sp_set_error(text); /* freeing may have overwritten it */
    return st;
}
