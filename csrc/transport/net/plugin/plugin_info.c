/* plugin_info.c - what `spccl info` says about NCCL net plugins. See plugin_load.h. */
#include "core/base/clock.h"
#include "core/base/env.h"
#include "transport/net/plugin/plugin_load.h"

#include <pthread.h>
#include <stdio.h>

static const char *value_text;
static sp_plugin seen; /* n_used = 0: no usable plugin */
static char why_text[SP_PLUGIN_PATH_CAP + 800];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void try_plugin(void)
{
    sp_plugin_found found;
    sp_plugin plugin;
    sp_plugin_limits limits;
    int64_t limit_ms = 10000;
    char devices[sizeof why_text / 2];
    sp_plugin_find(&found);
    if (!found.found) {
        value_text = "in, no plugin";
        snprintf(why_text, sizeof why_text, "%s", found.why);
        return;
    }
    (void)sp_env_number(SP_ENV_NET_PLUGIN_MS, &limit_ms);
    limits = (sp_plugin_limits){.deadline_ns = sp_deadline_in_ms(limit_ms), .call_ns = limit_ms * 1000000};
    if (sp_plugin_probe(found.path, &limits, &plugin) != SPCCL_OK) {
        value_text = "in, plugin not usable";
        snprintf(why_text, sizeof why_text, "%s; %s", found.why, spccl_last_error());
        return;
    }
    value_text = "in, plugin usable";
    seen = plugin;
    sp_plugin_list_devices(&plugin, devices, sizeof devices);
    snprintf(why_text, sizeof why_text, "%s; %s", found.why, devices);
}

void sp_plugin_inform(const char **value, const char **why)
{
    pthread_once(&once, try_plugin);
    *value = value_text;
    *why = why_text;
}

bool sp_plugin_net_device(size_t i, sp_net_device *out)
{
    pthread_once(&once, try_plugin);
    if (i >= (size_t)seen.n_used)
        return false;
    *out = (sp_net_device){.why = "over a net plugin frames pass through pinned memory"};
    snprintf(out->name, sizeof out->name, "%s", seen.devices[seen.used[i]].name);
    return true;
}
