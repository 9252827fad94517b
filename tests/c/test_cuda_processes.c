/* test_cuda_processes.c - ranks that are processes. They share GPU memory by descriptors or ipc handles.
 * Results must equal the CPU's. When one rank is killed, the others must get an error within seconds and be
 * able to go on. The main process never starts CUDA: it runs this program once per rank (posix_spawn, so that
 * neither threads nor CUDA contexts are forked). On one GPU the processes take turns. --small: for
 * sanitizers; kills no rank. */
#include "cuda_test.h"
#include "spccl_channel.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define RANKS_MAX 4
#define CAP ((size_t)8 << 20)
#define SELF "/proc/self/exe"
#define SOON_MS 10000

extern char **environ;

/* ---- a rank ---- */

static struct {
    int rank, n_ranks;
    spccl_comm *comm;
    uint8_t *in, *out, *got, *in_d, *out_d;
    cudaStream_t on;
    uint64_t rng;        /* the same on all ranks */
    _Atomic int *n_here; /* in shared memory: number of ranks that have come */
} me;

enum { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, N_COLLS };
static const char *const coll_names[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast"};

struct call {
    int coll, root;
    spccl_dtype dtype;
    spccl_redop op;
    size_t n;
};

static spccl_status on_gpu(const struct call *c)
{
    switch (c->coll) {
    case ALL_GATHER:
        return spccl_cuda_all_gather(me.comm, me.in_d, me.out_d, c->n, c->dtype, me.on);
    case REDUCE_SCATTER:
        return spccl_cuda_reduce_scatter(me.comm, me.in_d, me.out_d, c->n, c->dtype, c->op, me.on);
    case ALL_REDUCE:
        return spccl_cuda_all_reduce(me.comm, me.in_d, me.out_d, c->n, c->dtype, c->op, me.on);
    default:
        return spccl_cuda_broadcast(me.comm, me.out_d, c->n, c->dtype, c->root, me.on);
    }
}

static spccl_status on_cpu(const struct call *c)
{
    switch (c->coll) {
    case ALL_GATHER:
        return spccl_all_gather(me.comm, me.in, me.out, c->n, c->dtype, NULL);
    case REDUCE_SCATTER:
        return spccl_reduce_scatter(me.comm, me.in, me.out, c->n, c->dtype, c->op, NULL);
    case ALL_REDUCE:
        return spccl_all_reduce(me.comm, me.in, me.out, c->n, c->dtype, c->op, NULL);
    default:
        return spccl_broadcast(me.comm, me.out, c->n, c->dtype, c->root, NULL);
    }
}

/* The same call on CPU and GPU. Compares all of out, and the guard after it, bit for bit. */
static void compare(const struct call *c)
{
    size_t block = c->n * spccl_dtype_bytes(c->dtype), all = block * (size_t)me.n_ranks, at;
    size_t in_bytes = c->coll == REDUCE_SCATTER ? all : block;
    size_t out_bytes = (c->coll == ALL_GATHER ? all : block) + GUARD_BYTES;
    uint64_t own = me.rng + 1000u * (uint64_t)me.rank; /* for the values, which differ from rank to rank */
    array_kind kind = (array_kind)(next_rand(&own) % N_KINDS);
    fill_array(me.in, in_bytes / spccl_dtype_bytes(c->dtype), c->dtype, kind, &own);
    memset(me.out, POISON, out_bytes);
    if (c->coll == BROADCAST && me.rank == c->root)
        memcpy(me.out, me.in, block);
    CUDA_OK(cudaMemcpyAsync(me.in_d, me.in, in_bytes, cudaMemcpyHostToDevice, me.on));
    CUDA_OK(cudaMemcpyAsync(me.out_d, me.out, out_bytes, cudaMemcpyHostToDevice, me.on));
    CHECK_OK(on_gpu(c));
    CUDA_OK(cudaMemcpyAsync(me.got, me.out_d, out_bytes, cudaMemcpyDeviceToHost, me.on));
    CHECK_OK(spccl_cuda_wait(me.comm, me.on, wait_ms()));
    CHECK_OK(on_cpu(c));
    at = first_difference(me.out, me.got, out_bytes);
    CHECK(at == out_bytes, "rank %d: %s of %zu %s, op %d, own values %s: byte %zu is %#x, the CPU's %#x",
          me.rank, coll_names[c->coll], c->n, spccl_dtype_name(c->dtype), (int)c->op, kind_names[kind], at,
          me.got[at], me.out[at]);
}

static void compare_many(int n_calls)
{
    static const size_t sizes[] = {1, 7, 257, 4095, 4097, 50000, 200000};
    for (int i = 0; i < n_calls && test_n_failed == 0; i++) {
        struct call c = {.coll = i % N_COLLS};
        bool gathers = c.coll == ALL_GATHER || c.coll == BROADCAST;
        c.dtype = (spccl_dtype)(1 + next_rand(&me.rng) % N_DTYPES);
        c.op = (spccl_redop)(next_rand(&me.rng) % 5);
        c.n = sizes[next_rand(&me.rng) % (is_small ? 5 : 7)];
        c.root = (int)(next_rand(&me.rng) % (uint64_t)me.n_ranks);
        if (c.dtype == SPCCL_FLOAT8 && !gathers)
            c.dtype = SPCCL_FLOAT32;
        compare(&c);
    }
}

/* Join the group of `id` and attach the GPU. */
static bool join_group(const spccl_unique_id *id, int rank, int n_ranks)
{
    spccl_config config = SPCCL_CONFIG_INIT;
    spccl_cuda_config gpu = SPCCL_CUDA_CONFIG_INIT;
    spccl_status st;
    config.timeout_ms = 60000;
    me.rank = rank;
    me.n_ranks = n_ranks;
    st = spccl_comm_init_rank(id, rank, n_ranks, &config, &me.comm);
    CHECK(st == SPCCL_OK, "rank %d: %s", rank, spccl_last_error());
    if (st != SPCCL_OK)
        return false;
    CUDA_OK(cudaGetDevice(&gpu.device));
    if (is_small)
        gpu.inbox_bytes = (size_t)16 << 20;
    st = spccl_cuda_attach(me.comm, &gpu);
    CHECK(st == SPCCL_OK, "rank %d: %s", rank, spccl_last_error());
    return st == SPCCL_OK;
}

static void make_buffers(int rank)
{
    CUDA_OK(cudaSetDevice(rank % n_gpus));
    me.in = pinned_alloc(CAP);
    me.out = pinned_alloc(CAP);
    me.got = pinned_alloc(CAP);
    me.in_d = device_alloc(CAP);
    me.out_d = device_alloc(CAP);
    CUDA_OK(cudaStreamCreateWithFlags(&me.on, cudaStreamNonBlocking));
}

/* Wait until all ranks have come. Not by the communicator, which may break before the last rank has come. */
static void wait_for_ranks(void)
{
    int64_t until = now_ms() + 60000;
    ++*me.n_here;
    while (*me.n_here < me.n_ranks && now_ms() < until)
        sleep_ms(1);
    CHECK(*me.n_here == me.n_ranks, "rank %d: only %d of %d ranks have come", me.rank, *me.n_here,
          me.n_ranks);
}

/* Rank 1 is killed: before it launches anything, or with in_flight while its launches run. */
static void lose_rank_1(bool in_flight)
{
    struct call c = {.coll = ALL_REDUCE, .dtype = SPCCL_FLOAT32, .op = SPCCL_SUM, .n = 50000};
    int64_t start;
    spccl_status st = SPCCL_OK;
    wait_for_ranks();
    start = now_ms();
    if (me.rank == 1) {
        for (int i = 0; i < 10 && in_flight; i++)
            (void)on_gpu(&c);
        raise(SIGKILL);
    }
    for (int i = 0; i < 20 && st == SPCCL_OK; i++) /* the communicator may break before the last call */
        st = on_gpu(&c);
    if (st == SPCCL_OK)
        st = spccl_cuda_wait(me.comm, me.on, SOON_MS);
    /* The rank that notices first tells the other. */
    CHECK((st == SPCCL_ERR_PEER || st == SPCCL_ERR_ABORTED) && strstr(spccl_last_error(), "rank 1") != NULL,
          "rank %d: %s: %s", me.rank, spccl_status_name(st), spccl_last_error());
    CHECK(spccl_comm_async_error(me.comm) == st, "rank %d: %s", me.rank, spccl_last_error());
    CHECK(now_ms() - start < SOON_MS, "rank %d: the error came after %lld ms", me.rank,
          (long long)(now_ms() - start));
    sync_stream(me.on); /* the kernels have ended, and the GPU works */
    CUDA_OK(cudaMemsetAsync(me.out_d, 0x11, CAP, me.on));
    sync_stream(me.on);
}

/* Each rank copies into the next rank's window of channels: memory inside an allocation of that process. */
#define WINDOW_OFF 4112u
#define WINDOW_BYTES 65536u
static void put_into_windows(void)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    int next = (me.rank + 1) % me.n_ranks, previous = (me.rank + me.n_ranks - 1) % me.n_ranks;
    spccl_channels *channels = NULL;
    spccl_memory_channel to_next;
    uint8_t mine = 1, all[RANKS_MAX];
    size_t i = 0;
    config.window_bytes = WINDOW_BYTES;
    config.window = me.out_d + WINDOW_OFF;
    CHECK_OK(spccl_channels_create(me.comm, &config, &channels));
    if (channels == NULL)
        return;
    CHECK_OK(spccl_channels_get_memory(channels, next, 0, &to_next));
    memset(me.in, 1 + me.rank, WINDOW_BYTES);
    CUDA_OK(cudaMemcpyAsync(me.in_d, me.in, WINDOW_BYTES, cudaMemcpyHostToDevice, me.on));
    CUDA_OK(cudaMemcpyAsync(to_next.peer_window, me.in_d, WINDOW_BYTES, cudaMemcpyDeviceToDevice, me.on));
    sync_stream(me.on);
    CHECK_OK(spccl_all_gather(me.comm, &mine, all, 1, SPCCL_UINT8, NULL)); /* all have copied */
    CUDA_OK(cudaMemcpyAsync(me.got, config.window, WINDOW_BYTES, cudaMemcpyDeviceToHost, me.on));
    sync_stream(me.on);
    while (i < WINDOW_BYTES && me.got[i] == 1 + previous)
        i++;
    CHECK(i == WINDOW_BYTES, "rank %d: byte %zu of its window is %u, wanted %d", me.rank, i,
          i < WINDOW_BYTES ? me.got[i] : 0u, 1 + previous);
    spccl_channels_destroy(channels);
}

/* Arguments: worker RANK N_RANKS SCENE RNG ID ID2 FD. The ids are hexadecimal; ID2 is for the group after the
 * loss. FD is memory that the processes share. */
static void read_id(const char *hex, spccl_unique_id *out)
{
    for (size_t i = 0; i < sizeof out->bytes; i++) {
        char two[3] = {hex[2 * i], hex[2 * i + 1], '\0'};
        out->bytes[i] = (char)strtoul(two, NULL, 16);
    }
}

static int run_worker(char **argv)
{
    int rank = atoi(argv[0]), n_ranks = atoi(argv[1]);
    const char *scene = argv[2];
    spccl_unique_id id, id2;
    me.rng = strtoull(argv[3], NULL, 0);
    read_id(argv[4], &id);
    read_id(argv[5], &id2);
    me.n_here = mmap(NULL, sizeof *me.n_here, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(argv[6]), 0);
    CHECK(me.n_here != MAP_FAILED, "shared memory of the processes: %s", strerror(errno));
    if (test_n_failed != 0)
        return 1;
    make_buffers(rank);
    if (!join_group(&id, rank, n_ranks))
        return 1;
    compare_many(strcmp(scene, "works") == 0 && !is_small ? 60 * n_rounds : 8);
    if (strcmp(scene, "window") == 0)
        put_into_windows();
    if (strncmp(scene, "killed", 6) == 0) {
        lose_rank_1(strcmp(scene, "killed_in_flight") == 0);
        CHECK_OK(spccl_comm_destroy(me.comm));
        me.comm = NULL;
        if (!join_group(&id2, rank > 1 ? rank - 1 : rank, n_ranks - 1))
            return 1;
        compare_many(8);
    }
    CHECK_OK(spccl_comm_destroy(me.comm));
    CUDA_OK(cudaDeviceSynchronize());
    CUDA_OK(cudaGetLastError());
    return test_n_failed != 0;
}

/* ---- the process that starts them ---- */

static pid_t spawn(char *const *argv)
{
    pid_t pid = 0;
    int err = posix_spawn(&pid, SELF, NULL, NULL, argv, environ);
    CHECK(err == 0, "starting %s: %s", SELF, strerror(err));
    return err == 0 ? pid : 0;
}

/* The wait status of a process. A process that does not end in time is killed, as the status then shows. */
static int await_exit(pid_t pid, int64_t until_ms)
{
    int status = 0;
    pid_t got;
    while ((got = waitpid(pid, &status, WNOHANG)) == 0 && now_ms() < until_ms)
        sleep_ms(5);
    if (got == 0) {
        CHECK(false, "process %d does not end", (int)pid);
        kill(pid, SIGKILL);
        waitpid(pid, &status, 0);
    }
    return status;
}

static void write_id(char *hex)
{
    spccl_unique_id id;
    CHECK_OK(spccl_get_unique_id(&id));
    for (size_t i = 0; i < sizeof id.bytes; i++)
        snprintf(hex + 2 * i, 3, "%02x", (unsigned)(uint8_t)id.bytes[i]);
}

static void run_scene(const char *scene, int n_ranks)
{
    char id[2 * sizeof(spccl_unique_id) + 1], id2[sizeof id], rng[32], size_option[16], scene_text[32];
    char ranks_text[8], fd_text[16];
    pid_t pids[RANKS_MAX];
    int64_t until = now_ms() + (is_small ? 200000 : 60000) * (int64_t)n_rounds;
    bool kills = strncmp(scene, "killed", 6) == 0;
    int fd = memfd_create("ranks", 0); /* the ranks inherit it */
    CHECK(fd >= 0 && ftruncate(fd, 4096) == 0, "shared memory of the processes: %s", strerror(errno));
    snprintf(fd_text, sizeof fd_text, "%d", fd);
    write_id(id);
    write_id(id2);
    snprintf(rng, sizeof rng, "%llu", (unsigned long long)(test_rand() >> 1));
    snprintf(ranks_text, sizeof ranks_text, "%d", n_ranks);
    snprintf(scene_text, sizeof scene_text, "%s", scene);
    snprintf(size_option, sizeof size_option, "%s", is_small ? "--small" : is_long ? "--long" : "--usual");
    for (int r = 0; r < n_ranks; r++) {
        char self[] = SELF, worker[] = "worker", rank[8];
        char *argv[] = {self, worker, rank, ranks_text, scene_text, rng, id, id2, fd_text, size_option, NULL};
        snprintf(rank, sizeof rank, "%d", r);
        pids[r] = spawn(argv);
    }
    for (int r = 0; r < n_ranks; r++) {
        int status = pids[r] != 0 ? await_exit(pids[r], until) : 0;
        bool well = kills && r == 1 ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                                    : WIFEXITED(status) && WEXITSTATUS(status) == 0;
        CHECK(well, "%s of %d ranks, rank %d: wait status %#x", scene, n_ranks, r, (unsigned)status);
    }
    close(fd);
}

static void test_works(void)
{
    run_scene("works", 2);
    if (!is_small)
        run_scene("works", 3);
    if (is_long || n_gpus >= 4)
        run_scene("works", 4);
}

/* Both kinds of handles, whichever is the default on this machine. */
static void test_handles(void)
{
    static const char *const handles[] = {"fd", "ipc"};
    for (int i = 0; i < 2; i++) {
        setenv("SPCCL_DEBUG_NVLINK_HANDLES", handles[i], 1);
        run_scene("few", 2);
    }
    unsetenv("SPCCL_DEBUG_NVLINK_HANDLES");
}

static void test_window(void)
{
    run_scene("window", 2);
    if (!is_small)
        run_scene("window", 3);
}

static void test_killed(void)
{
    if (is_small)
        return; /* a sanitizer counts a killed process as a failure */
    run_scene("killed", 3);
    run_scene("killed_in_flight", 3);
    run_scene("killed", 2); /* the rank that is left goes on alone */
}

/* The number of GPUs. Another process asks CUDA for it. */
static int count_gpus(void)
{
    char self[] = SELF, count[] = "count";
    char *argv[] = {self, count, NULL};
    pid_t pid = spawn(argv);
    int status = pid != 0 ? await_exit(pid, now_ms() + 60000) : 0;
    CHECK(WIFEXITED(status), "counting the GPUs: wait status %#x", (unsigned)status);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"works", test_works},
                                             {"handles", test_handles},
                                             {"window", test_window},
                                             {"killed", test_killed},
                                             {NULL, NULL}};
    if (argc > 1 && strcmp(argv[1], "count") == 0)
        return spccl_cuda_device_count();
    if (argc > 9 && strcmp(argv[1], "worker") == 0) {
        cuda_test_start(&argc, argv);
        setenv("SPCCL_SCHEDULE", "direct", 1); /* so that both queues are used */
        return run_worker(argv + 2);
    }
    cuda_test_options(&argc, argv);
    n_gpus = count_gpus();
    if (n_gpus == 0) {
        printf("skipped: no GPU that CUDA can use\n");
        return 77;
    }
    return n_gpus < 0 ? 1 : test_main(cases, argc, argv);
}
