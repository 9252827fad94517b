/* forks.h - closes descriptors in children of fork. A child gets a copy of every descriptor. As long as it
 * lives, the other end of a connection does not see that the parent is gone. So each owner of connections and
 * listeners registers here, and every child closes its copies at once. exec needs no help: all are
 * close-on-exec. */
#ifndef SP_FORKS_H
#define SP_FORKS_H

#include "core/base/status.h"

#include <pthread.h>

/* A member of the owner. Zero it, then call sp_fork_watch. Or a static one, whose lock has an initializer. */
typedef struct sp_fork_guard {
    struct sp_fork_guard *next, **at;
    /* Closes the child's copies. May only do what a signal handler may do. */
    void (*in_child)(void *owner);
    void *owner;
    bool watched;
    pthread_mutex_t lock; /* the owner holds it while its descriptors change; fork waits for it */
} sp_fork_guard;

/* Register `owner`, whose address must not change until sp_fork_unwatch. The caller of both functions does
 * not hold the lock. Errors: NOMEM; then the guard is not registered. */
spccl_status sp_fork_watch(sp_fork_guard *g, void (*in_child)(void *owner), void *owner);
/* The same for a static guard, which stays: call it before each lock. in_child may be NULL. */
spccl_status sp_fork_watch_static(sp_fork_guard *g, void (*in_child)(void *owner), void *owner);
/* Accepts a guard that is not registered. */
void sp_fork_unwatch(sp_fork_guard *g);

#endif
