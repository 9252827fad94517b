/* acceptor.c - see acceptor.h. */
#include "transport/common/acceptor.h"

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/base/status.h"

#include <errno.h>
#include <unistd.h>

#define PATIENCE_NS (INT64_C(10) * 1000000000) /* for one handshake */
#define EVICT_NS (INT64_C(1) * 1000000000)     /* the same while SP_ACCEPTOR_PENDING connections wait */
#define SHORT_NS (INT64_C(3) * 1000000000)     /* how long the process may lack descriptors */
#define N_LOGGED 20                            /* log lines about dropped connections, per acceptor */

spccl_status sp_acceptor_init(sp_acceptor *a, int listen_fd, const sp_acceptor_config *config)
{
    *a = (sp_acceptor){.config = *config, .listen_fd = listen_fd};
    a->pending = sp_calloc(SP_ACCEPTOR_PENDING, sizeof *a->pending);
    if (a->pending == NULL) {
        sp_acceptor_close(a);
        return SP_FAIL(SPCCL_ERR_NOMEM, "a table of %d connections", SP_ACCEPTOR_PENDING);
    }
    return SPCCL_OK;
}

void sp_acceptor_close_descriptors(sp_acceptor *a)
{
    for (int i = 0; i < a->n_pending; i++)
        close(a->pending[i].hs.fd);
    if (a->listen_fd > 0 || (a->listen_fd == 0 && a->pending != NULL)) /* a zeroed acceptor has none */
        close(a->listen_fd);
    a->n_pending = 0;
    a->listen_fd = -1;
}

void sp_acceptor_close(sp_acceptor *a)
{
    sp_acceptor_close_descriptors(a);
    sp_free(a->pending);
    a->pending = NULL;
}

static void drop_log(sp_acceptor *a, int fd, const char *why)
{
    char from[SP_SOCK_TEXT_CAP];
    sp_sock_peer_text(fd, from, sizeof from);
    if (++a->n_dropped > N_LOGGED)
        return;
    sp_log(SP_LOG_WARN, a->config.rank, "dropped a connection from %s: %s%s", from, why,
           a->n_dropped == N_LOGGED ? " (more of these are not shown)" : "");
}

static void take_out(sp_acceptor *a, int i)
{
    a->pending[i] = a->pending[--a->n_pending];
}

static void drop(sp_acceptor *a, int i, const char *why)
{
    drop_log(a, a->pending[i].hs.fd, why);
    close(a->pending[i].hs.fd);
    take_out(a, i);
}

static void evict_oldest(sp_acceptor *a, int64_t now_ns)
{
    int oldest = 0;
    for (int i = 1; i < a->n_pending; i++)
        if (a->pending[i].since_ns < a->pending[oldest].since_ns)
            oldest = i;
    if (now_ns - a->pending[oldest].since_ns >= EVICT_NS)
        drop(a, oldest, "too many connections wait, and this one is the oldest");
}

static bool is_shortage(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

/* There is no descriptor for a connection, which stays in the kernel's backlog. Other threads may close some soon, and
 * silent connections hold some: the oldest is closed, also if the caller gets an error and goes on. */
static spccl_status wait_for_descriptors(sp_acceptor *a, int64_t now_ns)
{
    spccl_status st = SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: accepting a connection", a->config.rank);
    if (a->short_since_ns == 0) {
        a->short_since_ns = now_ns;
        sp_log(SP_LOG_WARN, a->config.rank, "%s; trying again for %d s", spccl_last_error(),
               (int)(SHORT_NS / 1000000000));
    }
    if (a->n_pending > 0)
        evict_oldest(a, now_ns);
    return now_ns - a->short_since_ns >= SHORT_NS ? st : SPCCL_OK;
}

static spccl_status accept_new(sp_acceptor *a, int64_t now_ns)
{
    for (;;) {
        struct sp_pending *p;
        int fd;
        if (a->n_pending == SP_ACCEPTOR_PENDING)
            evict_oldest(a, now_ns);
        if (a->n_pending == SP_ACCEPTOR_PENDING)
            return SPCCL_OK; /* the others stay in the kernel's backlog */
        fd = accept4(a->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EINTR || errno == ECONNABORTED)
                continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                a->short_since_ns = 0; /* Linux takes a descriptor first, and then looks for a connection */
                return SPCCL_OK;
            }
            if (is_shortage(errno))
                return wait_for_descriptors(a, now_ns);
            return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: accepting a connection", a->config.rank);
        }
        a->short_since_ns = 0;
        if (a->config.tcp)
            sp_sock_tune_tcp(fd);
        p = &a->pending[a->n_pending++];
        p->since_ns = now_ns;
        sp_hs_accept(&p->hs, fd, a->config.secret, a->config.check, a->config.ctx);
    }
}

spccl_status sp_acceptor_step(sp_acceptor *a)
{
    int64_t now_ns = sp_now_ns();
    SP_TRY(accept_new(a, now_ns));
    for (int i = 0; i < a->n_pending;) {
        sp_hs *hs = &a->pending[i].hs;
        spccl_status st = sp_hs_step(hs);
        if (st == SPCCL_OK) {
            sp_hs_hello hello = hs->hello;
            int fd = hs->fd;
            take_out(a, i);
            SP_TRY(a->config.ready(a->config.ctx, fd, &hello));
        } else if (st == SPCCL_AGAIN && now_ns - a->pending[i].since_ns > PATIENCE_NS) {
            drop(a, i, "it did not finish the handshake in time");
        } else if (st == SPCCL_AGAIN) {
            i++;
        } else {
            bool ours = hs->state == SP_HS_OVER && hs->result == SPCCL_ERR_MISMATCH;
            drop(a, i, spccl_last_error());
            if (ours)
                return st;
        }
    }
    return SPCCL_OK;
}

spccl_status sp_acceptor_step_peers(sp_acceptor *a, const sp_acceptor_peers *peers, sp_rank_list *missing)
{
    if (a->listen_fd >= 0)
        SP_TRY(sp_acceptor_step(a));
    for (int i = 0; i < peers->world_size; i++) {
        spccl_status st = peers->step(peers->ctx, i);
        if (st == SPCCL_AGAIN)
            sp_rank_list_add(missing, i);
        else if (st != SPCCL_OK)
            return SP_FAIL(st, "rank %d: %s rank %d%s: %s", a->config.rank, peers->before, i, peers->after,
                           spccl_last_error());
    }
    return missing->n == 0 ? SPCCL_OK : SPCCL_AGAIN;
}
