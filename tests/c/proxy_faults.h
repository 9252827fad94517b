/* proxy_faults.h - what fails in proxies and in memory, for tests. Programs are linked with --wrap of the functions
 * below (spccl_wrap_proxies in CMakeLists.txt). */
#ifndef SP_TEST_PROXY_FAULTS_H
#define SP_TEST_PROXY_FAULTS_H

#include "core/base/mem.h"
#include "core/base/thread.h"
#include "core/gpu/channels/channel_port.h"
#include "core/gpu/proxy/proxy.h"

#include <errno.h>
#include <stdatomic.h>

enum proxy_fault {
    PROXY_WORKS,
    PROXY_FAILS,    /* its next round returns an error */
    PROXY_EXITS,    /* its next round ends the thread */
    PROXY_NO_THREAD /* its thread cannot be started */
};

/* Of the proxies of rank `rank`, in the group of this name; NULL: in all groups. */
static struct {
    _Atomic(enum proxy_fault) what;
    int rank;
    const char *group;
} proxy_fault;

spccl_status __real_sp_proxy_round(sp_proxy *x, bool *moved);
spccl_status __wrap_sp_proxy_round(sp_proxy *x, bool *moved);
spccl_status __real_sp_port_round(sp_port *port, bool *moved);
spccl_status __wrap_sp_port_round(sp_port *port, bool *moved);
spccl_status __real_sp_thread_start(const char *name, void *(*fn)(void *arg), void *arg, pthread_t *out);
spccl_status __wrap_sp_thread_start(const char *name, void *(*fn)(void *arg), void *arg, pthread_t *out);

static inline bool proxy_has_fault(const spccl_comm *comm, enum proxy_fault what)
{
    return proxy_fault.what == what && comm->rank == proxy_fault.rank &&
           (proxy_fault.group == NULL || strcmp(comm->name, proxy_fault.group) == 0);
}

static inline spccl_status proxy_fail_round(const spccl_comm *comm)
{
    if (proxy_has_fault(comm, PROXY_EXITS))
        pthread_exit(NULL);
    return proxy_has_fault(comm, PROXY_FAILS) ? SP_FAIL(SPCCL_ERR_SYSTEM, "the test makes this round fail")
                                              : SPCCL_OK;
}

spccl_status __wrap_sp_proxy_round(sp_proxy *x, bool *moved)
{
    SP_TRY(proxy_fail_round(x->r->g->comm));
    return __real_sp_proxy_round(x, moved);
}

spccl_status __wrap_sp_port_round(sp_port *port, bool *moved)
{
    SP_TRY(proxy_fail_round(port->c->g->comm));
    return __real_sp_port_round(port, moved);
}

spccl_status __wrap_sp_thread_start(const char *name, void *(*fn)(void *arg), void *arg, pthread_t *out)
{
    bool is_proxy = strcmp(name, "spccl-proxy") == 0 || strcmp(name, "spccl-channels") == 0;
    if (is_proxy && proxy_has_fault(((const sp_proxy_thread *)arg)->g->comm, PROXY_NO_THREAD)) {
        errno = EAGAIN; /* what pthread_create gives at a limit of threads */
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "starting thread \"%s\"", name);
    }
    return __real_sp_thread_start(name, fn, arg, out);
}

#endif
