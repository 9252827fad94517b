/* plugin_stop.c - ends the thread of an ncclnet endpoint, and gives it up if it hangs in the plugin. On the caller's
 * thread. See plugin.h. */
#include "core/base/clock.h"
#include "core/base/log.h"
#include "transport/net/plugin/plugin.h"

#include <stdio.h>
#include <unistd.h>

#define MS INT64_C(1000000)
#define STOP_MS 5000 /* closing waits this long for the thread */
#define END_MS 1000  /* and then for its end: destructors that the plugin registered */
#define LOOK_AGAIN_NS (100 * MS)

bool sp_plugin_thread_hangs(struct sp_plugin_endpoint *ep, char *out, size_t cap)
{
    int64_t since_ns = atomic_load_explicit(&ep->call_since_ns, memory_order_acquire);
    int64_t now_ns = sp_now_ns();
    int peer = atomic_load(&ep->call_peer);
    char device[80];
    if (since_ns == 0 || now_ns - since_ns < ep->call_limit_ns)
        return false;
    if (ep->slow_call_ns != since_ns) {
        ep->slow_call_ns = since_ns;
        ep->slow_seen_ns = now_ns;
    }
    if (now_ns - ep->slow_seen_ns < LOOK_AGAIN_NS)
        return false;
    sp_plugin_device_text(ep, atomic_load(&ep->call_device), device, sizeof device);
    snprintf(out, cap, "%s: plugin %s: %s for rank %d did not return in %lld ms (queue %d)", device,
             ep->plugin->name, sp_plugin_fn_name((enum sp_plugin_fn)atomic_load(&ep->call_fn)), peer,
             (long long)((now_ns - since_ns) / 1000000), atomic_load(&ep->call_queue));
    return true;
}

void sp_plugin_give_back_cards(struct sp_plugin_endpoint *ep)
{
    if (!atomic_exchange(&ep->has_cards, false))
        return;
    for (int i = 0; i < ep->n_used; i++)
        sp_nic_give_back("ncclnet", &ep->plugin->devices[ep->used[i]].nic);
}

/* Keeps what abandoned threads may still use. */
static struct sp_plugin_endpoint *lost;

void sp_plugin_thread_abandon(struct sp_plugin_endpoint *ep, const char *why)
{
    if (!ep->started || ep->thread_lost)
        return;
    atomic_store(&ep->abandoned, true);
    atomic_store(&ep->stop, true);
    ep->thread_lost = true;
    snprintf(ep->lost_text, sizeof ep->lost_text, "%s", why);
    (void)pthread_detach(ep->thread);
    sp_plugin_lock();
    ep->next_lost = lost;
    lost = ep;
    sp_plugin_unlock();
    sp_log(SP_LOG_WARN, ep->base.config.rank, "ncclnet: a thread and its buffers are left behind: %s", why);
}

/* False: the thread did not end in time. */
static bool join_in_time(struct sp_plugin_endpoint *ep)
{
    int64_t deadline_ns = sp_deadline_in_ms(STOP_MS);
    bool exited = false;
    while (!sp_deadline_passed(deadline_ns)) {
        if (!exited && atomic_load(&ep->exited)) {
            exited = true;
            deadline_ns = sp_deadline_in_ms(END_MS);
        }
        /* pthread_timedjoin_np would wait by the wall clock, which an administrator may set. */
        if (exited && pthread_tryjoin_np(ep->thread, NULL) == 0)
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    return false;
}

void sp_plugin_thread_stop(struct sp_plugin_endpoint *ep)
{
    if (!ep->started || ep->thread_lost || ep->base.pid != getpid())
        return;
    atomic_store(&ep->stop, true);
    sp_plugin_thread_kick(ep);
    if (!join_in_time(ep)) {
        char text[sizeof ep->lost_text];
        if (atomic_load(&ep->load) == SP_PLUGIN_LOAD_RUNS) /* `plugin` may change at any time */
            snprintf(
                text, sizeof text,
                "NCCL net plugin %.60s: it did not finish loading or listening while the group was closed",
                sp_plugin_file_name(ep->found.path));
        else
            snprintf(
                text, sizeof text, "plugin %.60s: %s for rank %d did not return while the group was closed",
                ep->plugin != NULL ? ep->plugin->name : sp_plugin_file_name(ep->found.path),
                sp_plugin_fn_name((enum sp_plugin_fn)atomic_load(&ep->call_fn)), atomic_load(&ep->call_peer));
        sp_plugin_thread_abandon(ep, text);
        return;
    }
    pthread_cond_destroy(&ep->wake);
    pthread_mutex_destroy(&ep->lock);
}
