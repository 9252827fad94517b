/* comm.c - the public spccl_comm_* functions: create, query, abort and destroy a communicator. See comm.h. */
#include "core/run/comm.h"

#include "core/base/abi.h"
#include "core/base/env.h"
#include "core/base/log.h"
#include "core/format/tune_format.h"
#include "core/plan/tune_coll.h"
#include "core/run/gpu_part.h"
#include "core/run/profile_file.h"

#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define WORLD_SIZE_MAX 4096
#define QUEUE_BYTES_MIN 65536

static spccl_status read_schedule(spccl_comm *comm, const char *wanted, sp_boot_config *boot)
{
    const char *text = sp_env_text(SP_ENV_SCHEDULE);
    SP_TRY(sp_tune_parse_schedule(text, &comm->schedule_forced, &comm->schedule));
    if (strcmp(text, sp_env_describe(SP_ENV_SCHEDULE)->default_text) == 0 && wanted != NULL) {
        text = wanted;
        SP_TRY(sp_tune_parse_schedule(text, &comm->schedule_forced, &comm->schedule));
    }
    comm->tunes = !comm->schedule_forced && strcmp(text, "auto") != 0;
    boot->schedule = comm->schedule_forced ? 1 + (uint32_t)comm->schedule : comm->tunes ? SP_BOOT_TUNES : 0;
    if (comm->tunes && strncmp(text, SP_TUNE_PROFILE, strlen(SP_TUNE_PROFILE)) == 0)
        boot->profile = text + strlen(SP_TUNE_PROFILE);
    if (!comm->schedule_forced || comm->schedule != SP_SCHED_FILE)
        return SPCCL_OK;
    SP_TRY(sp_plan_set_read(text + strlen(SP_TUNE_FILE), &comm->plans));
    boot->plans_hash = sp_plan_set_hash(comm->plans);
    return SPCCL_OK;
}

/* The name of this rank's host: SPCCL_HOST_ID, else `given`. */
static const char *name_of_host(const char *given)
{
    const char *name = sp_env_text(SP_ENV_HOST_ID);
    return name[0] != '\0' ? name : given;
}

spccl_status spccl_get_host(const char *host_id, spccl_host *out)
{
    _Static_assert(sizeof out->bytes == SP_HOST_ID_BYTES, "the public size of an identity");
    if (out == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_get_host: out is NULL");
    return sp_host_identity(name_of_host(host_id), (uint8_t *)out->bytes);
}

/* Read the settings. For each the environment variable counts first, then the config, then the default. The
 * time-out is the exception: a config.timeout_ms above 0 counts before SPCCL_TIMEOUT_MS. */
static spccl_status read_settings(spccl_comm *comm, const spccl_config *config, sp_boot_config *boot)
{
    const sp_transport *list[SP_TRANSPORTS_MAX];
    size_t n_transports;
    int64_t n;
    sp_env_warn_names();
    SP_TRY(sp_env_check());
    SP_TRY(sp_env_number(SP_ENV_TIMEOUT_MS, &n));
    comm->timeout_ms = config->timeout_ms > 0 ? config->timeout_ms : n;
    SP_TRY(sp_env_number(SP_ENV_SPIN_US, &n));
    comm->spin_ns = n * 1000;
    SP_TRY(sp_tune_parse_format(sp_env_text(SP_ENV_FORMAT), &comm->format));
    if (comm->format == SPCCL_FORMAT_AUTO)
        comm->format = config->format;
    SP_TRY(read_schedule(comm, config->schedule, boot));
    SP_TRY(sp_env_number(SP_ENV_QUEUE_BYTES, &n));
    if ((n & (n - 1)) != 0 || (n != 0 && n < QUEUE_BYTES_MIN))
        return SP_FAIL(SPCCL_ERR_SETTING,
                       "SPCCL_DEBUG_QUEUE_BYTES=%lld: wanted 0, or a power of two from %d on", (long long)n,
                       QUEUE_BYTES_MIN);
    boot->queue_bytes = n != 0 ? (size_t)n : sp_tune_queue_bytes(boot->world_size);
    SP_TRY(sp_env_number(SP_ENV_SLICE_BYTES, &n));
    comm->slice_bytes = n != 0                     ? (size_t)n
                        : config->slice_bytes != 0 ? config->slice_bytes
                                                   : sp_tune_slice_bytes(boot->queue_bytes);
    if (comm->slice_bytes < SP_SLICE_BYTES_MIN || comm->slice_bytes > (1u << 24))
        return SP_FAIL(SPCCL_ERR_SETTING,
                       "slice of %zu bytes: wanted %u to 16777216 (SPCCL_DEBUG_SLICE_BYTES)",
                       comm->slice_bytes, SP_SLICE_BYTES_MIN);
    while (boot->queue_bytes < 8 * comm->slice_bytes) /* a queue holds several messages of the largest size */
        boot->queue_bytes *= 2;
    comm->queue_bytes = boot->queue_bytes;
    comm->tunes_slices = comm->tunes && n == 0 && config->slice_bytes == 0;
    boot->forces = (comm->format != SPCCL_FORMAT_AUTO ? SP_BOOT_FORCES_FORMAT : 0) |
                   (n != 0 || config->slice_bytes != 0 ? SP_BOOT_FORCES_SLICES : 0);
    boot->n_sockets = config->n_sockets;
    boot->host_id = name_of_host(config->host_id);
    boot->transports = sp_env_text(SP_ENV_TRANSPORTS);
    if (config->transports != NULL &&
        strcmp(boot->transports, sp_env_describe(SP_ENV_TRANSPORTS)->default_text) == 0)
        boot->transports = config->transports;
    SP_TRY(sp_transport_parse_list(boot->transports, list, SP_TRANSPORTS_MAX, &n_transports));
    boot->rates_decide = strcmp(boot->transports, sp_env_describe(SP_ENV_TRANSPORTS)->default_text) == 0;
    boot->slice_bytes = (uint32_t)comm->slice_bytes;
    return SPCCL_OK;
}

static spccl_status check_store(const spccl_store *store, int rank, int world_size)
{
    if (world_size > 1 && (store->set == NULL || store->get == NULL))
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: a group of %d ranks needs a store with set and get", rank,
                       world_size);
    return SPCCL_OK;
}

static spccl_status check_rank(int rank, int world_size)
{
    if (world_size < 1 || world_size > WORLD_SIZE_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "world_size %d: wanted 1 to %d", world_size, WORLD_SIZE_MAX);
    if (rank < 0 || rank >= world_size)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: wanted 0 to %d", rank, world_size - 1);
    return SPCCL_OK;
}

spccl_status sp_comm_check_config(int rank, int world_size, const spccl_config *config)
{
    SP_TRY(check_rank(rank, world_size));
    if (config->timeout_ms < 0)
        return SP_FAIL(SPCCL_ERR_ARG, "config.timeout_ms is %lld, wanted 0 (default) or more",
                       (long long)config->timeout_ms);
    if ((int)config->format < SPCCL_FORMAT_AUTO || (int)config->format > SPCCL_FORMAT_DENSE ||
        config->format == SPCCL_FORMAT_EMPTY)
        return SP_FAIL(SPCCL_ERR_ARG, "config.format is %d, wanted AUTO, TILE, PICI, COO or DENSE",
                       (int)config->format);
    if (config->n_sockets > 16)
        return SP_FAIL(SPCCL_ERR_ARG, "config.n_sockets is %u, wanted 0 to 16", config->n_sockets);
    return SPCCL_OK;
}

/* Make the epoll set on which the driver sleeps: every endpoint, and wake_fd. */
static spccl_status open_epoll(spccl_comm *comm)
{
    struct epoll_event e = {.events = EPOLLIN};
    comm->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    comm->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (comm->epoll_fd < 0 || comm->wake_fd < 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: epoll and eventfd", comm->rank);
    e.data.fd = comm->wake_fd;
    if (epoll_ctl(comm->epoll_fd, EPOLL_CTL_ADD, comm->wake_fd, &e) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: epoll_ctl", comm->rank);
    for (int i = 0; i < comm->links.n_endpoints; i++) {
        e.data.fd = comm->links.transports[i]->wait_fd(comm->links.endpoints[i]);
        if (epoll_ctl(comm->epoll_fd, EPOLL_CTL_ADD, e.data.fd, &e) != 0)
            return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: epoll_ctl of %s", comm->rank,
                                 comm->links.transports[i]->name);
    }
    return SPCCL_OK;
}

static void comm_free(spccl_comm *comm)
{
    sp_exec_fini(&comm->exec);
    sp_plan_set_destroy(comm->plans);
    sp_profile_file_close(comm->profile);
    if (comm->epoll_fd >= 0)
        close(comm->epoll_fd);
    if (comm->wake_fd >= 0)
        close(comm->wake_fd);
    sp_links_close(&comm->links);
    pthread_cond_destroy(&comm->cv);
    pthread_mutex_destroy(&comm->mu);
    sp_free(comm);
}

static void log_plan(void *ctx, const sp_written_plan *p)
{
    const spccl_comm *comm = ctx;
    bool on_gpus = p->owners.why_not[0] == '\0';
    sp_log(SP_LOG_INFO, comm->rank, "plan %s of %s for %s: %s%s", p->head.name, sp_plan_set_name(comm->plans),
           sp_coll_name(p->head.coll),
           on_gpus ? "on CPUs and GPUs" : "on CPUs, not on GPUs: ", p->owners.why_not);
}

/* Make the communicator. *peers_know: as in sp_links, after a failure. */
static spccl_status create_comm(const spccl_store *store, const spccl_config *config, sp_boot_config *boot,
                                bool *peers_know, spccl_comm **out)
{
    spccl_comm *comm;
    spccl_status st;
    SP_TRY(sp_process_count_forks());
    comm = sp_calloc(1, sizeof *comm);
    if (comm == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "communicator: %zu bytes", sizeof *comm);
    comm->rank = boot->rank;
    comm->world_size = boot->world_size;
    comm->process_stamp = sp_process_stamp();
    comm->pid = getpid();
    comm->epoll_fd = comm->wake_fd = -1;
    comm->queue_tail = &comm->queue_head;
    pthread_mutex_init(&comm->mu, NULL);
    pthread_cond_init(&comm->cv, NULL);
    snprintf(comm->name, sizeof comm->name, "%s", boot->name);
    SP_TRY_TO(fail, st, read_settings(comm, config, boot));
    SP_TRY_TO(fail, st, sp_kernels_pick(&comm->kernels));
    if (boot->profile != NULL)
        SP_TRY_TO(fail, st, sp_profile_file_open(comm, boot->profile, &comm->profile));
    sp_profile_file_hash(comm->profile, comm->world_size, boot->profile_hashes);
    boot->deadline_ns = sp_deadline_in_ms(comm->timeout_ms);
    SP_TRY_TO(fail, st, sp_links_open(&comm->links, store, boot));
    if (comm->plans != NULL) {
        SP_TRY_TO(fail, st, sp_plan_set_select(comm->plans, comm->rank, comm->world_size, comm->links.hosts));
        sp_plan_set_each(comm->plans, log_plan, comm);
    }
    comm->tunes_slices = comm->tunes_slices && (comm->links.any_forces & SP_BOOT_FORCES_SLICES) == 0;
    SP_TRY_TO(fail, st,
              sp_exec_init(&comm->exec, &comm->links, comm->kernels,
                           (comm->tunes_slices ? 2 : 1) * comm->slice_bytes));
    if (comm->tunes && comm->world_size > 1)
        SP_TRY_TO(fail, st, sp_chooser_tune(comm->exec.chooser));
    comm->exec.chooser->profile = sp_profile_file_use(comm);
    SP_TRY_TO(fail, st, open_epoll(comm));
    *out = comm;
    return SPCCL_OK;
fail:
    *peers_know = comm->links.peers_know;
    comm_free(comm);
    return st;
}

spccl_status spccl_comm_create(const spccl_store *given_store, int rank, int world_size,
                               const spccl_config *given, spccl_comm **out)
{
    spccl_store store = {.struct_bytes = sizeof store};
    spccl_config config = SPCCL_CONFIG_INIT;
    sp_boot_config boot = {.rank = rank, .world_size = world_size};
    char name[sizeof(*out)->name];
    bool peers_know = false;
    spccl_status st;
    if (out == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_comm_create: out is NULL");
    SP_TRY(sp_options_copy("spccl_store", given_store, &store, sizeof store));
    SP_TRY(sp_options_copy("spccl_config", given, &config, sizeof config));
    SP_TRY(check_rank(rank, world_size));
    SP_TRY(check_store(&store, rank, world_size));
    snprintf(name, sizeof name, "%s", config.name != NULL ? config.name : "world");
    boot.name = name;
    boot.secret = config.secret;
    st = sp_comm_check_config(rank, world_size, &config);
    if (st == SPCCL_OK)
        st = create_comm(&store, &config, &boot, &peers_know, out);
    if (st != SPCCL_OK) {
        if (!peers_know)
            sp_boot_refuse(&store, &boot, st);
        return st;
    }
    sp_log(SP_LOG_INFO, rank, "group \"%s\": %d ranks, kernels %s, slices of %zu bytes", name, world_size,
           (*out)->kernels->name, (*out)->slice_bytes);
    for (int r = 0; r < world_size; r++)
        if (r != rank)
            sp_log(SP_LOG_INFO, rank, "link to rank %d: %s", r, (*out)->links.peers[r].text);
    return SPCCL_OK;
}

spccl_status sp_comm_refuse(const spccl_comm *comm, const char *call)
{
    if (comm == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: comm is NULL", call);
    return SP_FAIL(
        SPCCL_ERR_STATE,
        "%s: rank %d of group \"%s\": process %d is a child of fork of process %d, which made the group. "
        "Only the parent can use it: make a new group in the child, or start the child with spawn",
        call, comm->rank, comm->name, (int)getpid(), (int)comm->pid);
}

int spccl_comm_rank(const spccl_comm *comm)
{
    return comm != NULL ? comm->rank : -1;
}

int spccl_comm_world_size(const spccl_comm *comm)
{
    return comm != NULL ? comm->world_size : -1;
}

spccl_status spccl_comm_set_timeout(spccl_comm *comm, int64_t timeout_ms)
{
    SP_TRY(sp_comm_check(comm, __func__));
    if (timeout_ms <= 0)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_comm_set_timeout: timeout_ms must be above 0");
    atomic_store(&comm->timeout_ms, timeout_ms);
    return SPCCL_OK;
}

spccl_status spccl_comm_async_error(spccl_comm *comm)
{
    SP_TRY(sp_comm_check(comm, __func__));
    sp_comm_poll(comm);
    sp_gpu_part_here.find_errors(comm);
    return sp_comm_broken(comm);
}

spccl_status spccl_comm_abort(spccl_comm *comm, const char *reason)
{
    char text[sizeof comm->error];
    SP_TRY(sp_comm_check(comm, __func__));
    snprintf(text, sizeof text, "rank %d: group \"%s\" was aborted: %s", comm->rank, comm->name,
             reason != NULL ? reason : "spccl_comm_abort was called");
    sp_comm_break(comm, SPCCL_ERR_ABORTED, text);
    return SPCCL_OK;
}

spccl_status spccl_comm_destroy(spccl_comm *comm)
{
    if (comm == NULL || sp_process_forked(comm->process_stamp)) /* only the parent may end its communicator */
        return SPCCL_OK;
    sp_gpu_part_here.detach(comm);
    sp_comm_stop(comm);
    sp_profile_file_save(comm);
    comm_free(comm);
    return SPCCL_OK;
}

spccl_status spccl_comm_stats(spccl_comm *comm, spccl_stats *out)
{
    spccl_stats stats = {0};
    const sp_exec_stats *s;
    SP_TRY(sp_comm_check(comm, __func__));
    s = &comm->exec.stats;
    stats.n_collectives = atomic_load(&s->n_collectives);
    stats.dense_bytes_sent = atomic_load(&s->dense_bytes_sent);
    stats.wire_bytes_sent = atomic_load(&s->wire_bytes_sent);
    stats.wire_bytes_received = atomic_load(&s->wire_bytes_received);
    for (int i = 0; i < SPCCL_N_FORMATS; i++)
        stats.n_frames_sent[i] = atomic_load(&s->n_frames_sent[i]);
    stats.buffer_bytes =
        sp_links_memory_bytes(&comm->links) + sp_exec_memory_bytes(&comm->exec) + sizeof *comm;
    return sp_result_copy("spccl_stats", &stats, sizeof stats, out);
}

static spccl_status check_text(const spccl_comm *comm, const char *call, const char **out_text)
{
    SP_TRY(sp_comm_check(comm, call));
    return out_text != NULL ? SPCCL_OK : SP_FAIL(SPCCL_ERR_ARG, "%s: out_text is NULL", call);
}

spccl_status spccl_comm_describe_schedule(spccl_comm *comm, size_t i, const char **out_text)
{
    SP_TRY(check_text(comm, __func__, out_text));
    if (!sp_exec_describe_choice(&comm->exec, i, comm->schedule_text, sizeof comm->schedule_text))
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_comm_describe_schedule: no kind of call has number %zu", i);
    *out_text = comm->schedule_text;
    return SPCCL_OK;
}

spccl_status spccl_comm_describe_link(spccl_comm *comm, int peer, const char **out_text)
{
    const char *with_gpu;
    SP_TRY(check_text(comm, __func__, out_text));
    if (peer < 0 || peer >= comm->world_size)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_comm_describe_link: peer %d is not in the group", peer);
    with_gpu = sp_gpu_part_here.describe_link(comm, peer);
    *out_text = peer == comm->rank ? "itself" : with_gpu != NULL ? with_gpu : comm->links.peers[peer].text;
    return SPCCL_OK;
}

spccl_status spccl_comm_local_ip(spccl_comm *comm, const char **out_text)
{
    SP_TRY(check_text(comm, __func__, out_text));
    comm->local_ip[0] = '\0';
    for (int peer = 0; peer < comm->world_size && comm->local_ip[0] == '\0'; peer++) {
        const sp_transport *t = comm->links.peers[peer].transport;
        if (peer != comm->rank && comm->links.tcp != NULL && (t->has_control != NULL || t->local_ip != NULL))
            sp_transport_find("tcp")->local_ip(comm->links.tcp, peer, comm->local_ip, sizeof comm->local_ip);
    }
    *out_text = comm->local_ip[0] != '\0' ? comm->local_ip : "127.0.0.1";
    return SPCCL_OK;
}
