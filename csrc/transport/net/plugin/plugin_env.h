/* plugin_env.h - what loading a plugin changes in the environment, found and put back.
 *
 * getenv of other threads may run at any time, so this process never walks its environment. The child that tries
 * the plugin has one thread: it compares its environment before and after, and reports the names. This process
 * then saves the values of these names alone, loads the plugin, and puts back what changed. Putting back calls
 * setenv or unsetenv while other threads may call getenv, as the plugin did just before. The alternative, a
 * warning alone, would leave variables such as NCCL_PROTO set for NCCL in this process. A plugin that changes
 * nothing causes no call of setenv. */
#ifndef SP_PLUGIN_ENV_H
#define SP_PLUGIN_ENV_H

#include "core/base/status.h"

#include <stddef.h>

#define SP_PLUGIN_ENV_NAMES 16
#define SP_PLUGIN_ENV_NAME_CAP 64

/* Plain data: the child writes it to shared memory. */
typedef struct sp_plugin_env_changes {
    int n;
    int n_unlisted; /* changed names that do not fit; they are not put back */
    char names[SP_PLUGIN_ENV_NAMES][SP_PLUGIN_ENV_NAME_CAP];
} sp_plugin_env_changes;

typedef struct sp_plugin_env_values {
    char *values[SP_PLUGIN_ENV_NAMES]; /* owned; NULL: not set */
} sp_plugin_env_values;

/* A copy of the environment, NULL without memory. Only for a process with one thread, which ends soon: nothing
 * frees it. */
char **sp_plugin_env_copy(void);
/* Find the names whose values differ between a copy and now. Only for a process with one thread. */
void sp_plugin_env_compare(char *const *before, sp_plugin_env_changes *out);
/* The values that these names have now. Errors: NOMEM; then nothing is kept. */
spccl_status sp_plugin_env_save(const sp_plugin_env_changes *changes, sp_plugin_env_values *out);
/* Put back the values that changed since, free them, and log the names with the plugin's path. */
void sp_plugin_env_put_back(const sp_plugin_env_changes *changes, sp_plugin_env_values *saved,
                            const char *path);

#endif
