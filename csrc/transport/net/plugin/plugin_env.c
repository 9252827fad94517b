/* plugin_env.c - see plugin_env.h. */
#include "transport/net/plugin/plugin_env.h"

#include "core/base/log.h"
#include "core/base/mem.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;

/* ---- in the child ---- */

char **sp_plugin_env_copy(void)
{
    size_t n = 0;
    char **copy;
    while (environ != NULL && environ[n] != NULL)
        n++;
    copy = sp_calloc(n + 1, sizeof *copy);
    for (size_t i = 0; copy != NULL && i < n; i++) {
        copy[i] = strdup(environ[i]);
        if (copy[i] == NULL)
            return NULL;
    }
    return copy;
}

/* The first entry of that name, as getenv. NULL: there is none. */
static const char *find_entry(char *const *entries, const char *name, size_t n)
{
    for (; entries != NULL && *entries != NULL; entries++)
        if (strncmp(*entries, name, n) == 0 && (*entries)[n] == '=')
            return *entries;
    return NULL;
}

static void add_name(sp_plugin_env_changes *c, const char *name, size_t n)
{
    for (int i = 0; i < c->n; i++)
        if (strlen(c->names[i]) == n && memcmp(c->names[i], name, n) == 0)
            return;
    if (c->n == SP_PLUGIN_ENV_NAMES || n >= SP_PLUGIN_ENV_NAME_CAP) {
        c->n_unlisted++;
        return;
    }
    memcpy(c->names[c->n], name, n);
    c->names[c->n++][n] = '\0';
}

void sp_plugin_env_compare(char *const *before, sp_plugin_env_changes *out)
{
    char *const *lists[2] = {before, environ};
    *out = (sp_plugin_env_changes){0};
    for (int side = 0; side < 2; side++)
        for (char *const *e = lists[side]; e != NULL && *e != NULL; e++) {
            size_t n = strcspn(*e, "=");
            const char *old = find_entry(before, *e, n), *new = find_entry(environ, *e, n);
            bool same = old != NULL && new != NULL &&strcmp(old, new) == 0;
            if (!same && (old != NULL || new != NULL))
                add_name(out, *e, n);
        }
}

/* ---- in the process that loads the plugin ---- */

static void free_values(sp_plugin_env_values *v)
{
    for (int i = 0; i < SP_PLUGIN_ENV_NAMES; i++) {
        free(v->values[i]);
        v->values[i] = NULL;
    }
}

spccl_status sp_plugin_env_save(const sp_plugin_env_changes *changes, sp_plugin_env_values *out)
{
    *out = (sp_plugin_env_values){0};
    for (int i = 0; i < changes->n; i++) {
        const char *now = getenv(changes->names[i]);
        if (now == NULL)
            continue;
        out->values[i] = strdup(now);
        if (out->values[i] == NULL) {
            free_values(out);
            return SP_FAIL(SPCCL_ERR_NOMEM, "memory for the value of %s", changes->names[i]);
        }
    }
    return SPCCL_OK;
}

void sp_plugin_env_put_back(const sp_plugin_env_changes *changes, sp_plugin_env_values *saved,
                            const char *path)
{
    char names[SP_PLUGIN_ENV_NAMES * (SP_PLUGIN_ENV_NAME_CAP + 2)] = "", more[80] = "";
    for (int i = 0; i < changes->n; i++) {
        const char *name = changes->names[i], *old = saved->values[i], *now = getenv(name);
        size_t used = strlen(names);
        if (old == NULL ? now == NULL : now != NULL && strcmp(old, now) == 0)
            continue;
        if (old != NULL)
            setenv(name, old, 1);
        else
            unsetenv(name);
        snprintf(names + used, sizeof names - used, "%s%s", used != 0 ? ", " : "", name);
    }
    if (changes->n_unlisted != 0)
        snprintf(more, sizeof more, "; not put back: %d others", changes->n_unlisted);
    if (names[0] != '\0' || more[0] != '\0')
        sp_log(SP_LOG_WARN, -1, "NCCL net plugin %s changed environment variables; put back: %s%s", path,
               names[0] != '\0' ? names : "none", more);
    free_values(saved);
}
