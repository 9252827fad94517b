/* env.c - see env.h. */
#include "core/base/env.h"

#include "core/base/log.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const sp_env_var vars[SP_N_ENV] = {
    [SP_ENV_LOG] = {"SPCCL_LOG", "warn", "least level of lines on stderr: off, error, warn, info, debug", 0,
                    0, 0, "off, error, warn, info, debug"},
    [SP_ENV_CPU_ISA] = {"SPCCL_CPU_ISA", "auto", "kernel set: auto, scalar, avx2, avx512", 0, 0, 0,
                        "auto, scalar, avx2, avx512"},
    [SP_ENV_FORMAT] = {"SPCCL_FORMAT", "auto", "format of every slice: auto, tile, pici, coo, dense", 0, 0, 0,
                       "auto, tile, pici, coo, dense"},
    [SP_ENV_SCHEDULE] = {"SPCCL_SCHEDULE", "auto",
                         "schedule of collectives: auto, direct, relayed, oneshot (all-reduce, broadcast); "
                         "CPUs: ring, hierarchical",
                         0, 0, 0, "auto, direct, oneshot, relayed, ring, hierarchical"},
    [SP_ENV_SLICE_BYTES] = {"SPCCL_SLICE_BYTES", "0", "dense bytes per slice; 0 = spccl chooses", 1, 0,
                            1 << 24, NULL},
    [SP_ENV_QUEUE_BYTES] =
        {"SPCCL_QUEUE_BYTES", "0",
         "capacity of a queue from one rank to another; a power of two from 64K on; 0 = 1M, "
         "less from 13 ranks on",
         1, 0, 1 << 26, NULL},
    [SP_ENV_TRANSPORTS] = {"SPCCL_TRANSPORTS", "inproc,shm,ib,ncclnet,tcp",
                           "transports that a pair of ranks tries, in order", 0, 0, 0, NULL},
    [SP_ENV_HOST_ID] =
        {"SPCCL_HOST_ID", "",
         "name of this rank's host: ranks with other names count as on other hosts; empty = found", 0, 0, 0,
         NULL},
    [SP_ENV_TCP_SOCKETS] =
        {"SPCCL_TCP_SOCKETS", "0",
         "sockets per peer and queue; 0 = 1, but 2 between hosts in groups of up to 4 ranks", 1, 0, 16, NULL},
    [SP_ENV_TCP_WINDOW] = {"SPCCL_TCP_WINDOW", "0",
                           "most bytes in flight to all other hosts; 0 = measured, from rate and round trip",
                           1, 0, INT64_C(1) << 32, NULL},
    [SP_ENV_TCP_ADDR] = {"SPCCL_TCP_ADDR", "",
                         "address or interface that tcp listens on; empty = spccl chooses", 0, 0, 0, NULL},
    [SP_ENV_IB_RAILS] = {"SPCCL_IB_RAILS", "4", "transport ib: most devices that carry one pair of ranks", 1,
                         1, 4, NULL},
    [SP_ENV_IB_QPS] = {"SPCCL_IB_QPS", "1", "transport ib: queue pairs per device of a pair of ranks", 1, 1,
                       4, NULL},
    [SP_ENV_IB_DEVICE] =
        {"SPCCL_IB_DEVICE", "",
         "devices of transport ib: a list of name and name:port, or none; empty = the fastest", 0, 0, 0,
         NULL},
    [SP_ENV_IB_TIMEOUT] =
        {"SPCCL_IB_TIMEOUT", "18",
         "transport ib: a packet without acknowledgement is sent again after 4.1 us * 2^this", 1, 1, 31,
         NULL},
    [SP_ENV_IB_RETRIES] = {"SPCCL_IB_RETRIES", "6",
                           "transport ib: how often a packet is sent again; 7 is endless on some devices", 1,
                           0, 7, NULL},
    [SP_ENV_NET_PLUGIN] = {"SPCCL_NET_PLUGIN", "",
                           "NCCL net plugin: a name, a path, or none; empty = NCCL_NET_PLUGIN, then "
                           "libnccl-net.so if it is there",
                           0, 0, 0, NULL},
    [SP_ENV_NET_PLUGIN_MS] = {"SPCCL_NET_PLUGIN_MS", "10000",
                              "milliseconds that one call into an NCCL net plugin may take", 1, 1, 1 << 30,
                              NULL},
    [SP_ENV_RENDEZVOUS_ADDR] = {"SPCCL_RENDEZVOUS_ADDR", "",
                                "address or interface that spccl_get_unique_id listens on; empty = all", 0, 0,
                                0, NULL},
    [SP_ENV_TIMEOUT_MS] = {"SPCCL_TIMEOUT_MS", "600000",
                           "default time limit, in ms, of creating a group and of each collective", 1, 1,
                           INT64_C(1) << 40, NULL},
    [SP_ENV_SPIN_US] = {"SPCCL_SPIN_US", "20", "microseconds that a waiting thread polls before it sleeps", 1,
                        0, 1000000, NULL},
    [SP_ENV_TRACE] = {"SPCCL_TRACE", "64",
                      "events kept per communicator; SPCCL_LOG=info prints them when it breaks", 1, 0,
                      1 << 16, NULL},
    [SP_ENV_MAX_CTAS] = {"SPCCL_MAX_CTAS", "0",
                         "GPU collectives: most CTAs of one launch, one CTA per SM; 0 = all SMs", 1, 0,
                         1 << 16, NULL},
    [SP_ENV_INBOX_BYTES] = {"SPCCL_INBOX_BYTES", "256M",
                            "GPU collectives: most bytes of a group's inbox, on each GPU", 1, 1,
                            INT64_C(1) << 40, NULL},
    [SP_ENV_NVLINK_HANDLES] = {"SPCCL_NVLINK_HANDLES", "auto",
                               "how peers map GPU memory: auto, fd (VMM), ipc (CUDA IPC)", 0, 0, 0,
                               "auto, fd, ipc"},
    [SP_ENV_BETWEEN_HOSTS] =
        {"SPCCL_CUDA_BETWEEN_HOSTS", "auto",
         "GPU collectives of groups on several hosts: 1 = by spccl over the network, 0 = fallback, auto = 1 "
         "over tcp and 0 over RDMA",
         0, 0, 0, "auto, 0, 1"},
    [SP_ENV_PROXIES] = {"SPCCL_CUDA_PROXIES", "0",
                        "proxy threads of a GPU in a group on several hosts; 0 = by the usable cores", 1, 0,
                        16, NULL},
    [SP_ENV_GPU_DIRECT] =
        {"SPCCL_GPU_DIRECT", "off",
         "GPU memory between hosts over ib: off = through pinned memory, auto = the network "
         "device reads and writes it where it can, dmabuf and pointers = try that way",
         0, 0, 0, "off, auto, dmabuf, pointers"},
    [SP_ENV_LIST_BYTES] =
        {"SPCCL_PRUNE_LIST_BYTES", "64M",
         "bytes of each GPU for lists of what pruned gradients send; 0 = use the all-reduce", 1, 0,
         INT64_C(1) << 36, NULL},
};

const sp_env_var *sp_env_describe(sp_env_id id)
{
    return (unsigned)id < SP_N_ENV ? &vars[id] : NULL;
}

const char *sp_env_text(sp_env_id id)
{
    const char *text = getenv(vars[id].name);
    return text != NULL && text[0] != '\0' ? text : vars[id].default_text;
}

spccl_status sp_env_number(sp_env_id id, int64_t *out)
{
    const sp_env_var *v = &vars[id];
    const char *text = sp_env_text(id);
    char *end;
    long long n, unit;
    int shift = 0;

    errno = 0;
    n = strtoll(text, &end, 0);
    if (*end == 'K' || *end == 'k')
        shift = 10;
    else if (*end == 'M' || *end == 'm')
        shift = 20;
    else if (*end == 'G' || *end == 'g')
        shift = 30;
    if (shift != 0)
        end++;
    unit = 1LL << shift;
    if (end == text || *end != '\0' || errno != 0 || n < (v->min >> shift) || n > (v->max >> shift) ||
        n * unit < v->min)
        return SP_FAIL(SPCCL_ERR_SETTING, "%s=\"%s\": wanted a whole number from %lld to %lld (%s)", v->name,
                       text, (long long)v->min, (long long)v->max, v->help);
    *out = n * unit;
    return SPCCL_OK;
}

/* Is `word` one of the words of `list`, "auto, fd, ipc"? */
static int is_in_list(const char *word, const char *list)
{
    size_t n = strlen(word);
    for (const char *at = list; *at != '\0'; at += strspn(at, ", ")) {
        size_t length = strcspn(at, ",");
        if (length == n && strncmp(at, word, n) == 0)
            return 1;
        at += length;
    }
    return 0;
}

spccl_status sp_env_check(void)
{
    for (int i = 0; i < SP_N_ENV; i++) {
        const sp_env_var *v = &vars[i];
        const char *text = sp_env_text((sp_env_id)i);
        int64_t n;
        if (v->is_number)
            SP_TRY(sp_env_number((sp_env_id)i, &n));
        if (v->choices != NULL && !is_in_list(text, v->choices))
            return SP_FAIL(SPCCL_ERR_SETTING, "%s=\"%s\": wanted one of %s (%s)", v->name, text, v->choices,
                           v->help);
    }
    return SPCCL_OK;
}

/* The variables that other programs of the project read (docs/SETTINGS.md): python/spccl/_torch_settings.py, the build
 * and the benchmarks. Those that begin with SPCCL_TEST_ are for tests. */
static int is_read_elsewhere(const char *name, size_t length)
{
    static const char *const names[] = {"SPCCL_TORCH_GLUE", "SPCCL_CUDA_ENGINE",    "SPCCL_CUDA_FALLBACK",
                                        "SPCCL_ORDER",      "SPCCL_BLOCKING_WAIT",  "SPCCL_CUDA",
                                        "SPCCL_CUDA_ARCHS", "SPCCL_PREBUILD_TORCH", "SPCCL_COMMIT"};
    if (strncmp(name, "SPCCL_TEST_", 11) == 0)
        return 1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i]) == length && strncmp(name, names[i], length) == 0)
            return 1;
    return 0;
}

static int is_in_table(const char *name, size_t length)
{
    for (int i = 0; i < SP_N_ENV; i++)
        if (strlen(vars[i].name) == length && strncmp(name, vars[i].name, length) == 0)
            return 1;
    return 0;
}

void sp_env_warn_unknown(void)
{
    static atomic_flag done = ATOMIC_FLAG_INIT;
    char *entry = NULL;
    size_t cap = 0;
    FILE *f;
    if (atomic_flag_test_and_set(&done))
        return;
    f = fopen("/proc/self/environ", "re"); /* other threads may change `environ` while it is read */
    while (f != NULL && getdelim(&entry, &cap, '\0', f) > 0) {
        size_t length = strcspn(entry, "=");
        if (strncmp(entry, "SPCCL_", 6) == 0 && !is_in_table(entry, length) &&
            !is_read_elsewhere(entry, length))
            sp_log(SP_LOG_WARN, -1,
                   "the environment has %.*s, which spccl does not know: `spccl info` lists its variables",
                   (int)length, entry);
    }
    free(entry);
    if (f != NULL)
        fclose(f);
}
