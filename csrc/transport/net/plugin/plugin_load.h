/* plugin_load.h - finds an NCCL net plugin, tries it in a child process, and loads it into this one.
 *
 * A plugin is someone else's code: it may crash, hang, or change the environment. So it is first loaded by a
 * child process, which calls init and asks for the devices. If the child crashes or does not end in time, the
 * plugin is not usable, and the reason says at which call. A plugin that was loaded stays for the life of the
 * process: some register functions that run at exit. */
#ifndef SP_PLUGIN_LOAD_H
#define SP_PLUGIN_LOAD_H

#include "core/base/status.h"
#include "core/contract/transport.h"
#include "transport/net/plugin/plugin_abi.h"
#include "transport/net/segments/segments.h"

typedef struct sp_plugin_found {
    bool found;
    bool named; /* SPCCL_NET_PLUGIN or NCCL_NET_PLUGIN names a plugin */
    char path[SP_PLUGIN_PATH_CAP];
    char why[SP_NET_TEXT_CAP]; /* found: which variable or folder; else: what was looked for */
} sp_plugin_found;

/* Look for the plugin's file. Opens nothing. */
void sp_plugin_find(sp_plugin_found *out);

typedef struct sp_plugin_limits {
    int64_t deadline_ns; /* of the whole try */
    int64_t call_ns;     /* how long one call may take in the child process: SPCCL_DEBUG_NET_PLUGIN_MS */
} sp_plugin_limits;

/* Guards what all endpoints of this process share: its plugins, their last warning, the threads that were given up. A
 * fork waits for it. The caller holds no lock of an sp_fork_guard. */
void sp_plugin_lock(void);
void sp_plugin_unlock(void);

/* Try the plugin in a child process, then load it, once per process. Blocks; call it on a thread that nobody
 * joins without a deadline. *out stays valid. Errors: UNREACHABLE (not usable; later calls return the same);
 * SYSTEM, NOMEM, TIMEOUT (the deadline; a later call tries again). */
spccl_status sp_plugin_load(const char *path, const sp_plugin_limits *limits, const sp_plugin **out);
/* Only the try in a child process: for `spccl info`. `out` has no table. Errors: as sp_plugin_load. */
spccl_status sp_plugin_probe(const char *path, const sp_plugin_limits *limits, sp_plugin *out);
/* As sp_transport.inform: finds the plugin, and tries it in a child process, once. */
void sp_plugin_inform(const char **value, const char **why);
/* As sp_transport.device. */
bool sp_plugin_net_device(size_t i, sp_net_device *out);
/* The file of a path, for texts: a plugin's path may be longer than a text. */
const char *sp_plugin_file_name(const char *path);
/* "plugin NAME (PATH, vN), n devices: a (100000 Mbit/s), ..." */
void sp_plugin_list_devices(const sp_plugin *p, char *out, size_t cap);

#endif
