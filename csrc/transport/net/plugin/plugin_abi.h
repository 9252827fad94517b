/* plugin_abi.h - the tables of NCCL net plugins, versions 8 to 12, in our own declarations. A plugin exports
 * `ncclNetPlugin_vN`: a name and function pointers. Their order is the same in all these versions, so one list of
 * fns serves all. The parameters differ: plugin_abi.c has one cast per version, and nothing else needs to
 * know the version.
 *
 * Every function here calls the plugin, and returns the plugin's result: 0 is success. A plugin may hang: only
 * threads that nobody joins without a deadline call these. */
#ifndef SP_PLUGIN_ABI_H
#define SP_PLUGIN_ABI_H

#include "core/contract/transport.h"
#include "spccl.h"
#include "transport/common/nics.h"

#include <stdbool.h>

#define SP_PLUGIN_VERSION_MIN 8
#define SP_PLUGIN_VERSION_MAX 12
#define SP_PLUGIN_HANDLE_BYTES 128u
#define SP_PLUGIN_NAME_CAP 40
#define SP_PLUGIN_DEVICES_MAX 16 /* devices that are looked at */
#define SP_PLUGIN_PATH_CAP 400

enum sp_plugin_fn {
    SP_PLUGIN_INIT,
    SP_PLUGIN_DEVICES,
    SP_PLUGIN_GET_PROPERTIES,
    SP_PLUGIN_LISTEN,
    SP_PLUGIN_CONNECT,
    SP_PLUGIN_ACCEPT,
    SP_PLUGIN_REG_MR,
    SP_PLUGIN_REG_MR_DMABUF,
    SP_PLUGIN_DEREG_MR,
    SP_PLUGIN_ISEND,
    SP_PLUGIN_IRECV,
    SP_PLUGIN_IFLUSH,
    SP_PLUGIN_TEST,
    SP_PLUGIN_CLOSE_SEND,
    SP_PLUGIN_CLOSE_RECV,
    SP_PLUGIN_CLOSE_LISTEN,
    SP_PLUGIN_GET_DEVICE_MR,
    SP_PLUGIN_IRECV_CONSUMED,
    SP_PLUGIN_MAKE_VDEVICE, /* from version 9 on */
    SP_PLUGIN_FINALIZE,     /* from version 11 on */
    SP_PLUGIN_SET_NET_ATTR, /* from version 11 on */
    SP_PLUGIN_N_FNS
};

/* What a plugin exports. A table of an older version ends earlier. */
typedef struct sp_plugin_table {
    const char *name;
    void (*fns[SP_PLUGIN_N_FNS])(void);
} sp_plugin_table;

typedef void (*sp_plugin_logger)(int level, unsigned long subsystems, const char *where, int line,
                                 const char *fmt, ...);

typedef struct sp_plugin_device {
    char name[SP_PLUGIN_NAME_CAP];
    sp_nic nic;     /* the card */
    int speed_mbps; /* 0: unknown */
    int port, max_comms;
} sp_plugin_device;

/* A loaded plugin. */
typedef struct sp_plugin {
    const sp_plugin_table *table;
    int version;
    void *context; /* from version 11 on: what init returned */
    char name[SP_PLUGIN_NAME_CAP], path[SP_PLUGIN_PATH_CAP];
    int n_devices;
    sp_plugin_device devices[SP_PLUGIN_DEVICES_MAX];
    int n_used, used[SP_PLUGIN_DEVICES_MAX]; /* the fastest devices: all have the same speed */
} sp_plugin;

/* False if the table lacks a function that every plugin must have; *missing is its name. */
bool sp_plugin_complete(const sp_plugin_table *table, const char **missing);
/* "system error", for a result that is not 0. */
const char *sp_plugin_result_text(int result);
const char *sp_plugin_fn_name(enum sp_plugin_fn fn);

int sp_plugin_init(sp_plugin *p, sp_plugin_logger logger);
int sp_plugin_devices(const sp_plugin *p, int *n);
int sp_plugin_get_device(const sp_plugin *p, int dev, sp_plugin_device *out);
/* Does nothing for versions before 11. */
int sp_plugin_finalize(const sp_plugin *p);
int sp_plugin_listen(const sp_plugin *p, int dev, void *handle, void **comm);
/* *comm stays NULL while the connection is not there yet. */
int sp_plugin_connect(const sp_plugin *p, int dev, void *handle, void **comm);
int sp_plugin_accept(const sp_plugin *p, void *listener, void **comm);
int sp_plugin_reg_host(const sp_plugin *p, void *comm, void *data, size_t bytes, void **mr);
int sp_plugin_dereg(const sp_plugin *p, void *comm, void *mr);

typedef struct sp_plugin_transfer {
    void *comm, *data, *mr;
    size_t bytes;
    int tag;
} sp_plugin_transfer;
/* *request stays NULL if the plugin cannot take the transfer now. */
int sp_plugin_isend(const sp_plugin *p, const sp_plugin_transfer *t, void **request);
/* `bytes` is the most that may arrive. */
int sp_plugin_irecv(const sp_plugin *p, const sp_plugin_transfer *t, void **request);
int sp_plugin_test(const sp_plugin *p, void *request, bool *done, int *bytes);
/* fn: SP_PLUGIN_CLOSE_SEND, SP_PLUGIN_CLOSE_RECV or SP_PLUGIN_CLOSE_LISTEN. */
int sp_plugin_close(const sp_plugin *p, enum sp_plugin_fn fn, void *comm);

#endif
