/* plugin_abi.c - see plugin_abi.h. */
#include "transport/net/plugin/plugin_abi.h"

#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define COMM_ID UINT64_C(0x5350434c4e455400)
#define POINTER_HOST 1 /* NCCL_PTR_HOST */

/* The start of the properties of a device. Version 9 inserted `force_flush`. What follows is not read. */
struct props_8 {
    char *name, *pci_path;
    uint64_t guid;
    int pointers, reg_is_global, speed, port;
    float latency;
    int max_comms, max_recvs, device_type, device_version;
};
struct props_9 {
    char *name, *pci_path;
    uint64_t guid;
    int pointers, reg_is_global, force_flush, speed, port;
    float latency;
    int max_comms, max_recvs, device_type, device_version;
};
_Static_assert(offsetof(struct props_8, speed) == 32 && offsetof(struct props_9, speed) == 36, "as in NCCL");

/* A plugin writes the whole struct of its version: 120 bytes in version 12. */
union props {
    struct props_8 v8;
    struct props_9 v9;
    uint8_t bytes[512];
};

struct config_10 {
    int traffic_class; /* -1: the network's default */
};

/* The functions whose parameters differ between versions, and the others. */
typedef int (*init_8)(sp_plugin_logger logger);
typedef int (*init_10)(sp_plugin_logger logger, void *profiler);
typedef int (*init_11)(void **context, uint64_t comm_id, struct config_10 *config, sp_plugin_logger logger,
                       void *profiler);
typedef int (*listen_8)(int dev, void *handle, void **comm);
typedef int (*listen_11)(void *context, int dev, void *handle, void **comm);
typedef int (*connect_8)(int dev, void *handle, void **comm, void **device_comm);
typedef int (*connect_10)(int dev, struct config_10 *config, void *handle, void **comm, void **device_comm);
typedef int (*connect_11)(void *context, int dev, void *handle, void **comm, void **device_comm);
typedef int (*isend_8)(void *comm, void *data, int bytes, int tag, void *mr, void **request);
typedef int (*isend_9)(void *comm, void *data, size_t bytes, int tag, void *mr, void **request);
typedef int (*isend_10)(void *comm, void *data, size_t bytes, int tag, void *mr, void *profile,
                        void **request);
typedef int (*irecv_8)(void *comm, int n, void **data, int *bytes, int *tags, void **mrs, void **request);
typedef int (*irecv_9)(void *comm, int n, void **data, size_t *bytes, int *tags, void **mrs, void **request);
typedef int (*irecv_10)(void *comm, int n, void **data, size_t *bytes, int *tags, void **mrs, void **profiles,
                        void **request);
typedef int (*devices_fn)(int *n);
typedef int (*properties_fn)(int dev, void *props);
typedef int (*accept_fn)(void *listener, void **comm, void **device_comm);
typedef int (*reg_fn)(void *comm, void *data, size_t bytes, int type, void **mr);
typedef int (*dereg_fn)(void *comm, void *mr);
typedef int (*test_fn)(void *request, int *done, int *bytes);
typedef int (*close_fn)(void *comm);

#define CALL(p, type, fn) ((type)(p)->table->fns[fn])

static const char *const fn_names[SP_PLUGIN_N_FNS] = {
    "init",        "devices",     "getProperties", "listen",        "connect",     "accept",   "regMr",
    "regMrDmaBuf", "deregMr",     "isend",         "irecv",         "iflush",      "test",     "closeSend",
    "closeRecv",   "closeListen", "getDeviceMr",   "irecvConsumed", "makeVDevice", "finalize", "setNetAttr"};

const char *sp_plugin_fn_name(enum sp_plugin_fn fn)
{
    return fn_names[fn];
}

bool sp_plugin_complete(const sp_plugin_table *table, const char **missing)
{
    static const enum sp_plugin_fn needed[] = {
        SP_PLUGIN_INIT,       SP_PLUGIN_DEVICES,     SP_PLUGIN_GET_PROPERTIES, SP_PLUGIN_LISTEN,
        SP_PLUGIN_CONNECT,    SP_PLUGIN_ACCEPT,      SP_PLUGIN_REG_MR,         SP_PLUGIN_DEREG_MR,
        SP_PLUGIN_ISEND,      SP_PLUGIN_IRECV,       SP_PLUGIN_TEST,           SP_PLUGIN_CLOSE_SEND,
        SP_PLUGIN_CLOSE_RECV, SP_PLUGIN_CLOSE_LISTEN};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (table->fns[needed[i]] == NULL) {
            *missing = fn_names[needed[i]];
            return false;
        }
    return true;
}

const char *sp_plugin_result_text(int result)
{
    static const char *const texts[] = {"success",        "CUDA error",       "system error",
                                        "internal error", "invalid argument", "invalid usage",
                                        "remote error",   "in progress",      "time-out"};
    return result >= 0 && result < (int)(sizeof texts / sizeof *texts) ? texts[result] : "unknown result";
}

int sp_plugin_init(sp_plugin *p, sp_plugin_logger logger)
{
    struct config_10 config = {.traffic_class = -1};
    if (p->version >= 11)
        return CALL(p, init_11, SP_PLUGIN_INIT)(&p->context, COMM_ID, &config, logger, NULL);
    if (p->version == 10)
        return CALL(p, init_10, SP_PLUGIN_INIT)(logger, NULL);
    return CALL(p, init_8, SP_PLUGIN_INIT)(logger);
}

int sp_plugin_devices(const sp_plugin *p, int *n)
{
    return CALL(p, devices_fn, SP_PLUGIN_DEVICES)(n);
}

int sp_plugin_get_device(const sp_plugin *p, int dev, sp_plugin_device *out)
{
    union props props = {.bytes = {0}};
    const char *name, *pci_path;
    int result = CALL(p, properties_fn, SP_PLUGIN_GET_PROPERTIES)(dev, &props);
    bool old = p->version == 8;
    if (result != 0)
        return result;
    name = old ? props.v8.name : props.v9.name;
    *out = (sp_plugin_device){.speed_mbps = old ? props.v8.speed : props.v9.speed,
                              .port = old ? props.v8.port : props.v9.port,
                              .max_comms = old ? props.v8.max_comms : props.v9.max_comms};
    pci_path = old ? props.v8.pci_path : props.v9.pci_path;
    if (out->speed_mbps < 0)
        out->speed_mbps = 0;
    snprintf(out->name, sizeof out->name, "%s", name != NULL ? name : "without name");
    snprintf(out->nic.names[0], sizeof out->nic.names[0], "%s", name != NULL ? name : "");
    sp_nic_read_pci(pci_path != NULL ? pci_path : "", out->nic.pci);
    return 0;
}

int sp_plugin_finalize(const sp_plugin *p)
{
    if (p->version < 11 || p->table->fns[SP_PLUGIN_FINALIZE] == NULL)
        return 0;
    return CALL(p, close_fn, SP_PLUGIN_FINALIZE)(p->context);
}

int sp_plugin_listen(const sp_plugin *p, int dev, void *handle, void **comm)
{
    if (p->version >= 11)
        return CALL(p, listen_11, SP_PLUGIN_LISTEN)(p->context, dev, handle, comm);
    return CALL(p, listen_8, SP_PLUGIN_LISTEN)(dev, handle, comm);
}

/* `device_comm` must point to NULL: another value would ask for offload to a device. */
int sp_plugin_connect(const sp_plugin *p, int dev, void *handle, void **comm)
{
    struct config_10 config = {.traffic_class = -1};
    void *device_comm = NULL;
    if (p->version >= 11)
        return CALL(p, connect_11, SP_PLUGIN_CONNECT)(p->context, dev, handle, comm, &device_comm);
    if (p->version == 10)
        return CALL(p, connect_10, SP_PLUGIN_CONNECT)(dev, &config, handle, comm, &device_comm);
    return CALL(p, connect_8, SP_PLUGIN_CONNECT)(dev, handle, comm, &device_comm);
}

int sp_plugin_accept(const sp_plugin *p, void *listener, void **comm)
{
    void *device_comm = NULL;
    return CALL(p, accept_fn, SP_PLUGIN_ACCEPT)(listener, comm, &device_comm);
}

int sp_plugin_reg_host(const sp_plugin *p, void *comm, void *data, size_t bytes, void **mr)
{
    return CALL(p, reg_fn, SP_PLUGIN_REG_MR)(comm, data, bytes, POINTER_HOST, mr);
}

int sp_plugin_dereg(const sp_plugin *p, void *comm, void *mr)
{
    return CALL(p, dereg_fn, SP_PLUGIN_DEREG_MR)(comm, mr);
}

/* *request is an input too: another value than NULL changes what some plugins do. */
int sp_plugin_isend(const sp_plugin *p, const sp_plugin_transfer *t, void **request)
{
    *request = NULL;
    if (p->version >= 10)
        return CALL(p, isend_10, SP_PLUGIN_ISEND)(t->comm, t->data, t->bytes, t->tag, t->mr, NULL, request);
    if (p->version == 9)
        return CALL(p, isend_9, SP_PLUGIN_ISEND)(t->comm, t->data, t->bytes, t->tag, t->mr, request);
    return CALL(p, isend_8, SP_PLUGIN_ISEND)(t->comm, t->data, (int)t->bytes, t->tag, t->mr, request);
}

/* One buffer per call: some plugins of version 8 receive into the first buffer only, whatever n is. */
int sp_plugin_irecv(const sp_plugin *p, const sp_plugin_transfer *t, void **request)
{
    void *data = t->data, *mr = t->mr, *profile = NULL;
    size_t bytes = t->bytes;
    int tag = t->tag, bytes_8 = (int)t->bytes;
    *request = NULL;
    if (p->version >= 10)
        return CALL(p, irecv_10, SP_PLUGIN_IRECV)(t->comm, 1, &data, &bytes, &tag, &mr, &profile, request);
    if (p->version == 9)
        return CALL(p, irecv_9, SP_PLUGIN_IRECV)(t->comm, 1, &data, &bytes, &tag, &mr, request);
    return CALL(p, irecv_8, SP_PLUGIN_IRECV)(t->comm, 1, &data, &bytes_8, &tag, &mr, request);
}

int sp_plugin_test(const sp_plugin *p, void *request, bool *done, int *bytes)
{
    /* A plugin that groups receives may write one size for each. */
    int is_done = 0, sizes[8] = {0};
    int result = CALL(p, test_fn, SP_PLUGIN_TEST)(request, &is_done, sizes);
    *done = is_done != 0;
    *bytes = sizes[0];
    return result;
}

int sp_plugin_close(const sp_plugin *p, enum sp_plugin_fn fn, void *comm)
{
    return CALL(p, close_fn, fn)(comm);
}
