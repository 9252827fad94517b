/* ncclnet_info.c - what `spccl info` says about NCCL net plugins. See ncclnet_load.h. */
#include "core/base/clock.h"
#include "core/base/env.h"
#include "transport/net/ncclnet_load.h"

#include <pthread.h>
#include <stdio.h>

static const char *value_text;
static sp_nn_plugin seen; /* n_used = 0: no usable plugin */
static char why_text[SP_NN_PATH_CAP + 800];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void look(void)
{
    sp_nn_found found;
    sp_nn_plugin plugin;
    sp_nn_limits limits;
    int64_t limit_ms = 10000;
    char devices[sizeof why_text / 2];
    sp_nn_find(&found);
    if (!found.found) {
        value_text = "in, no plugin";
        snprintf(why_text, sizeof why_text, "%s", found.why);
        return;
    }
    (void)sp_env_number(SP_ENV_NET_PLUGIN_MS, &limit_ms);
    limits = (sp_nn_limits){.deadline_ns = sp_deadline_in_ms(limit_ms), .call_ns = limit_ms * 1000000};
    if (sp_nn_probe(found.path, &limits, &plugin) != SPCCL_OK) {
        value_text = "in, plugin not usable";
        snprintf(why_text, sizeof why_text, "%s; %s", found.why, spccl_last_error());
        return;
    }
    value_text = "in, plugin usable";
    seen = plugin;
    sp_nn_describe(&plugin, devices, sizeof devices);
    snprintf(why_text, sizeof why_text, "%s; %s", found.why, devices);
}

void sp_nn_inform(const char **value, const char **why)
{
    pthread_once(&once, look);
    *value = value_text;
    *why = why_text;
}

bool sp_nn_net_device(size_t i, sp_net_device *out)
{
    pthread_once(&once, look);
    if (i >= (size_t)seen.n_used)
        return false;
    *out = (sp_net_device){.why = "over a net plugin frames pass through pinned memory"};
    snprintf(out->name, sizeof out->name, "%s", seen.devices[seen.used[i]].name);
    return true;
}
