/* nvlink.c - ranks of one host give each other access to their GPU memory; see gpu_share.h. Kernels then use
 * that memory through plain pointers, over NVLink or PCIe, without any function of this file.
 *
 * After the handshake on the local socket each end sends one message, with at most one descriptor
 * (little-endian):
 *   0 u32 "SPGM"  4 u32 zero  8 u64 bytes of the memory  16 handle[SP_GPU_HANDLE_BYTES] */
#include "core/contract/gpu_share.h"

#include "core/base/bits.h"
#include "core/base/clock.h"
#include "core/base/host.h"
#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/forks.h"
#include "transport/common/local_socket.h"
#include "transport/common/transports.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define ID_BYTES SP_HS_ID_BYTES
_Static_assert(SP_GPU_SHARE_ADDRESS_BYTES == ID_BYTES + SP_HOST_ID_BYTES, "an id and a host");
#define MESSAGE_MAGIC 0x4d475053u /* "SPGM" */
#define HANDLE_AT 16u
#define MESSAGE_BYTES (HANDLE_AT + SP_GPU_HANDLE_BYTES)
#define STEP_NS 200000          /* sleep between two tries; only during start-up */
#define STILL_NS (20 * 1000000) /* time between two calls of config.still */

struct sp_gpu_share {
    sp_gpu_share_config config;
    sp_local_listener listener;
    sp_fork_guard guard;
};

/* The first mapping that failed. The exchange goes on, so that the peers get this rank's memory, and returns
 * this error at its end. */
struct refusal {
    spccl_status status; /* SPCCL_OK: none */
    char text[500];
};

/* The state of one call of sp_gpu_share_exchange. */
struct exchange {
    sp_gpu_share *s;
    size_t bytes;
    const uint8_t *addresses;
    size_t stride;                  /* of addresses */
    uint8_t message[MESSAGE_BYTES]; /* this rank's */
    int fd;                         /* this rank's; -1: none */
    sp_gpu_memory **out;
    struct refusal refusal;
};

/* ---- listening ---- */

static spccl_status start_listening(sp_gpu_share *s)
{
    sp_local_config lc = {.transport = "nvlink",
                          .what = "memory",
                          .kind = SP_HS_GPU,
                          .rank = s->config.rank,
                          .world_size = s->config.world_size,
                          .secret = s->config.secret,
                          .group_tag = s->config.group_tag};
    return sp_local_listen(&s->listener, &lc);
}

static void close_in_child(void *owner)
{
    sp_local_close_descriptors(&((sp_gpu_share *)owner)->listener);
}

spccl_status sp_gpu_share_open(const sp_gpu_share_config *config, sp_gpu_share **out)
{
    spccl_status st;
    sp_gpu_share *s = sp_calloc(1, sizeof *s);
    if (s == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "nvlink: %zu bytes", sizeof *s);
    s->config = *config;
    s->listener.acceptor.listen_fd = -1;
    SP_TRY_TO(fail, st, start_listening(s));
    for (int i = 0; i < config->world_size; i++)
        if (i != config->rank)
            s->listener.peers[i].state = i < config->rank ? SP_LOCAL_EXPECTED : SP_LOCAL_CONNECT;
    SP_TRY_TO(fail, st, sp_fork_watch(&s->guard, close_in_child, s));
    *out = s;
    return SPCCL_OK;
fail:
    sp_gpu_share_close(s);
    return st;
}

void sp_gpu_share_close(sp_gpu_share *s)
{
    if (s == NULL)
        return;
    sp_fork_unwatch(&s->guard);
    sp_local_close(&s->listener);
    sp_free(s);
}

spccl_status sp_gpu_share_address(const sp_gpu_share *s, uint8_t out[SP_GPU_SHARE_ADDRESS_BYTES])
{
    memcpy(out, s->listener.id, ID_BYTES);
    memcpy(out + ID_BYTES, s->config.host, SP_HOST_ID_BYTES);
    return SPCCL_OK;
}

bool sp_gpu_share_same_host(const uint8_t *a, const uint8_t *b)
{
    return memcmp(a + ID_BYTES, b + ID_BYTES, SP_HOST_ID_BYTES) == 0;
}

/* ---- the message ---- */

static void note_refusal(const sp_gpu_share *s, struct exchange *w, int rank, spccl_status st)
{
    if (w->refusal.status != SPCCL_OK)
        return;
    w->refusal.status = st == SPCCL_ERR_DEVICE ? SPCCL_ERR_UNREACHABLE : st;
    snprintf(w->refusal.text, sizeof w->refusal.text,
             "rank %d: GPU memory of rank %d: it cannot be mapped here: %.300s", s->config.rank, rank,
             spccl_last_error());
}

static spccl_status map_memory(const sp_gpu_share *s, struct exchange *w, sp_local_peer *p, int rank)
{
    spccl_status st;
    if (sp_load_le32(p->message) != MESSAGE_MAGIC)
        return SP_FAIL(SPCCL_ERR_PEER, "it passed something that is not its memory");
    if (sp_load_le64(p->message + 8) != w->bytes)
        st = SP_FAIL(SPCCL_ERR_MISMATCH, "it has %s of %llu bytes, this rank one of %zu", s->config.what,
                     (unsigned long long)sp_load_le64(p->message + 8), w->bytes);
    else
        st = s->config.ops->memory_import(s->config.ordinal, p->message + HANDLE_AT,
                                          p->received.n_fds > 0 ? p->received.fds[0] : -1, w->bytes,
                                          &w->out[rank]);
    sp_local_message_close(&p->received);
    if (st != SPCCL_OK)
        note_refusal(s, w, rank, st);
    return SPCCL_OK;
}

static spccl_status step_peer(void *ctx, int rank)
{
    struct exchange *w = ctx;
    sp_local_peer *p = &w->s->listener.peers[rank];
    sp_local_outgoing out = {
        .message = w->message, .bytes = sizeof w->message, .n_fds = w->fd >= 0 ? 1 : 0, .fds = {w->fd}};
    if (p->state == SP_LOCAL_ABSENT || p->state == SP_LOCAL_DONE)
        return SPCCL_OK;
    SP_TRY(sp_local_exchange(&w->s->listener, rank, w->addresses + (size_t)rank * w->stride, &out, 1));
    return map_memory(w->s, w, p, rank);
}

static spccl_status run_exchange(sp_gpu_share *s, struct exchange *w)
{
    int64_t asked_ns = sp_now_ns();
    const sp_acceptor_peers peers = {s->config.world_size, w, step_peer, "GPU memory of", ""};
    for (;;) {
        sp_rank_list missing = {0};
        spccl_status st;
        pthread_mutex_lock(&s->guard.lock);
        st = sp_acceptor_step_peers(&s->listener.acceptor, &peers, &missing);
        pthread_mutex_unlock(&s->guard.lock);
        if (st != SPCCL_AGAIN)
            return st;
        if (sp_deadline_passed(s->config.deadline_ns))
            return SP_FAIL(SPCCL_ERR_TIMEOUT,
                           "rank %d: no GPU memory from rank %s before the deadline: did they call "
                           "%s?",
                           s->config.rank, missing.text, s->config.call);
        if (s->config.still != NULL && sp_now_ns() - asked_ns > STILL_NS) {
            SP_TRY(s->config.still(s->config.ctx));
            asked_ns = sp_now_ns();
        }
        nanosleep(&(struct timespec){.tv_nsec = STEP_NS}, NULL);
    }
}

spccl_status sp_gpu_share_exchange(sp_gpu_share *s, sp_gpu_memory *own, size_t bytes,
                                   const uint8_t *addresses, size_t stride, sp_gpu_memory **out)
{
    struct exchange w = {
        .s = s, .bytes = bytes, .addresses = addresses, .stride = stride, .fd = -1, .out = out};
    spccl_status st;
    sp_store_le32(w.message, MESSAGE_MAGIC);
    sp_store_le64(w.message + 8, bytes);
    for (int i = 0; i < s->config.world_size; i++)
        if (!sp_gpu_share_same_host(addresses + (size_t)i * stride,
                                    addresses + (size_t)s->config.rank * stride))
            s->listener.peers[i].state = SP_LOCAL_ABSENT;
    SP_TRY(s->config.ops->memory_export(own, w.message + HANDLE_AT, &w.fd));
    st = run_exchange(s, &w);
    sp_sock_close(&w.fd);
    SP_TRY(st);
    return w.refusal.status == SPCCL_OK ? SPCCL_OK : SP_FAIL(w.refusal.status, "%s", w.refusal.text);
}
