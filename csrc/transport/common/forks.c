/* forks.c - see forks.h. */
#include "transport/common/forks.h"

#include "core/base/process.h"

#include <stddef.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int install_error;
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static sp_fork_guard *list;

static void prepare(void)
{
    pthread_mutex_lock(&list_lock);
    for (sp_fork_guard *g = list; g != NULL; g = g->next)
        pthread_mutex_lock(&g->lock);
}

static void in_parent(void)
{
    for (sp_fork_guard *g = list; g != NULL; g = g->next)
        pthread_mutex_unlock(&g->lock);
    pthread_mutex_unlock(&list_lock);
}

static void in_child(void)
{
    for (sp_fork_guard *g = list; g != NULL; g = g->next)
        if (g->in_child != NULL)
            g->in_child(g->owner);
    in_parent();
}

static void install(void)
{
    install_error = pthread_atfork(prepare, in_parent, in_child);
}

spccl_status sp_fork_watch_static(sp_fork_guard *g, void (*child)(void *owner), void *owner)
{
    pthread_once(&once, install);
    SP_TRY(sp_atfork_status(install_error));
    pthread_mutex_lock(&list_lock);
    if (!g->watched) {
        g->watched = true;
        g->in_child = child;
        g->owner = owner;
        g->next = list;
        g->at = &list;
        if (list != NULL)
            list->at = &g->next;
        list = g;
    }
    pthread_mutex_unlock(&list_lock);
    return SPCCL_OK;
}

spccl_status sp_fork_watch(sp_fork_guard *g, void (*child)(void *owner), void *owner)
{
    spccl_status st;
    pthread_mutex_init(&g->lock, NULL);
    st = sp_fork_watch_static(g, child, owner);
    if (st != SPCCL_OK)
        pthread_mutex_destroy(&g->lock);
    return st;
}

void sp_fork_unwatch(sp_fork_guard *g)
{
    if (!g->watched)
        return;
    pthread_mutex_lock(&list_lock);
    *g->at = g->next;
    if (g->next != NULL)
        g->next->at = g->at;
    pthread_mutex_unlock(&list_lock);
    g->watched = false;
    pthread_mutex_destroy(&g->lock);
}
