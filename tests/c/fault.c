/* fault.c - see fault.h. It keeps the contract of transport.h. A message that peek has shown is shown again,
 * and a reservation can be repeated with a smaller size. After an SPCCL_AGAIN without reason, arm reports a
 * change, so that the caller does not sleep. */
#include "fault.h"

#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/transports.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define REGIONS_MAX 4

struct queue {
    bool reserved, shown; /* the caller has a reservation; has seen the oldest message */
    void *message;        /* the reserved message */
    size_t bytes;
};

struct fault {
    sp_fault_plan plan;
    const sp_transport *t;
    sp_endpoint *inner;
    int rank, world_size, n_queues;
    uint64_t rng;
    unsigned n_sent;
    bool cut, changed;               /* changed: the next arm returns SPCCL_AGAIN */
    struct queue *queues;            /* [world_size * n_queues] */
    sp_region *regions[REGIONS_MAX]; /* open ones; a cut closes them */
};

sp_fault_plan sp_fault;
static atomic_uint n_flipped;

static atomic_int cut_now = -1;
void sp_fault_cut(int rank)
{
    atomic_store(&cut_now, rank);
}

unsigned sp_fault_n_flipped(void)
{
    return atomic_load(&n_flipped);
}

static struct fault *self(sp_endpoint *ep)
{
    return (struct fault *)ep;
}

static struct queue *queue_of(struct fault *f, int peer, int queue)
{
    return &f->queues[peer * f->n_queues + queue];
}

/* splitmix64 */
static uint64_t draw(struct fault *f)
{
    uint64_t z = (f->rng += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* NULL: there are none. */
static const sp_transport_puts *puts_of(const struct fault *f)
{
    return f->plan.puts != NULL ? f->plan.puts : f->t->puts;
}

static bool one_in(struct fault *f, unsigned n)
{
    return n != 0 && draw(f) % n == 0;
}

static spccl_status gone(const struct fault *f, int peer)
{
    return SP_FAIL(SPCCL_ERR_PEER, "rank %d: rank %d is gone: the connection was cut for a test", f->rank,
                   peer);
}

static bool is_failing(const struct fault *f, int rank)
{
    return f->plan.fails_rank == -1 || rank == f->plan.fails_rank;
}

/* Fails if the plan says that this call fails on this rank. */
static spccl_status may_fail(const struct fault *f, const char *call)
{
    if (f->plan.fails == NULL || !is_failing(f, f->rank) || strcmp(f->plan.fails, call) != 0)
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_SYSTEM, "rank %d: %s failed for a test", f->rank, call);
}

/* Close the wrapped endpoint, and before it its regions. */
static void cut(struct fault *f)
{
    for (int i = 0; i < REGIONS_MAX; i++)
        if (f->regions[i] != NULL)
            puts_of(f)->close_region(f->inner, f->regions[i]);
    f->t->close(f->inner);
    f->inner = NULL;
    f->cut = f->changed = true;
}

static void fault_close(sp_endpoint *ep)
{
    struct fault *f = self(ep);
    if (f == NULL)
        return;
    f->t->close(f->inner);
    sp_free(f->queues);
    sp_free(f);
}

static spccl_status fault_open(const sp_endpoint_config *config, sp_endpoint **out)
{
    struct fault *f = sp_calloc(1, sizeof *f);
    spccl_status st;
    if (f == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "rank %d: fault: no memory for the endpoint (%zu bytes)",
                       config->rank, sizeof *f);
    f->plan = sp_fault;
    f->t = sp_transport_find(sp_fault.inner);
    f->rank = config->rank;
    f->world_size = config->world_size;
    f->n_queues = config->n_queues;
    f->rng = sp_fault.seed + (uint64_t)config->rank * 7919;
    f->queues = sp_calloc((size_t)config->world_size * (size_t)config->n_queues, sizeof *f->queues);
    if (f->queues == NULL) {
        st = SP_FAIL(SPCCL_ERR_NOMEM, "rank %d: fault: no memory for the records of %d x %d queues",
                     config->rank, config->world_size, config->n_queues);
        goto fail;
    }
    SP_TRY_TO(fail, st, f->t->open(config, &f->inner));
    *out = (sp_endpoint *)f;
    return SPCCL_OK;
fail:
    fault_close((sp_endpoint *)f);
    return st;
}

static spccl_status fault_address(sp_endpoint *ep, uint8_t *out, size_t *bytes)
{
    SP_TRY(may_fail(self(ep), "address"));
    return self(ep)->t->address(self(ep)->inner, out, bytes);
}

static bool fault_can_reach(sp_endpoint *ep, const uint8_t *address, size_t bytes, char *why, size_t why_cap)
{
    return self(ep)->t->can_reach(self(ep)->inner, address, bytes, why, why_cap);
}

static spccl_status fault_add_peer(sp_endpoint *ep, int peer, const uint8_t *address, size_t bytes)
{
    SP_TRY(may_fail(self(ep), "add_peer"));
    return self(ep)->t->add_peer(self(ep)->inner, peer, address, bytes);
}

static bool fault_has_control(sp_endpoint *ep)
{
    const struct fault *f = self(ep);
    return f->t->has_control != NULL && f->inner != NULL && f->t->has_control(f->inner);
}

static bool fault_failed(sp_endpoint *ep, int peer, sp_pair_failure *out)
{
    const struct fault *f = self(ep);
    if (f->t->failed != NULL && f->t->failed(f->inner, peer, out))
        return true;
    *out = (sp_pair_failure){.why = "it failed for a test", .what = "fault"};
    return f->plan.fails != NULL && strcmp(f->plan.fails, "pair") == 0 &&
           (is_failing(f, f->rank) || is_failing(f, peer));
}

static double fault_ns_per_byte(sp_endpoint *ep, int peer)
{
    return self(ep)->t->ns_per_byte(self(ep)->inner, peer);
}

static spccl_status fault_connect_step(sp_endpoint *ep)
{
    SP_TRY(may_fail(self(ep), "connect_step"));
    return self(ep)->t->connect_step(self(ep)->inner);
}

static size_t fault_message_max(sp_endpoint *ep)
{
    return self(ep)->t->message_max(self(ep)->inner);
}

static spccl_status fault_reserve(sp_endpoint *ep, int peer, int queue, size_t bytes, void **out)
{
    struct fault *f = self(ep);
    struct queue *l = queue_of(f, peer, queue);
    spccl_status st;
    if (f->cut)
        return gone(f, peer);
    if (!(l->reserved && bytes <= l->bytes) && one_in(f, f->plan.hold_one_in)) {
        f->changed = true;
        return SPCCL_AGAIN;
    }
    st = f->t->reserve(f->inner, peer, queue, bytes, out);
    l->reserved = st == SPCCL_OK;
    if (l->reserved) {
        l->message = *out;
        l->bytes = bytes;
    }
    return st;
}

static spccl_status fault_commit(sp_endpoint *ep, int peer, int queue, uint32_t call)
{
    struct fault *f = self(ep);
    struct queue *l = queue_of(f, peer, queue);
    spccl_status st;
    if (f->cut)
        return SPCCL_OK; /* as if the peer had died a moment later */
    if (l->reserved && one_in(f, f->plan.flip_one_in)) {
        size_t within =
            f->plan.flip_within != 0 && f->plan.flip_within < l->bytes ? f->plan.flip_within : l->bytes;
        ((uint8_t *)l->message)[draw(f) % within] ^= (uint8_t)(1u << draw(f) % 8);
        atomic_fetch_add(&n_flipped, 1);
    }
    st = f->t->commit(f->inner, peer, queue, call);
    l->reserved = false;
    if ((++f->n_sent == f->plan.cut_after && f->rank == f->plan.cut_rank) ||
        atomic_load(&cut_now) == f->rank) {
        cut(f);
    }
    return st;
}

static spccl_status fault_peek(sp_endpoint *ep, int peer, int queue, const void **out, size_t *bytes)
{
    struct fault *f = self(ep);
    struct queue *l = queue_of(f, peer, queue);
    spccl_status st;
    if (f->cut)
        return gone(f, peer);
    if (!l->shown && one_in(f, f->plan.hold_one_in)) {
        f->changed = true;
        return SPCCL_AGAIN;
    }
    st = f->t->peek(f->inner, peer, queue, out, bytes);
    l->shown = st == SPCCL_OK;
    return st;
}

static spccl_status fault_release(sp_endpoint *ep, int peer, int queue)
{
    struct fault *f = self(ep);
    queue_of(f, peer, queue)->shown = false;
    return f->cut ? SPCCL_OK : f->t->release(f->inner, peer, queue);
}

static bool fault_flushed(sp_endpoint *ep, int peer, int queue, uint64_t n)
{
    return self(ep)->cut || self(ep)->t->flushed(self(ep)->inner, peer, queue, n);
}

static spccl_status fault_progress(sp_endpoint *ep, int *peer, char *text)
{
    return self(ep)->cut ? SPCCL_OK : self(ep)->t->progress(self(ep)->inner, peer, text);
}

static int fault_wait_fd(sp_endpoint *ep)
{
    return self(ep)->cut ? -1 : self(ep)->t->wait_fd(self(ep)->inner);
}

static spccl_status fault_arm(sp_endpoint *ep)
{
    struct fault *f = self(ep);
    bool changed = f->changed;
    f->changed = false;
    if (changed)
        return SPCCL_AGAIN;
    return f->cut ? SPCCL_OK : f->t->arm(f->inner);
}

static void fault_disarm(sp_endpoint *ep)
{
    if (!self(ep)->cut)
        self(ep)->t->disarm(self(ep)->inner);
}

static void fault_abort_peers(sp_endpoint *ep, const char *text)
{
    if (!self(ep)->cut && self(ep)->t->abort_peers != NULL)
        self(ep)->t->abort_peers(self(ep)->inner, text);
}

static void fault_leave(sp_endpoint *ep)
{
    if (!self(ep)->cut && self(ep)->t->leave != NULL)
        self(ep)->t->leave(self(ep)->inner);
}

/* ---- puts ---- */

static const sp_transport_puts *live_puts(sp_endpoint *ep)
{
    return self(ep)->cut ? NULL : puts_of(self(ep));
}

static bool fault_device(sp_endpoint *ep, size_t i, sp_net_device *out)
{
    return live_puts(ep) != NULL && live_puts(ep)->device(self(ep)->inner, i, out);
}

static bool fault_reaches(sp_endpoint *ep, int peer)
{
    return live_puts(ep) != NULL && live_puts(ep)->reaches(self(ep)->inner, peer);
}

static spccl_status fault_open_region(sp_endpoint *ep, const sp_region_config *config, sp_region **out,
                                      uint8_t *handle)
{
    struct fault *f = self(ep);
    int i = 0;
    SP_TRY(may_fail(f, "open_region"));
    if (live_puts(ep) == NULL)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "transport %s has no puts", f->t->name);
    while (i < REGIONS_MAX && f->regions[i] != NULL)
        i++;
    if (i == REGIONS_MAX)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "fault: more than %d regions", REGIONS_MAX);
    SP_TRY(live_puts(ep)->open_region(f->inner, config, out, handle));
    f->regions[i] = *out;
    return SPCCL_OK;
}

static void fault_close_region(sp_endpoint *ep, sp_region *r)
{
    struct fault *f = self(ep);
    if (live_puts(ep) == NULL) /* a cut has closed it */
        return;
    for (int i = 0; i < REGIONS_MAX; i++)
        f->regions[i] = f->regions[i] == r ? NULL : f->regions[i];
    live_puts(ep)->close_region(f->inner, r);
}

static uint32_t fault_room(sp_endpoint *ep, int peer)
{
    struct fault *f = self(ep);
    if (live_puts(ep) == NULL)
        return 0;
    if (one_in(f, f->plan.hold_one_in)) {
        f->changed = true;
        return 0;
    }
    return puts_of(f)->room(f->inner, peer);
}

static spccl_status fault_put(sp_endpoint *ep, int peer, int queue, const sp_put *put)
{
    return live_puts(ep) == NULL ? gone(self(ep), peer)
                                 : live_puts(ep)->put(self(ep)->inner, peer, queue, put);
}

static spccl_status fault_flush(sp_endpoint *ep, int peer, int queue)
{
    struct fault *f = self(ep);
    if (live_puts(ep) == NULL)
        return gone(f, peer);
    if (one_in(f, f->plan.hold_one_in)) {
        f->changed = true;
        return SPCCL_AGAIN;
    }
    return puts_of(f)->flush(f->inner, peer, queue);
}

static const sp_transport_puts fault_puts = {
    .device = fault_device,
    .reaches = fault_reaches,
    .open_region = fault_open_region,
    .close_region = fault_close_region,
    .room = fault_room,
    .put = fault_put,
    .flush = fault_flush,
};

static size_t fault_memory_bytes(sp_endpoint *ep)
{
    return self(ep)->cut ? 0 : self(ep)->t->memory_bytes(self(ep)->inner);
}

const sp_transport sp_transport_fault = {
    .name = "fault",
    .has_control = fault_has_control,
    .ns_per_byte = fault_ns_per_byte,
    .open = fault_open,
    .address = fault_address,
    .can_reach = fault_can_reach,
    .add_peer = fault_add_peer,
    .failed = fault_failed,
    .connect_step = fault_connect_step,
    .message_max = fault_message_max,
    .reserve = fault_reserve,
    .commit = fault_commit,
    .peek = fault_peek,
    .release = fault_release,
    .flushed = fault_flushed,
    .progress = fault_progress,
    .wait_fd = fault_wait_fd,
    .arm = fault_arm,
    .disarm = fault_disarm,
    .abort_peers = fault_abort_peers,
    .puts = &fault_puts,
    .memory_bytes = fault_memory_bytes,
    .leave = fault_leave,
    .close = fault_close,
};
