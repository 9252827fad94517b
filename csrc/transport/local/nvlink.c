/* nvlink.c - the ranks of one host hand each other their GPU memory; see gpu_share.h. Once that is done the
 * kernels reach it as plain pointers, over NVLink or PCIe, and nothing here is needed any more.
 *
 * Between two ranks the lower dials. After the handshake each end sends one message, with at most one
 * descriptor:
 *   0 u32 "SPGM"  4 u32 zero  8 u64 bytes of the memory  16 handle[SP_GPU_HANDLE_BYTES]   (little-endian) */
#include "core/contract/gpu_share.h"

#include "core/base/bits.h"
#include "core/base/clock.h"
#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/acceptor.h"
#include "transport/common/auth.h"
#include "transport/common/forks.h"
#include "transport/common/host.h"
#include "transport/common/transports.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#define ID_BYTES SP_HS_ID_BYTES
_Static_assert(SP_GPU_SHARE_ADDRESS_BYTES == ID_BYTES + SP_HOST_ID_BYTES, "an id and a host");
#define MESSAGE_MAGIC 0x4d475053u /* "SPGM" */
#define HANDLE_AT 16u
#define MESSAGE_BYTES (HANDLE_AT + SP_GPU_HANDLE_BYTES)
#define STEP_NS 200000          /* start-up only: between two looks */
#define STILL_NS (20 * 1000000) /* between two questions whether the group is alive */

enum peer_state {
    PEER_DIAL,     /* to be dialled */
    PEER_CONNECT,  /* connect() under way */
    PEER_PROVE,    /* handshake under way */
    PEER_EXPECTED, /* it dials */
    PEER_SWAP,     /* proven; messages travel */
    PEER_DONE
};

struct peer {
    enum peer_state state;
    int sock;
    bool sent, received;
    size_t n_received;
    int fd; /* what it passed; -1: nothing */
    uint8_t message[MESSAGE_BYTES];
    sp_hs hs;
};

struct sp_gpu_share {
    sp_gpu_share_config config;
    uint8_t id[ID_BYTES];
    sp_acceptor acceptor;
    struct peer *peers; /* [world_size] */
    pid_t pid;
    sp_fork_guard guard;
};

/* The first mapping that failed: told at the end, so that the peers get all they need to try theirs. */
struct refusal {
    spccl_status status; /* SPCCL_OK: none */
    char text[500];
};

/* What swap is about. */
struct swap {
    size_t bytes;
    const uint8_t *addresses;
    uint8_t message[MESSAGE_BYTES]; /* ours */
    int fd;                         /* ours; -1: none */
    sp_gpu_memory **out;
    struct refusal refusal;
};

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* ---- listening ---- */

static void local_socket_name(const uint8_t id[ID_BYTES], sp_sock_address *out)
{
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    size_t n = 1; /* a leading zero byte: an abstract name */
    n += (size_t)snprintf(un.sun_path + 1, sizeof un.sun_path - 1, "spccl-gpu-");
    for (size_t i = 0; i < ID_BYTES; i++)
        n += (size_t)snprintf(un.sun_path + n, sizeof un.sun_path - n, "%02x", id[i]);
    memset(out, 0, sizeof *out);
    memcpy(&out->storage, &un, sizeof un);
    out->bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
}

static spccl_status check_hello(void *ctx, const sp_hs_hello *h)
{
    const sp_gpu_share *s = ctx;
    const sp_gpu_share_config *c = &s->config;
    if (h->kind != SP_HS_GPU || h->group_tag != c->group_tag || h->to != c->rank ||
        memcmp(h->to_id, s->id, ID_BYTES) != 0)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d is not whom this connection is for", c->rank);
    if (h->world_size != c->world_size)
        return SP_FAIL(SPCCL_ERR_MISMATCH, "rank %d has %d ranks, but rank %d has %d", h->from, h->world_size,
                       c->rank, c->world_size);
    if (h->from < 0 || h->from >= c->rank || s->peers[h->from].state != PEER_EXPECTED)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d does not expect rank %d", c->rank, h->from);
    return SPCCL_OK;
}

static spccl_status take_connection(void *ctx, int fd, const sp_hs_hello *hello)
{
    struct peer *p = &((sp_gpu_share *)ctx)->peers[hello->from];
    p->sock = fd;
    p->state = PEER_SWAP;
    return SPCCL_OK;
}

static spccl_status start_listening(sp_gpu_share *s)
{
    sp_acceptor_config ac = {.rank = s->config.rank,
                             .secret = s->config.secret,
                             .ctx = s,
                             .check = check_hello,
                             .ready = take_connection};
    sp_sock_address name;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    local_socket_name(s->id, &name);
    if (fd < 0 || bind(fd, (const struct sockaddr *)&name.storage, name.bytes) != 0 || listen(fd, 128) != 0) {
        spccl_status st =
            SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: nvlink: listening on a local socket", s->config.rank);
        close_fd(&fd);
        return st;
    }
    return sp_acceptor_init(&s->acceptor, fd, &ac);
}

static void close_in_child(void *owner)
{
    sp_gpu_share *s = owner;
    for (int i = 0; i < s->config.world_size; i++) {
        close_fd(&s->peers[i].sock);
        close_fd(&s->peers[i].fd);
    }
    sp_acceptor_close_descriptors(&s->acceptor);
}

spccl_status sp_gpu_share_open(const sp_gpu_share_config *config, sp_gpu_share **out)
{
    spccl_status st;
    sp_gpu_share *s = sp_calloc(1, sizeof *s);
    if (s == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "nvlink: %zu bytes", sizeof *s);
    s->config = *config;
    s->pid = getpid();
    s->acceptor.listen_fd = -1;
    s->peers = sp_calloc((size_t)config->world_size, sizeof *s->peers);
    if (s->peers == NULL) {
        st = SP_FAIL(SPCCL_ERR_NOMEM, "nvlink: %d peers", config->world_size);
        goto fail;
    }
    for (int i = 0; i < config->world_size; i++) {
        s->peers[i].sock = s->peers[i].fd = -1;
        s->peers[i].state = i == config->rank ? PEER_DONE : i < config->rank ? PEER_EXPECTED : PEER_DIAL;
    }
    SP_TRY_TO(fail, st, sp_random_bytes(s->id, ID_BYTES));
    SP_TRY_TO(fail, st, start_listening(s));
    sp_fork_watch(&s->guard, close_in_child, s);
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
    for (int i = 0; s->peers != NULL && i < s->config.world_size; i++) {
        struct peer *p = &s->peers[i];
        if (p->sock >= 0 && s->pid == getpid())
            (void)shutdown(p->sock, SHUT_RDWR);
        close_fd(&p->sock);
        close_fd(&p->fd);
    }
    sp_acceptor_close(&s->acceptor);
    sp_free(s->peers);
    sp_free(s);
}

spccl_status sp_gpu_share_address(const sp_gpu_share *s, uint8_t out[SP_GPU_SHARE_ADDRESS_BYTES])
{
    memcpy(out, s->id, ID_BYTES);
    return sp_host_identity(out + ID_BYTES);
}

bool sp_gpu_share_same_host(const uint8_t *a, const uint8_t *b)
{
    return memcmp(a + ID_BYTES, b + ID_BYTES, SP_HOST_ID_BYTES) == 0;
}

/* ---- connecting ---- */

static spccl_status dial(struct peer *p, const uint8_t *address)
{
    sp_sock_address name;
    local_socket_name(address, &name);
    if (sp_sock_dial(&name, &p->sock) != SPCCL_OK) {
        if (errno == EAGAIN)
            return SPCCL_AGAIN; /* its queue of connections is full */
        return SP_FAIL(SPCCL_ERR_PEER, "it stopped listening before it gave its memory");
    }
    p->state = PEER_CONNECT;
    return SPCCL_OK;
}

static spccl_status start_proof(const sp_gpu_share *s, struct peer *p, int rank, const uint8_t *address)
{
    sp_hs_hello h = {.group_tag = s->config.group_tag,
                     .kind = SP_HS_GPU,
                     .from = s->config.rank,
                     .to = rank,
                     .world_size = s->config.world_size};
    SP_TRY(sp_sock_connected(p->sock));
    memcpy(h.to_id, address, ID_BYTES);
    SP_TRY(sp_hs_dial(&p->hs, p->sock, &h, s->config.secret));
    p->state = PEER_PROVE;
    return SPCCL_OK;
}

/* ---- the message ---- */

static spccl_status send_message(const struct swap *w, struct peer *p)
{
    uint8_t message[MESSAGE_BYTES];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    struct iovec iov = {.iov_base = message, .iov_len = sizeof message};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    memcpy(message, w->message, sizeof message);
    if (w->fd >= 0) {
        struct cmsghdr *c = &control.align;
        m.msg_control = &control;
        m.msg_controllen = sizeof control;
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &w->fd, sizeof(int));
    }
    /* 144 bytes into an empty buffer: all or nothing. */
    if (sendmsg(p->sock, &m, MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)sizeof message)
        return errno == EAGAIN ? SPCCL_AGAIN : SP_FAIL_ERRNO(SPCCL_ERR_PEER, "passing GPU memory");
    p->sent = true;
    return SPCCL_OK;
}

/* Keep the descriptor that came along; more than one, or a second, is refused by the caller. */
static bool take_descriptor(struct peer *p, struct msghdr *m)
{
    struct cmsghdr *c = CMSG_FIRSTHDR(m);
    bool had = p->fd >= 0;
    size_t n;
    if (c == NULL)
        return (m->msg_flags & MSG_CTRUNC) == 0;
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS || c->cmsg_len < CMSG_LEN(0))
        return false;
    n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); /* the buffer may have room for two */
    for (size_t i = 0; i < n; i++) {
        int fd;
        memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
        if (n == 1 && p->fd < 0)
            p->fd = fd;
        else
            close_fd(&fd);
    }
    return n == 1 && !had && (m->msg_flags & MSG_CTRUNC) == 0;
}

static spccl_status receive_message(struct peer *p)
{
    while (p->n_received < MESSAGE_BYTES) {
        union {
            struct cmsghdr align;
            char bytes[CMSG_SPACE(sizeof(int))];
        } control;
        struct iovec iov = {.iov_base = p->message + p->n_received, .iov_len = MESSAGE_BYTES - p->n_received};
        struct msghdr m = {
            .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        ssize_t n = recvmsg(p->sock, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return SPCCL_AGAIN;
        if (n <= 0)
            return n == 0 ? SP_FAIL(SPCCL_ERR_PEER, "the connection was closed")
                          : SP_FAIL_ERRNO(SPCCL_ERR_PEER, "the connection broke");
        if (!take_descriptor(p, &m))
            return SP_FAIL(SPCCL_ERR_PEER, "it passed something that is not its memory");
        p->n_received += (size_t)n;
    }
    p->received = true;
    return SPCCL_OK;
}

static void note_refusal(const sp_gpu_share *s, struct swap *w, int rank, spccl_status st)
{
    char why[300];
    if (w->refusal.status != SPCCL_OK)
        return;
    snprintf(why, sizeof why, "%s", spccl_last_error());
    w->refusal.status = st == SPCCL_ERR_DEVICE ? SPCCL_ERR_UNREACHABLE : st;
    snprintf(w->refusal.text, sizeof w->refusal.text,
             "rank %d: GPU memory of rank %d: its GPU memory cannot be mapped here: %s", s->config.rank, rank,
             why);
}

static spccl_status map_memory(const sp_gpu_share *s, struct swap *w, struct peer *p, int rank)
{
    spccl_status st;
    if (sp_load_le32(p->message) != MESSAGE_MAGIC)
        return SP_FAIL(SPCCL_ERR_PEER, "it passed something that is not its memory");
    if (sp_load_le64(p->message + 8) != w->bytes)
        st = SP_FAIL(SPCCL_ERR_MISMATCH, "it has an inbox of %llu bytes, this rank one of %zu",
                     (unsigned long long)sp_load_le64(p->message + 8), w->bytes);
    else
        st = s->config.ops->memory_import(s->config.ordinal, p->message + HANDLE_AT, p->fd, w->bytes,
                                          &w->out[rank]);
    close_fd(&p->fd);
    if (st != SPCCL_OK)
        note_refusal(s, w, rank, st);
    return SPCCL_OK;
}

static spccl_status step_peer(sp_gpu_share *s, struct swap *w, int rank)
{
    struct peer *p = &s->peers[rank];
    const uint8_t *address = w->addresses + (size_t)rank * SP_GPU_SHARE_ADDRESS_BYTES;
    switch (p->state) {
    case PEER_DIAL:
        SP_TRY(dial(p, address)); /* fall through */
    case PEER_CONNECT:
        SP_TRY(start_proof(s, p, rank, address)); /* fall through */
    case PEER_PROVE:
        SP_TRY(sp_hs_step(&p->hs));
        p->state = PEER_SWAP; /* fall through */
    case PEER_SWAP:
        if (!p->sent)
            SP_TRY(send_message(w, p));
        SP_TRY(receive_message(p));
        SP_TRY(map_memory(s, w, p, rank));
        p->state = PEER_DONE;
        return SPCCL_OK;
    case PEER_EXPECTED:
        return SPCCL_AGAIN;
    case PEER_DONE:
        return SPCCL_OK;
    }
    return SP_FAIL(SPCCL_ERR_BUG, "rank %d: nvlink: state %d", s->config.rank, (int)p->state);
}

/* One look at everybody: AGAIN while somebody is missing. */
static spccl_status step_all(sp_gpu_share *s, struct swap *w, sp_rank_list *missing)
{
    SP_TRY(sp_acceptor_step(&s->acceptor));
    for (int i = 0; i < s->config.world_size; i++) {
        char cause[400];
        spccl_status st = step_peer(s, w, i);
        if (st == SPCCL_AGAIN)
            sp_rank_list_add(missing, i);
        if (st == SPCCL_AGAIN || st == SPCCL_OK)
            continue;
        snprintf(cause, sizeof cause, "%s", spccl_last_error());
        return SP_FAIL(st, "rank %d: GPU memory of rank %d: %s", s->config.rank, i, cause);
    }
    return missing->n == 0 ? SPCCL_OK : SPCCL_AGAIN;
}

static spccl_status run_swap(sp_gpu_share *s, struct swap *w)
{
    int64_t asked_ns = sp_now_ns();
    for (;;) {
        sp_rank_list missing = {0};
        spccl_status st;
        pthread_mutex_lock(&s->guard.lock);
        st = step_all(s, w, &missing);
        pthread_mutex_unlock(&s->guard.lock);
        if (st != SPCCL_AGAIN)
            return st;
        if (sp_deadline_passed(s->config.deadline_ns))
            return SP_FAIL(SPCCL_ERR_TIMEOUT,
                           "rank %d: no GPU memory from rank %s before the deadline: did they call "
                           "spccl_cuda_attach?",
                           s->config.rank, missing.text);
        if (s->config.still != NULL && sp_now_ns() - asked_ns > STILL_NS) {
            SP_TRY(s->config.still(s->config.ctx));
            asked_ns = sp_now_ns();
        }
        nanosleep(&(struct timespec){.tv_nsec = STEP_NS}, NULL);
    }
}

spccl_status sp_gpu_share_exchange(sp_gpu_share *s, sp_gpu_memory *own, size_t bytes,
                                   const uint8_t *addresses, sp_gpu_memory **out)
{
    struct swap w = {.bytes = bytes, .addresses = addresses, .fd = -1, .out = out};
    spccl_status st;
    sp_store_le32(w.message, MESSAGE_MAGIC);
    sp_store_le64(w.message + 8, bytes);
    SP_TRY(s->config.ops->memory_export(own, w.message + HANDLE_AT, &w.fd));
    st = run_swap(s, &w);
    close_fd(&w.fd);
    SP_TRY(st);
    return w.refusal.status == SPCCL_OK ? SPCCL_OK : SP_FAIL(w.refusal.status, "%s", w.refusal.text);
}
