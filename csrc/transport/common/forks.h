/* forks.h - a child of fork gets copies of every descriptor, and as long as it lives the other end of a
 * connection does not see that the parent is gone. So each owner of connections and listeners is watched
 * here, and its descriptors are closed in every child at once. (exec closes them by itself: all are
 * close-on-exec.) */
#ifndef SP_FORKS_H
#define SP_FORKS_H

#include <pthread.h>

/* Part of the owner; zeroed, then sp_fork_watch. */
typedef struct sp_fork_guard {
    struct sp_fork_guard *next, **at;
    void (*in_child)(
        void *owner); /* closes the child's copies and forgets them; only what a signal handler may do */
    void *owner;
    pthread_mutex_t lock; /* held by the owner while its descriptors change, so that fork sees them whole */
} sp_fork_guard;

/* `owner` stays where it is until sp_fork_unwatch. Neither is called with the lock held. */
void sp_fork_watch(sp_fork_guard *g, void (*in_child)(void *owner), void *owner);
/* Accepts one that is not watched. */
void sp_fork_unwatch(sp_fork_guard *g);

#endif
