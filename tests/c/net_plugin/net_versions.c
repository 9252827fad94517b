/* net_versions.c - the tables of the test plugin, one per version of NCCL's interface. TEST_NET_VERSION chooses the
 * one that is exported; 0: 8 to 12. The structs are an independent second writing of those in plugin_abi.c, so that a
 * mistake there shows. See net_plugin.c. */
#include "net_plugin.h"

#include <stdio.h>
#include <string.h>

#ifndef TEST_NET_VERSION
#define TEST_NET_VERSION 0
#endif
#define CONTEXT ((void *)0x1234)

struct props_8 {
    char *name, *pciPath;
    uint64_t guid;
    int ptrSupport, regIsGlobal, speed, port;
    float latency;
    int maxComms, maxRecvs, netDeviceType, netDeviceVersion;
};
struct fused_4 {
    int n, devs[4];
};
struct fused_8 {
    int n, devs[8];
};
struct props_9 {
    char *name, *pciPath;
    uint64_t guid;
    int ptrSupport, regIsGlobal, forceFlush, speed, port;
    float latency;
    int maxComms, maxRecvs, netDeviceType, netDeviceVersion;
    struct fused_4 fused;
    size_t maxP2pBytes, maxCollBytes;
};
struct props_11 {
    struct props_9 old;
    int maxMultiRequestSize;
};
struct props_12 {
    char *name, *pciPath;
    uint64_t guid;
    int ptrSupport, regIsGlobal, forceFlush, speed, port;
    float latency;
    int maxComms, maxRecvs, netDeviceType, netDeviceVersion;
    struct fused_8 fused;
    size_t maxP2pBytes, maxCollBytes;
    int maxMultiRequestSize;
    int16_t railId, planeId;
};

static char device_names[64][16];

static int device_speed(int dev)
{
    return net_n_devices > 1 && dev >= (net_n_devices + 1) / 2 ? net_speed / 10 : net_speed;
}

#define FILL(p, dev)                                                                                         \
    do {                                                                                                     \
        memset((p), 0, sizeof *(p));                                                                         \
        snprintf(device_names[dev], sizeof device_names[dev], "sock%d", dev);                                \
        (p)->name = (dev) == 0 ? net_device : device_names[dev];                                             \
        (p)->guid = (uint64_t)dev;                                                                           \
        (p)->ptrSupport = 1;                                                                                 \
        (p)->speed = device_speed(dev);                                                                      \
        (p)->port = 1;                                                                                       \
        (p)->maxComms = net_comms;                                                                           \
        (p)->maxRecvs = 1;                                                                                   \
    } while (0)

static int properties(int version, int dev, void *out)
{
    struct props_8 *p8 = out;
    struct props_9 *p9 = out;
    struct props_11 *p11 = out;
    struct props_12 *p12 = out;
    if (net_faulty("getProperties"))
        return 2;
    if (dev < 0 || dev >= net_n_devices || dev >= 64)
        return net_misuse("a device that is not there");
    if (version == 8) {
        FILL(p8, dev);
    } else if (version == 12) {
        FILL(p12, dev);
        p12->fused.n = 1;
        p12->fused.devs[0] = dev;
        p12->railId = p12->planeId = -1;
    } else {
        if (version == 11)
            p11->maxMultiRequestSize = 1;
        FILL(p9, dev);
        p9->fused.n = 1;
        p9->fused.devs[0] = dev;
        p9->maxP2pBytes = p9->maxCollBytes = (size_t)1 << 30;
    }
    return 0;
}

static int properties_8(int dev, void *out)
{
    return properties(8, dev, out);
}
static int properties_9(int dev, void *out)
{
    return properties(9, dev, out);
}
static int properties_11(int dev, void *out)
{
    return properties(11, dev, out);
}
static int properties_12(int dev, void *out)
{
    return properties(12, dev, out);
}

struct config {
    int trafficClass;
};

static int init_8(logger log)
{
    return net_start(log);
}
static int init_10(logger log, void *profiler)
{
    (void)profiler;
    return net_start(log);
}
static int init_11(void **context, uint64_t id, struct config *config, logger log, void *profiler)
{
    (void)id, (void)profiler;
    if (config == NULL || config->trafficClass != -1)
        return net_misuse("init without a config");
    *context = CONTEXT;
    return net_start(log);
}
static int listen_11(void *context, int dev, void *handle, void **out)
{
    return context != CONTEXT ? net_misuse("listen with a wrong context")
                              : net_listen_device(dev, handle, out);
}
static int connect_10(int dev, struct config *config, void *handle, void **out, void **device)
{
    return config == NULL || config->trafficClass != -1 ? net_misuse("connect without a config")
                                                        : net_connect_device(dev, handle, out, device);
}
static int connect_11(void *context, int dev, void *handle, void **out, void **device)
{
    return context != CONTEXT ? net_misuse("connect with a wrong context")
                              : net_connect_device(dev, handle, out, device);
}
static int isend_8(void *comm, void *data, int bytes, int tag, void *mr, void **request)
{
    return mr == NULL ? net_misuse("isend without regMr")
                      : net_send_any(comm, data, (size_t)bytes, tag, request);
}
static int isend_9(void *comm, void *data, size_t bytes, int tag, void *mr, void **request)
{
    return mr == NULL ? net_misuse("isend without regMr") : net_send_any(comm, data, bytes, tag, request);
}
static int isend_10(void *comm, void *data, size_t bytes, int tag, void *mr, void *profile, void **request)
{
    (void)profile;
    return mr == NULL ? net_misuse("isend without regMr") : net_send_any(comm, data, bytes, tag, request);
}
/* As some real ones: one receive, whatever n is. */
static int irecv_8(void *comm, int n, void **data, int *bytes, int *tags, void **mrs, void **request)
{
    (void)n;
    return mrs[0] == NULL ? net_misuse("irecv")
                          : net_receive_any(comm, 1, data[0], (size_t)bytes[0], tags[0], request);
}
static int irecv_9(void *comm, int n, void **data, size_t *bytes, int *tags, void **mrs, void **request)
{
    return mrs[0] == NULL ? net_misuse("irecv")
                          : net_receive_any(comm, n, data[0], bytes[0], tags[0], request);
}
static int irecv_10(void *comm, int n, void **data, size_t *bytes, int *tags, void **mrs, void **profiles,
                    void **request)
{
    return mrs[0] == NULL || profiles == NULL ? net_misuse("irecv")
                                              : net_receive_any(comm, n, data[0], bytes[0], tags[0], request);
}
static int finalize(void *context)
{
    return context != CONTEXT ? net_misuse("finalize with a wrong context") : 0;
}

typedef void (*any)(void);
struct table {
    const char *name;
    any slots[21];
};

/* Who sees the table of a version. */
#if TEST_NET_VERSION == 7
#define SEEN_7 "default"
#else
#define SEEN_7 "hidden"
#endif
#if TEST_NET_VERSION == 0 || TEST_NET_VERSION == 8
#define SEEN_8 "default"
#else
#define SEEN_8 "hidden"
#endif
#if TEST_NET_VERSION == 0 || TEST_NET_VERSION == 9
#define SEEN_9 "default"
#else
#define SEEN_9 "hidden"
#endif
#if TEST_NET_VERSION == 0 || TEST_NET_VERSION == 10
#define SEEN_10 "default"
#else
#define SEEN_10 "hidden"
#endif
#if TEST_NET_VERSION == 0 || TEST_NET_VERSION == 11
#define SEEN_11 "default"
#else
#define SEEN_11 "hidden"
#endif
#if TEST_NET_VERSION == 0 || TEST_NET_VERSION == 12
#define SEEN_12 "default"
#else
#define SEEN_12 "hidden"
#endif

#define TABLE(version, init, props, listen_fn, connect_fn, isend, irecv, finalize_fn)                        \
    extern struct table ncclNetPlugin_v##version;                                                            \
    __attribute__((visibility(SEEN_##version))) struct table ncclNetPlugin_v##version = {                    \
        net_name,                                                                                            \
        {(any)(init),                                                                                        \
         (any)net_devices,                                                                                   \
         (any)(props),                                                                                       \
         (any)(listen_fn),                                                                                   \
         (any)(connect_fn),                                                                                  \
         (any)net_accept_comm,                                                                               \
         (any)net_reg,                                                                                       \
         NULL,                                                                                               \
         (any)net_dereg,                                                                                     \
         (any)(isend),                                                                                       \
         (any)(irecv),                                                                                       \
         NULL,                                                                                               \
         (any)net_test_any,                                                                                  \
         (any)net_close_send,                                                                                \
         (any)net_close_receive,                                                                             \
         (any)net_close_listen,                                                                              \
         NULL,                                                                                               \
         NULL,                                                                                               \
         NULL,                                                                                               \
         (any)(finalize_fn),                                                                                 \
         NULL}}

TABLE(8, init_8, properties_8, net_listen_device, net_connect_device, isend_8, irecv_8, NULL);
TABLE(9, init_8, properties_9, net_listen_device, net_connect_device, isend_9, irecv_9, NULL);
TABLE(10, init_10, properties_9, net_listen_device, connect_10, isend_10, irecv_10, NULL);
TABLE(11, init_11, properties_11, listen_11, connect_11, isend_10, irecv_10, finalize);
TABLE(12, init_11, properties_12, listen_11, connect_11, isend_10, irecv_10, finalize);
TABLE(7, init_8, properties_8, net_listen_device, net_connect_device, isend_8, irecv_8, NULL);
extern const int ncclNet_v8;
__attribute__((visibility("default"))) const int ncclNet_v8 =
    8; /* the name in NCCL's documentation, which NCCL does not look for */
