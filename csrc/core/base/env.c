/* env.c - see env.h. */
#include "core/base/env.h"

#include "core/base/log.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const sp_env_var vars[SP_N_ENV] = {
    [SP_ENV_LOG] = {"SPCCL_LOG", "warn", "least level of lines on stderr: off, error, warn, info, debug",
                    "off, error, warn, info, debug", 0, 0, NULL},
    [SP_ENV_FORMAT] = {"SPCCL_FORMAT", "auto", "format of every slice: auto, tile, pici, coo, dense",
                       "auto, tile, pici, coo, dense", 0, 0, NULL},
    [SP_ENV_SCHEDULE] =
        {"SPCCL_SCHEDULE", "auto",
         "schedule of collectives: auto = by cost; tune = auto, corrected by the times of calls; "
         "tune:PATH = with a saved profile; direct, relayed, oneshot (all-reduce, broadcast); CPUs: "
         "ring, hierarchical, file:PATH of a plan file (docs/SCHEDULES.md)",
         "auto, tune, tune:PATH, direct, oneshot, relayed, ring, hierarchical, file:PATH", 0, 0, NULL},
    [SP_ENV_TRANSPORTS] = {"SPCCL_TRANSPORTS", "inproc,shm,ib,ncclnet,tcp",
                           "transports that a pair of ranks tries, in order", NULL, 0, 0, NULL},
    [SP_ENV_HOST_ID] =
        {"SPCCL_HOST_ID", "",
         "name of this rank's host: ranks with other names count as on other hosts; empty = found", NULL, 0,
         0, NULL},
    [SP_ENV_TCP_ADDR] = {"SPCCL_TCP_ADDR", "",
                         "address or interface that tcp listens on; empty = spccl chooses", NULL, 0, 0, NULL},
    [SP_ENV_IB_DEVICE] =
        {"SPCCL_IB_DEVICE", "",
         "devices of transport ib: a list of name and name:port, or none; empty = the fastest", NULL, 0, 0,
         NULL},
    [SP_ENV_NET_PLUGIN] = {"SPCCL_NET_PLUGIN", "",
                           "NCCL net plugin: a name, a path, or none; empty = NCCL_NET_PLUGIN, then "
                           "libnccl-net.so if it is there",
                           NULL, 0, 0, NULL},
    [SP_ENV_RENDEZVOUS_ADDR] = {"SPCCL_RENDEZVOUS_ADDR", "",
                                "address or interface that spccl_get_unique_id listens on; empty = all", NULL,
                                0, 0, NULL},
    [SP_ENV_TIMEOUT_MS] = {"SPCCL_TIMEOUT_MS", "600000",
                           "default time limit, in ms, of creating a group and of each collective", NULL, 1,
                           INT64_C(1) << 40, NULL},
    [SP_ENV_CUDA_ROUTE] =
        {"SPCCL_CUDA_ROUTE", "auto",
         "what runs collectives on CUDA tensors: auto = spccl, but NCCL for groups on several hosts over ib "
         "and ncclnet; spccl = also these; one-host = spccl, but NCCL on several hosts; nccl = NCCL; stage = "
         "host memory; with +stage host memory in place of NCCL",
         "auto, spccl, one-host, auto+stage, spccl+stage, one-host+stage, nccl, stage", 0, 0,
         "SPCCL_CUDA_BETWEEN_HOSTS"},
    [SP_ENV_MAX_CTAS] = {"SPCCL_MAX_CTAS", "0",
                         "GPU collectives: most CTAs of one launch, one CTA per SM; 0 = all SMs", NULL, 0,
                         1 << 16, NULL},
    [SP_ENV_INBOX_BYTES] = {"SPCCL_INBOX_BYTES", "256M",
                            "GPU collectives: most bytes of a group's inbox, on each GPU", NULL, 1,
                            INT64_C(1) << 40, NULL},
    [SP_ENV_LIST_BYTES] =
        {"SPCCL_PRUNE_LIST_BYTES", "64M",
         "bytes of each GPU for lists of what pruned gradients send; 0 = use the all-reduce", NULL, 0,
         INT64_C(1) << 36, NULL},
    [SP_ENV_CPU_ISA] = {"SPCCL_DEBUG_CPU_ISA", "auto", "kernel set: auto, scalar, avx2, avx512",
                        "auto, scalar, avx2, avx512", 0, 0, "SPCCL_CPU_ISA"},
    [SP_ENV_SLICE_BYTES] = {"SPCCL_DEBUG_SLICE_BYTES", "0", "dense bytes per slice; 0 = spccl chooses", NULL,
                            0, 1 << 24, "SPCCL_SLICE_BYTES"},
    [SP_ENV_QUEUE_BYTES] = {"SPCCL_DEBUG_QUEUE_BYTES", "0",
                            "capacity of a queue from one rank to another; a power of two from 64K on; 0 = "
                            "1M, less from 13 ranks on",
                            NULL, 0, 1 << 26, "SPCCL_QUEUE_BYTES"},
    [SP_ENV_SPIN_US] = {"SPCCL_DEBUG_SPIN_US", "20",
                        "microseconds that a waiting thread polls before it sleeps", NULL, 0, 1000000,
                        "SPCCL_SPIN_US"},
    [SP_ENV_IB_RAILS] = {"SPCCL_DEBUG_IB_RAILS", "4",
                         "transport ib: most devices that carry one pair of ranks", NULL, 1, 4,
                         "SPCCL_IB_RAILS"},
    [SP_ENV_IB_QPS] = {"SPCCL_DEBUG_IB_QPS", "1", "transport ib: queue pairs per device of a pair of ranks",
                       NULL, 1, 4, "SPCCL_IB_QPS"},
    [SP_ENV_IB_TIMEOUT] =
        {"SPCCL_DEBUG_IB_TIMEOUT", "18",
         "transport ib: a packet without acknowledgement is sent again after 4.1 us * 2^this", NULL, 1, 31,
         "SPCCL_IB_TIMEOUT"},
    [SP_ENV_NET_PLUGIN_MS] = {"SPCCL_DEBUG_NET_PLUGIN_MS", "10000",
                              "milliseconds that one call into an NCCL net plugin may take", NULL, 1, 1 << 30,
                              "SPCCL_NET_PLUGIN_MS"},
    [SP_ENV_NVLINK_HANDLES] = {"SPCCL_DEBUG_NVLINK_HANDLES", "auto",
                               "how peers map GPU memory: auto, fd (VMM), ipc (CUDA IPC)", "auto, fd, ipc", 0,
                               0, "SPCCL_NVLINK_HANDLES"},
    [SP_ENV_PROXIES] = {"SPCCL_DEBUG_CUDA_PROXIES", "0",
                        "proxy threads of a GPU in a group on several hosts; 0 = by the usable cores", NULL,
                        0, 16, "SPCCL_CUDA_PROXIES"},
    [SP_ENV_GPU_DIRECT] =
        {"SPCCL_DEBUG_GPU_DIRECT", "off",
         "GPU memory between hosts over ib: off = through pinned memory, auto = the network "
         "device reads and writes it where it can, dmabuf and pointers = try that way",
         "off, auto, dmabuf, pointers", 0, 0, "SPCCL_GPU_DIRECT"},
};

const sp_env_var *sp_env_describe(sp_env_id id)
{
    return (unsigned)id < SP_N_ENV ? &vars[id] : NULL;
}

static int is_set(const char *name)
{
    const char *text = name != NULL ? getenv(name) : NULL;
    return text != NULL && text[0] != '\0';
}

/* The name that counts: the old one if only that is set. */
static const char *name_of(const sp_env_var *v)
{
    return !is_set(v->name) && is_set(v->old_name) ? v->old_name : v->name;
}

/* The value that was given under the name that counts. */
static const char *given_text(const sp_env_var *v)
{
    const char *name = name_of(v);
    return is_set(name) ? getenv(name) : v->default_text;
}

/* SPCCL_CUDA_BETWEEN_HOSTS counts. Its words are not those of SPCCL_CUDA_ROUTE. */
static int is_between_hosts(const sp_env_var *v)
{
    return v == &vars[SP_ENV_CUDA_ROUTE] && name_of(v) == v->old_name;
}

const char *sp_env_text(sp_env_id id)
{
    const char *text = given_text(&vars[id]);
    if (is_between_hosts(&vars[id]))
        return strcmp(text, "1") == 0 ? "spccl" : strcmp(text, "0") == 0 ? "one-host" : text;
    return text;
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
        return SP_FAIL(SPCCL_ERR_SETTING, "%s=\"%s\": wanted a whole number from %lld to %lld (%s)",
                       name_of(v), text, (long long)v->min, (long long)v->max, v->help);
    *out = n * unit;
    return SPCCL_OK;
}

/* Is `word` one of the words of `list`, "auto, fd, ipc"? A word that ends in PATH stands for any end: "file:PATH". */
static int is_in_list(const char *word, const char *list)
{
    size_t n = strlen(word);
    for (const char *at = list; *at != '\0'; at += strspn(at, ", ")) {
        size_t length = strcspn(at, ",");
        if (length == n && strncmp(at, word, n) == 0)
            return 1;
        if (length > 4 && strncmp(at + length - 4, "PATH", 4) == 0 && n > length - 4 &&
            strncmp(at, word, length - 4) == 0)
            return 1;
        at += length;
    }
    return 0;
}

spccl_status sp_env_check(void)
{
    for (int i = 0; i < SP_N_ENV; i++) {
        const sp_env_var *v = &vars[i];
        const char *text = given_text(v), *choices = is_between_hosts(v) ? "auto, 1, 0" : v->choices;
        int64_t n;
        if (v->max != 0)
            SP_TRY(sp_env_number((sp_env_id)i, &n));
        if (choices != NULL && !is_in_list(text, choices))
            return SP_FAIL(SPCCL_ERR_SETTING, "%s=\"%s\": wanted one of %s (%s)", name_of(v), text, choices,
                           v->help);
    }
    return SPCCL_OK;
}

/* The variables that other programs of the project read (docs/SETTINGS.md): python/spccl/_torch_settings.py, the build
 * and the benchmarks. Those that begin with SPCCL_TEST_ are for tests. */
static const char *const read_elsewhere[] = {"SPCCL_TORCH_GLUE", "SPCCL_ORDER",      "SPCCL_BLOCKING_WAIT",
                                             "SPCCL_CUDA",       "SPCCL_CUDA_ARCHS", "SPCCL_PREBUILD_TORCH",
                                             "SPCCL_COMMIT"};

/* Variables of earlier versions, besides the old names in `vars`. now: what replaces it; _torch_settings.py reads those
 * two. NULL: it has no effect. */
static const struct {
    const char *name, *now;
} retired[] = {{"SPCCL_CUDA_ENGINE", "SPCCL_CUDA_ROUTE"},
               {"SPCCL_CUDA_FALLBACK", "SPCCL_CUDA_ROUTE"},
               {"SPCCL_TRACE", NULL},
               {"SPCCL_TCP_WINDOW", NULL},
               {"SPCCL_TCP_SOCKETS", NULL},
               {"SPCCL_IB_RETRIES", NULL}};

static int is_known(const char *name)
{
    for (size_t i = 0; i < SP_N_ENV; i++)
        if (strcmp(name, vars[i].name) == 0 ||
            (vars[i].old_name != NULL && strcmp(name, vars[i].old_name) == 0))
            return 1;
    for (size_t i = 0; i < sizeof read_elsewhere / sizeof *read_elsewhere; i++)
        if (strcmp(name, read_elsewhere[i]) == 0)
            return 1;
    for (size_t i = 0; i < sizeof retired / sizeof *retired; i++)
        if (strcmp(name, retired[i].name) == 0)
            return 1;
    return strncmp(name, "SPCCL_TEST_", 11) == 0;
}

static void warn_old(const char *name, const char *now)
{
    if (!is_set(name))
        return;
    if (now != NULL)
        sp_log(SP_LOG_WARN, -1, "%s is now %s (docs/SETTINGS.md); this release still reads the old name",
               name, now);
    else
        sp_log(SP_LOG_WARN, -1, "%s has no effect any more (docs/SETTINGS.md)", name);
}

void sp_env_warn_names(void)
{
    static atomic_flag done = ATOMIC_FLAG_INIT;
    char *entry = NULL;
    size_t cap = 0;
    FILE *f;
    if (atomic_flag_test_and_set(&done))
        return;
    for (size_t i = 0; i < SP_N_ENV; i++)
        warn_old(vars[i].old_name, vars[i].name);
    for (size_t i = 0; i < sizeof retired / sizeof *retired; i++)
        warn_old(retired[i].name, retired[i].now);
    f = fopen("/proc/self/environ", "re"); /* other threads may change `environ` while it is read */
    while (f != NULL && getdelim(&entry, &cap, '\0', f) > 0) {
        entry[strcspn(entry, "=")] = '\0';
        if (strncmp(entry, "SPCCL_", 6) == 0 && !is_known(entry))
            sp_log(SP_LOG_WARN, -1,
                   "the environment has %s, which spccl does not know: `spccl info` lists its variables",
                   entry);
    }
    free(entry);
    if (f != NULL)
        fclose(f);
}
