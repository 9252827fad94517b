/* ncclnet_abi.h - the tables of NCCL net plugins, versions 8 to 12, in our own declarations. A plugin exports
 * `ncclNetPlugin_vN`: a name and function pointers. Their order is the same in all these versions, so one list of
 * slots serves all. The parameters differ: ncclnet_abi.c has one cast per version, and nothing else needs to
 * know the version.
 *
 * Every function here calls the plugin, and returns the plugin's result: 0 is success. A plugin may hang: only
 * threads that nobody joins without a deadline call these. */
#ifndef SP_NCCLNET_ABI_H
#define SP_NCCLNET_ABI_H

#include "core/contract/transport.h"
#include "spccl.h"
#include "transport/common/nics.h"

#include <stdbool.h>

#define SP_NN_VERSION_MIN 8
#define SP_NN_VERSION_MAX 12
#define SP_NN_HANDLE_BYTES 128u
#define SP_NN_NAME_CAP 40
#define SP_NN_DEVICES_MAX 16 /* devices that are looked at */
#define SP_NN_TEXT_CAP 200
#define SP_NN_PATH_CAP 400

enum sp_nn_slot {
    SP_NN_INIT,
    SP_NN_DEVICES,
    SP_NN_GET_PROPERTIES,
    SP_NN_LISTEN,
    SP_NN_CONNECT,
    SP_NN_ACCEPT,
    SP_NN_REG_MR,
    SP_NN_REG_MR_DMABUF,
    SP_NN_DEREG_MR,
    SP_NN_ISEND,
    SP_NN_IRECV,
    SP_NN_IFLUSH,
    SP_NN_TEST,
    SP_NN_CLOSE_SEND,
    SP_NN_CLOSE_RECV,
    SP_NN_CLOSE_LISTEN,
    SP_NN_GET_DEVICE_MR,
    SP_NN_IRECV_CONSUMED,
    SP_NN_MAKE_VDEVICE, /* from version 9 on */
    SP_NN_FINALIZE,     /* from version 11 on */
    SP_NN_SET_NET_ATTR, /* from version 11 on */
    SP_NN_N_SLOTS
};

/* What a plugin exports. A table of an older version ends earlier. */
typedef struct sp_nn_table {
    const char *name;
    void (*slots[SP_NN_N_SLOTS])(void);
} sp_nn_table;

typedef void (*sp_nn_logger)(int level, unsigned long subsystems, const char *where, int line,
                             const char *fmt, ...);

typedef struct sp_nn_device {
    char name[SP_NN_NAME_CAP];
    sp_nic nic;     /* the card */
    int speed_mbps; /* 0: unknown */
    int port, max_comms;
} sp_nn_device;

/* A loaded plugin. */
typedef struct sp_nn_plugin {
    const sp_nn_table *table;
    int version;
    void *context; /* from version 11 on: what init returned */
    char name[SP_NN_NAME_CAP], path[SP_NN_PATH_CAP];
    int n_devices;
    sp_nn_device devices[SP_NN_DEVICES_MAX];
    int n_used, used[SP_NN_DEVICES_MAX]; /* the fastest devices: all have the same speed */
} sp_nn_plugin;

/* False if the table lacks a function that every plugin must have; *missing is its name. */
bool sp_nn_complete(const sp_nn_table *table, const char **missing);
/* "system error", for a result that is not 0. */
const char *sp_nn_result_text(int result);
const char *sp_nn_slot_name(enum sp_nn_slot slot);

int sp_nn_init(sp_nn_plugin *p, sp_nn_logger logger);
int sp_nn_devices(const sp_nn_plugin *p, int *n);
int sp_nn_get_device(const sp_nn_plugin *p, int dev, sp_nn_device *out);
/* Does nothing for versions before 11. */
int sp_nn_finalize(const sp_nn_plugin *p);
int sp_nn_listen(const sp_nn_plugin *p, int dev, void *handle, void **comm);
/* *comm stays NULL while the connection is not there yet. */
int sp_nn_connect(const sp_nn_plugin *p, int dev, void *handle, void **comm);
int sp_nn_accept(const sp_nn_plugin *p, void *listener, void **comm);
int sp_nn_reg_host(const sp_nn_plugin *p, void *comm, void *data, size_t bytes, void **mr);
int sp_nn_dereg(const sp_nn_plugin *p, void *comm, void *mr);

typedef struct sp_nn_transfer {
    void *comm, *data, *mr;
    size_t bytes;
    int tag;
} sp_nn_transfer;
/* *request stays NULL if the plugin cannot take the transfer now. */
int sp_nn_isend(const sp_nn_plugin *p, const sp_nn_transfer *t, void **request);
/* `bytes` is the most that may arrive. */
int sp_nn_irecv(const sp_nn_plugin *p, const sp_nn_transfer *t, void **request);
int sp_nn_test(const sp_nn_plugin *p, void *request, bool *done, int *bytes);
/* slot: SP_NN_CLOSE_SEND, SP_NN_CLOSE_RECV or SP_NN_CLOSE_LISTEN. */
int sp_nn_close(const sp_nn_plugin *p, enum sp_nn_slot slot, void *comm);

#endif
