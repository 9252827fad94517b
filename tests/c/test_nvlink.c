/* test_nvlink.c - ranks exchange their GPU memory, between threads and between processes. The GPU is fake. */
#include "fake_gpu.h"

#include "core/contract/gpu_share.h"
#include "test.h"

#include <signal.h>
#include <sys/wait.h>

#define RANKS 4
#define BYTES 8192

struct scene {
    atomic_int n_open;
    uint8_t addresses[RANKS][SP_GPU_SHARE_ADDRESS_BYTES];
    uint8_t secrets[RANKS][SP_SECRET_BYTES];
    size_t bytes[RANKS];
    int n, timeout_ms, absent, broken; /* absent: opens and leaves; broken: its `still` fails; -1: nobody */
    spccl_status status[RANKS];
    char text[RANKS][500];
};

struct member {
    struct scene *s;
    int rank;
    pthread_t thread;
};

static spccl_status not_whole(void *ctx)
{
    (void)ctx;
    return SP_FAIL(SPCCL_ERR_PEER, "the group is broken");
}

/* Each rank's memory is filled with its rank. Then each rank writes its rank to its byte of each peer's
 * memory. */
static spccl_status check_memory(const struct member *m, sp_gpu_memory *own, sp_gpu_memory **peers)
{
    (void)own;
    for (int r = 0; r < m->s->n; r++) {
        const uint8_t *at;
        if (r == m->rank)
            continue;
        if (peers[r] == NULL)
            return SP_FAIL(SPCCL_ERR_BUG, "no memory of rank %d", r);
        at = peers[r]->at;
        for (size_t i = 0; i < BYTES; i++)
            if (at[i] != r + 1)
                return SP_FAIL(SPCCL_ERR_BUG, "byte %zu of rank %d is %u", i, r, at[i]);
    }
    return SPCCL_OK;
}

static void *run_member(void *arg)
{
    struct member *m = arg;
    struct scene *s = m->s;
    uint8_t host[SP_HOST_ID_BYTES];
    sp_gpu_share_config c = {.rank = m->rank,
                             .world_size = s->n,
                             .secret = s->secrets[m->rank],
                             .host = host,
                             .group_tag = 5,
                             .call = "spccl_cuda_attach",
                             .what = "an inbox",
                             .ops = &sp_gpu_ops_fake,
                             .deadline_ns = sp_deadline_in_ms(s->timeout_ms),
                             .still = s->broken == m->rank ? not_whole : NULL};
    sp_gpu_memory *own = NULL, *peers[RANKS] = {NULL};
    sp_gpu_share *share = NULL;
    spccl_status st;
    SP_TRY_TO(out, st, sp_host_identity(NULL, host));
    SP_TRY_TO(out, st, sp_gpu_share_open(&c, &share));
    SP_TRY_TO(out, st, sp_gpu_share_address(share, s->addresses[m->rank]));
    SP_TRY_TO(out, st, fake_memory_create(0, s->bytes[m->rank], "fd", false, &own));
    memset(own->at, m->rank + 1, BYTES);
    s->n_open++;
    while (s->n_open < s->n)
        usleep(100);
    if (s->absent == m->rank)
        goto out;
    st = sp_gpu_share_exchange(share, own, s->bytes[m->rank], s->addresses[0], sizeof s->addresses[0], peers);
    if (st == SPCCL_OK)
        st = check_memory(m, own, peers);
out:
    s->status[m->rank] = st;
    snprintf(s->text[m->rank], sizeof s->text[m->rank], "%s", st == SPCCL_OK ? "" : spccl_last_error());
    sp_gpu_share_close(share);
    for (int r = 0; r < RANKS; r++)
        fake_memory_destroy(peers[r]);
    fake_memory_destroy(own);
    return NULL;
}

static struct scene *make_scene(int n)
{
    struct scene *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    s->n = n;
    s->timeout_ms = 20000;
    s->absent = s->broken = -1;
    for (int r = 0; r < RANKS; r++)
        s->bytes[r] = BYTES;
    return s;
}

static void run_threads(struct scene *s)
{
    struct member m[RANKS];
    for (int r = 0; r < s->n; r++) {
        m[r] = (struct member){.s = s, .rank = r};
        CHECK(pthread_create(&m[r].thread, NULL, run_member, &m[r]) == 0, "thread");
    }
    for (int r = 0; r < s->n; r++)
        pthread_join(m[r].thread, NULL);
    CHECK(fake.n_memories == 0, "%d memories are left", fake.n_memories);
}

static void run_processes(struct scene *s, int killed)
{
    pid_t pids[RANKS];
    for (int r = 0; r < s->n; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            struct member m = {.s = s, .rank = r};
            if (r == killed) {
                s->absent = r; /* its memory and socket are gone with it */
                run_member(&m);
                raise(SIGKILL);
            }
            run_member(&m);
            _exit(0);
        }
    }
    for (int r = 0; r < s->n; r++)
        waitpid(pids[r], NULL, 0);
}

static void expect(const struct scene *s, int rank, spccl_status st, const char *word)
{
    CHECK(s->status[rank] == st && strstr(s->text[rank], word) != NULL,
          "rank %d: wanted %s with \"%s\", got %s: %s", rank, spccl_status_name(st), word,
          spccl_status_name(s->status[rank]), s->text[rank]);
}

static void test_exchange(void)
{
    for (int n = 1; n <= RANKS; n++)
        for (int round = 0; round < 5; round++) {
            struct scene *s = make_scene(n);
            if (round % 2 == 0)
                run_threads(s);
            else
                run_processes(s, -1);
            for (int r = 0; r < n; r++)
                expect(s, r, SPCCL_OK, "");
            munmap(s, sizeof *s);
        }
}

static void test_wrong_secret(void)
{
    struct scene *s = make_scene(2);
    s->secrets[1][7] = 1;
    s->timeout_ms = 1500;
    run_threads(s);
    expect(s, 0, SPCCL_ERR_AUTH, "rank 1");
    expect(s, 1, SPCCL_ERR_TIMEOUT, "from rank 0");
    munmap(s, sizeof *s);
}

static void test_dead_peer(void)
{
    struct scene *s = make_scene(3);
    int64_t start_ns = sp_now_ns();
    s->timeout_ms = 60000;
    s->absent = 2; /* it leaves after it listened: a rank that connects to it notices at once */
    run_threads(s);
    expect(s, 0, SPCCL_ERR_PEER, "rank "); /* rank 2, or rank 1, which noticed first */
    expect(s, 1, SPCCL_ERR_PEER, "rank ");
    CHECK(sp_now_ns() - start_ns < INT64_C(30000000000), "noticed late");
    munmap(s, sizeof *s);

    s = make_scene(2); /* the lower rank connects, so only `still` can tell the higher rank that it is gone */
    s->timeout_ms = 60000;
    s->absent = 0;
    s->broken = 1;
    run_threads(s);
    expect(s, 1, SPCCL_ERR_PEER, "the group is broken");
    munmap(s, sizeof *s);

    s = make_scene(3);
    s->timeout_ms = 5000;
    run_processes(s, 2);
    expect(s, 0, SPCCL_ERR_PEER, "rank ");
    munmap(s, sizeof *s);
}

static void test_late(void)
{
    struct scene *s = make_scene(2);
    s->timeout_ms = 300;
    s->absent = 0;
    run_threads(s);
    expect(s, 1, SPCCL_ERR_TIMEOUT, "rank 0");
    munmap(s, sizeof *s);
}

static void test_unreachable(void)
{
    struct scene *s = make_scene(2);
    fake.import_fails = true;
    run_threads(s);
    expect(s, 0, SPCCL_ERR_UNREACHABLE, "rank 0: GPU memory of rank 1: it cannot be mapped here: fakeImport");
    expect(s, 1, SPCCL_ERR_UNREACHABLE, "rank 1: GPU memory of rank 0");
    fake.import_fails = false;
    munmap(s, sizeof *s);
}

static void test_mismatch(void)
{
    struct scene *s = make_scene(2);
    s->bytes[1] = 2 * BYTES;
    run_threads(s);
    expect(s, 0, SPCCL_ERR_MISMATCH, "16384");
    expect(s, 1, SPCCL_ERR_MISMATCH, "8192");
    munmap(s, sizeof *s);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"exchange", test_exchange},
                                             {"wrong_secret", test_wrong_secret},
                                             {"dead_peer", test_dead_peer},
                                             {"late", test_late},
                                             {"unreachable", test_unreachable},
                                             {"mismatch", test_mismatch},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
