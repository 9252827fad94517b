/* channels.c - one-sided channels: create. See channels.h. channels_end.c frees them.
 *
 * Creation is as in gpu_attach.c: all ranks exchange what they were called with, decide the same, and after each step
 * that can fail they exchange their status. */
#include "core/gpu/channels/channel_port.h"

#include "core/base/abi.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"

#include <inttypes.h>
#include <stdio.h>

#define MAGIC (0x48435053u + SPCCL_CHANNEL_LAYOUT) /* "SPCH", and the version: proxies speak it too */
#define AGREE_MS 1000 /* of a creation's time, for the ranks to tell each other which step failed */

/* What each rank tells the others. */
struct facts {
    uint32_t magic, kind;
    uint64_t window_bytes;
    uint32_t n_per_peer, n_triggers;
    uint32_t has_window;
    int32_t status; /* not SPCCL_OK: its call was wrong; `error` is the reason */
    /* Of the memory with the counts, and of the caller's window. */
    uint8_t address[SP_GPU_SHARE_ADDRESS_BYTES], window_address[SP_GPU_SHARE_ADDRESS_BYTES];
    char error[360];
};
_Static_assert(sizeof(struct facts) == 512, "no padding, and the same for every compiler");

/* A creation under way. c: NULL if there was no memory for it; such a rank takes part in the first exchange only. */
struct creation {
    sp_gpu_comm *g;
    spccl_channels *c;
    /* Of memory channels; window_share: NULL if the library allocates windows. */
    sp_gpu_share *share, *window_share;
    void *window; /* the caller's; or NULL */
    struct facts mine, all[SP_GPU_RANKS_MAX];
    sp_channels_deadlines deadlines;
    bool agreed; /* all ranks have memory */
};

/* ---- creation: the call ---- */

static spccl_status check_config(const spccl_channels_config *config)
{
    if (config->layout != SPCCL_CHANNEL_LAYOUT)
        return SP_FAIL(
            SPCCL_ERR_VERSION,
            "config.layout is %u, this library has %u: compile the kernels with the headers of this "
            "library (spccl_channel.h, spccl_device.cuh)",
            config->layout, SPCCL_CHANNEL_LAYOUT);
    if (config->kind != SPCCL_CHANNEL_MEMORY && config->kind != SPCCL_CHANNEL_PORT)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "config.kind is %u, wanted 1 (SPCCL_CHANNEL_MEMORY) or 2 (SPCCL_CHANNEL_PORT)",
                       config->kind);
    if (config->window_bytes == 0 || config->window_bytes % 16 != 0 ||
        config->window_bytes > SP_CHANNELS_WINDOW_MAX)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "config.window_bytes is %" PRIu64 ", wanted a multiple of 16, 16 to 2^40",
                       config->window_bytes);
    if (config->n_per_peer < 1 || config->n_per_peer > SP_CHANNELS_PER_PEER_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "config.n_per_peer is %u, wanted 1 to %u", config->n_per_peer,
                       SP_CHANNELS_PER_PEER_MAX);
    if (config->n_triggers > SP_CHANNELS_TRIGGERS_MAX || config->n_triggers == 1 ||
        (config->n_triggers & (config->n_triggers - 1)) != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "config.n_triggers is %u, wanted 0 or a power of two, 2 to %u",
                       config->n_triggers, SP_CHANNELS_TRIGGERS_MAX);
    if (config->window != NULL && config->kind == SPCCL_CHANNEL_PORT)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "config.window is %p, wanted NULL: the library allocates the pinned "
                       "windows of port channels",
                       config->window);
    if ((uintptr_t)config->window % 16 != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "config.window is %p, wanted a multiple of 16", config->window);
    return SPCCL_OK;
}

static spccl_status open_share(const struct creation *n, const char *what, sp_gpu_share **share,
                               uint8_t *address)
{
    return sp_gpu_share_begin(n->g, "spccl_channels_create", what, n->deadlines.step_ns, share, address);
}

static spccl_status read_call(struct creation *n, const spccl_channels_config *given, bool has_out)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    if (!has_out)
        return SP_FAIL(SPCCL_ERR_ARG, "out is NULL");
    if (n->c == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "out of memory: %zu bytes of host memory", sizeof *n->c);
    SP_TRY(sp_options_copy("spccl_channels_config", given, &config, sizeof config));
    SP_TRY(check_config(&config));
    n->mine.kind = n->c->kind = config.kind;
    n->mine.window_bytes = n->c->memories[0].bytes = config.window_bytes;
    n->mine.n_per_peer = n->c->n_per_peer = config.n_per_peer;
    n->mine.n_triggers = n->c->n_triggers = config.n_triggers != 0 ? config.n_triggers : SP_CHANNELS_TRIGGERS;
    n->window = config.window;
    n->mine.has_window = config.window != NULL;
    if (n->window != NULL)
        SP_TRY(open_share(n, "a window", &n->window_share, n->mine.window_address));
    if (config.kind == SPCCL_CHANNEL_PORT)
        return SPCCL_OK;
    return open_share(n, "memory for channels", &n->share, n->mine.address);
}

/* Errors: those of a rank whose call was wrong; MISMATCH. All ranks come to the same result. */
static spccl_status compare(const struct creation *n)
{
    const spccl_comm *comm = n->g->comm;
    for (int r = 0; r < comm->world_size; r++) {
        const struct facts *f = &n->all[r], *first = &n->all[0];
        if (f->magic != MAGIC)
            return SP_FAIL(
                SPCCL_ERR_MISMATCH,
                "group \"%s\": rank %d did not call spccl_channels_create, or has another version of "
                "spccl",
                comm->name, r);
        if (f->status != SPCCL_OK)
            return SP_FAIL((spccl_status)f->status, "rank %d: spccl_channels_create: %.*s", r,
                           (int)sizeof f->error - 1, f->error);
        if (f->kind != first->kind || f->window_bytes != first->window_bytes ||
            f->n_per_peer != first->n_per_peer || f->n_triggers != first->n_triggers)
            return SP_FAIL(
                SPCCL_ERR_MISMATCH,
                "group \"%s\": rank %d called spccl_channels_create with kind %u, window_bytes %" PRIu64
                ", n_per_peer %u, n_triggers %u; rank 0 with %u, %" PRIu64
                ", %u, %u: all ranks must give the same",
                comm->name, r, f->kind, f->window_bytes, f->n_per_peer, f->n_triggers, first->kind,
                first->window_bytes, first->n_per_peer, first->n_triggers);
        if (f->has_window != first->has_window)
            return SP_FAIL(
                SPCCL_ERR_MISMATCH,
                "group \"%s\": rank %d called spccl_channels_create %s config.window, rank 0 %s it: "
                "either all ranks give a window or none does",
                comm->name, r, f->has_window ? "with" : "without", first->has_window ? "with" : "without");
    }
    return SPCCL_OK;
}

/* ---- creation: memory ---- */

static sp_channels_layout find_layout(const spccl_channels *c, bool has_window)
{
    uint64_t n = (uint64_t)(c->g->comm->world_size - 1) * c->n_per_peer, end;
    sp_channels_layout l;
    l.signals_off = has_window ? 0 : sp_align_up(c->memories[0].bytes, 256);
    l.posted_off = l.signals_off + n * SP_CHANNELS_LINE;
    l.done_off = l.posted_off + n * SP_CHANNELS_LINE;
    l.fifos_off = l.done_off + n * SP_CHANNELS_LINE;
    l.pinned_bytes = l.fifos_off + n * c->n_triggers * sizeof(spccl_trigger);
    end = c->kind == SPCCL_CHANNEL_MEMORY ? l.posted_off : 0;
    l.states_off = end;
    l.claimed_off = l.states_off + n * sizeof(spccl_channel_state);
    l.bytes = l.claimed_off + SP_CHANNELS_LINE;
    return l;
}

static spccl_status make_window(spccl_channels *c)
{
    const sp_gpu_comm *g = c->g;
    void *host = NULL, *device = NULL, *zeros;
    spccl_status st;
    if (c->kind == SPCCL_CHANNEL_MEMORY) {
        SP_TRY(g->ops->memory_create(g->device.ordinal, c->layout.bytes, g->handles, false, &c->own));
        c->memories[0].device = c->signals_device = c->state_device = g->ops->memory_address(c->own);
        return SPCCL_OK;
    }
    SP_TRY(g->ops->pinned_create(c->layout.pinned_bytes, &host, &device));
    c->pinned = c->memories[0].host = host;
    c->memories[0].device = c->signals_device = device;
    zeros = sp_calloc(1, c->layout.bytes);
    if (zeros == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%" PRIu64 " bytes", c->layout.bytes);
    st = g->ops->upload(g->device.ordinal, zeros, c->layout.bytes, c->layout.bytes, &device);
    sp_free(zeros);
    if (st == SPCCL_OK)
        c->state_device = device;
    return st;
}

/* Check and note the caller's window. */
static spccl_status take_window(spccl_channels *c, void *window)
{
    const sp_gpu_comm *g = c->g;
    spccl_status st =
        g->ops->memory_borrow(g->device.ordinal, window, c->memories[0].bytes, &c->memories[0].own);
    if (st == SPCCL_OK) {
        c->memories[0].device = window;
        return SPCCL_OK;
    }
    return SP_FAIL(st, "rank %d: spccl_channels_create: config.window of %" PRIu64 " bytes: %s",
                   g->comm->rank, c->memories[0].bytes, spccl_last_error());
}

static spccl_status make_memory(spccl_channels *c)
{
    const sp_gpu_comm *g = c->g;
    bool is_port = c->kind == SPCCL_CHANNEL_PORT;
    void *host = NULL, *device = NULL;
    spccl_status st;
    int before;
    SP_TRY(g->ops->enter(g->device.ordinal, &before));
    SP_TRY_TO(out, st, g->ops->pinned_create(sizeof *c->report, &host, &device));
    c->report = host;
    c->report_device = device;
    st = make_window(c);
out:
    g->ops->leave(before);
    if (st == SPCCL_OK)
        return SPCCL_OK;
    return SP_FAIL(
        st, "rank %d: spccl_channels_create: %" PRIu64 " bytes of %s GPU %d '%s' for window and counts: %s",
        g->comm->rank, is_port ? c->layout.pinned_bytes : c->layout.bytes,
        is_port ? "pinned memory for" : "memory of", g->device.ordinal, g->device.name, spccl_last_error());
}

static void close_shares(struct creation *n)
{
    sp_gpu_share_close(n->share);
    sp_gpu_share_close(n->window_share);
    n->share = n->window_share = NULL;
}

/* Map one kind of memory of all peers: `own` of each rank. All ranks return the same. address_of_0: in the facts of
 * rank 0. The share is closed before the ranks agree, so that no peer waits for a rank that failed. */
static spccl_status map_all(struct creation *n, sp_gpu_share **share, const uint8_t *address_of_0,
                            sp_gpu_memory *own, size_t bytes, sp_gpu_memory **out)
{
    spccl_status st = sp_gpu_share_exchange(*share, own, bytes, address_of_0, sizeof n->all[0], out);
    sp_gpu_share_close(*share);
    *share = NULL;
    return sp_gpu_agree_by(n->g->comm, st, n->deadlines.call_ns);
}

static spccl_status map_memory(struct creation *n)
{
    spccl_channels *c = n->c;
    SP_TRY(map_all(n, &n->share, n->all[0].address, c->own, (size_t)c->layout.bytes, c->peers));
    if (n->window_share == NULL)
        return SPCCL_OK;
    return map_all(n, &n->window_share, n->all[0].window_address, c->memories[0].own,
                   (size_t)c->memories[0].bytes, c->memories[0].peers);
}

static spccl_status run(struct creation *n, const spccl_channels_config *given, bool has_out)
{
    spccl_comm *comm = n->g->comm;
    spccl_status st = read_call(n, given, has_out);
    n->mine.status = (int32_t)st;
    if (st != SPCCL_OK)
        snprintf(n->mine.error, sizeof n->mine.error, "%s", spccl_last_error());
    SP_TRY(sp_comm_all_gather(comm, &n->mine, n->all, sizeof n->mine,
                              (sp_time_limit){.deadline_ns = n->deadlines.call_ns}, NULL));
    SP_TRY(compare(n));
    n->c->number = ++n->g->n_channel_sets; /* whatever follows: all ranks are here */
    n->c->layout = find_layout(n->c, n->window != NULL);
    st = make_memory(n->c);
    if (st == SPCCL_OK && n->window != NULL)
        st = take_window(n->c, n->window);
    SP_TRY(sp_gpu_agree_by(comm, st, n->deadlines.call_ns));
    n->agreed = true;
    if (n->c->kind == SPCCL_CHANNEL_PORT)
        return sp_port_start(n->c, sp_port_open(n->c, &n->deadlines), &n->deadlines);
    return map_memory(n);
}

/* Before memory that peers may have mapped is freed after a failure: no rank frees it while a peer has it mapped. */
static void end_failed(struct creation *n)
{
    sp_gpu_comm *g = n->g;
    bool entered;
    int before;
    close_shares(n);
    if (n->c == NULL)
        return;
    entered = g->ops->enter(g->device.ordinal, &before) == SPCCL_OK;
    if (entered)
        sp_channels_unmap_set(n->c);
    if (n->agreed && sp_comm_broken(g->comm) == SPCCL_OK)
        (void)sp_gpu_agree_by(g->comm, SPCCL_OK,
                              n->deadlines.call_ns); /* also without the GPU: the others wait for this rank */
    sp_channels_free_set(n->c, !entered);
    if (entered)
        g->ops->leave(before);
}

static spccl_channels *make_set(sp_gpu_comm *g)
{
    spccl_channels *c = sp_calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->g = g;
    c->n_memories = 1;
    c->farewell = sp_calloc(1, sizeof *c->farewell);
    if (c->farewell != NULL)
        return c;
    sp_free(c);
    return NULL;
}

sp_channels_deadlines sp_channels_find_deadlines(const spccl_comm *comm)
{
    int64_t timeout_ms = comm->timeout_ms, margin_ms = timeout_ms / 8; /* read once */
    margin_ms = margin_ms < AGREE_MS ? margin_ms : AGREE_MS;
    return (sp_channels_deadlines){.call_ns = sp_deadline_in_ms(timeout_ms),
                                   .step_ns = sp_deadline_in_ms(timeout_ms - margin_ms)};
}

static void add_to_list(spccl_channels *c)
{
    pthread_mutex_lock(&c->g->channels_mu);
    c->next = c->g->channels;
    c->g->channels = c;
    pthread_mutex_unlock(&c->g->channels_mu);
}

static void log_set(const spccl_channels *c)
{
    const spccl_comm *comm = c->g->comm;
    bool is_port = c->kind == SPCCL_CHANNEL_PORT;
    sp_log(SP_LOG_INFO, comm->rank,
           "group \"%s\": %u %s channels to each peer; %" PRIu64 " bytes of GPU memory and %" PRIu64
           " of pinned memory%s",
           comm->name, c->n_per_peer, is_port ? "port" : "memory", c->layout.bytes,
           (is_port ? c->layout.pinned_bytes : 0) + sizeof *c->report,
           c->memories[0].own != NULL ? "; the window is the caller's" : "");
}

spccl_status spccl_channels_create(spccl_comm *comm, const spccl_channels_config *config,
                                   spccl_channels **out)
{
    struct creation n = {
        .mine = {.magic = MAGIC}}; /* on the stack: a rank without memory must tell the others */
    char text[1024];
    spccl_status st;
    SP_TRY(sp_gpu_comm_get(comm, "spccl_channels_create", &n.g));
    n.deadlines = sp_channels_find_deadlines(comm);
    n.c = make_set(n.g);
    st = run(&n, config, out != NULL);
    if (st == SPCCL_OK) {
        add_to_list(n.c);
        log_set(n.c);
        *out = n.c;
        return SPCCL_OK;
    }
    snprintf(text, sizeof text, "%s", spccl_last_error());
    end_failed(&n);
    sp_set_error(text); /* freeing may have overwritten it */
    return st;
}
