/* test_next_transport.c - a transport that fails for a pair of ranks at start-up: both ends take the next one, with one
 * warning, and collectives are right. Ranks are threads. With TEST_ONLY_TRANSPORT it is ib that fails, in the guest of
 * tools/softroce.py, and the next one is a net plugin; else transport/fault.h. */
#include "captured_log.h"
#include "ranks.h"

#include "core/base/status.h"
#include "core/run/comm.h"
#include "transport/fault.h"

#define N_RANKS 3
#define N_ELEMS 30000

/* Each rank must have logged one line with its own words, and no other; words NULL: none. */
static void check_log(const char *const words[N_RANKS])
{
    char text[8192], prefix[32];
    end_log(text, sizeof text);
    for (int r = 0; r < N_RANKS; r++) {
        const char *line, *end, *found;
        snprintf(prefix, sizeof prefix, "spccl[%d]", r);
        line = strstr(text, prefix);
        CHECK((line != NULL) == (words[r] != NULL), "rank %d: wanted \"%s\", got: %s", r,
              words[r] != NULL ? words[r] : "", text);
        if (line == NULL || words[r] == NULL)
            continue;
        end = strchr(line, '\n');
        found = strstr(line, words[r]);
        CHECK(found != NULL && found < end, "rank %d: wanted \"%s\", got: %s", r, words[r], text);
        CHECK(strstr(end, prefix) == NULL, "rank %d logged more than once: %s", r, text);
    }
}

/* ---- groups ---- */

struct scene {
    const char *transports;
    const char *text[N_RANKS][N_RANKS]; /* part of what describes the link from rank to peer */
    bool rdma;                          /* NCCL might use GPUDirect RDMA */
};

static void check_group(struct rank_ctx *c)
{
    const struct scene *s = c->arg;
    float *x = calloc(N_ELEMS, sizeof *x);
    for (int peer = 0; peer < c->n_ranks; peer++) {
        const sp_link *link = &c->comm->links.peers[peer];
        const char *text = "";
        if (peer == c->rank)
            continue;
        CHECK_OK(spccl_comm_describe_link(c->comm, peer, &text));
        CHECK((link->transport->is_rdma != NULL && link->transport->is_rdma(link->ep, peer)) == s->rdma,
              "rank %d to %d: \"%s\"", c->rank, peer, text);
        CHECK(strstr(text, s->text[c->rank][peer]) != NULL, "rank %d to %d: \"%s\", wanted \"%s\"", c->rank,
              peer, text, s->text[c->rank][peer]);
    }
    for (int k = 0; k < 3; k++) {
        size_t wrong = 0;
        for (size_t i = 0; i < N_ELEMS; i++)
            x[i] = i % 7 == 0 ? (float)(c->rank + 1 + k) : 0;
        CHECK_OK(spccl_all_reduce(c->comm, x, x, N_ELEMS, SPCCL_FLOAT32, SPCCL_SUM, NULL));
        for (size_t i = 0; i < N_ELEMS; i++)
            wrong += x[i] != (i % 7 == 0 ? (float)(N_RANKS * (N_RANKS + 1) / 2 + k * N_RANKS) : 0);
        CHECK(wrong == 0, "rank %d: %zu sums are wrong", c->rank, wrong);
    }
    free(x);
}

static void run(struct scene *s, const char *const words[N_RANKS])
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = 120000;
    config.transports = s->transports;
    begin_log();
    run_ranks(N_RANKS, &config, check_group, s, ctx);
    check_log(words);
    for (int r = 0; r < N_RANKS; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

static void fill(struct scene *s, const char *text)
{
    for (int r = 0; r < N_RANKS; r++)
        for (int p = 0; p < N_RANKS; p++)
            s->text[r][p] = text;
}

#if !defined(TEST_ONLY_TRANSPORT)

/* Pairs of rank 1 take shm, the others stay. */
static void test_some_pairs(void)
{
    static const char *const words[N_RANKS] = {
        "fault: shm is tried in place of fault with rank 1: it failed for a test",
        "fault: shm is tried in place of fault with rank 0, 2: it failed for a test",
        "fault: shm is tried in place of fault with rank 1: it failed for a test"};
    struct scene s = {.transports = "fault,shm,tcp"};
    fill(&s, "shm; fault failed: it failed for a test");
    s.text[0][2] = s.text[2][0] = "fault: ";
    sp_fault = (sp_fault_plan){.inner = "tcp", .fails = "pair", .fails_rank = 1};
    run(&s, words);
}

/* All pairs leave, so the endpoint that failed is closed. */
static void test_all_pairs(void)
{
    static const char *const words[N_RANKS] = {"with rank 1, 2", "with rank 0, 2", "with rank 0, 1"};
    struct scene s = {.transports = "fault,inproc"};
    fill(&s, "inproc; fault failed");
    sp_fault = (sp_fault_plan){.inner = "tcp", .fails = "pair", .fails_rank = -1};
    run(&s, words);
}

/* Nothing fails, or there is no next transport: the first one carries all pairs, and the others are closed. */
static void test_no_next(void)
{
    static const char *const silent[N_RANKS] = {NULL};
    struct scene s = {.transports = "fault,shm,tcp"};
    fill(&s, "fault: ");
    sp_fault = (sp_fault_plan){.inner = "tcp"};
    run(&s, silent);
    s.transports = "fault,tcp"; /* its own tcp link is the next one */
    sp_fault = (sp_fault_plan){.inner = "tcp", .fails = "pair", .fails_rank = -1};
    run(&s, silent);
    s.transports = "shm,fault"; /* what is before it in the list is no next one */
    fill(&s, "shm: ");
    run(&s, silent);
}

static const struct test_case cases[] = {
    {"some_pairs", test_some_pairs}, {"all_pairs", test_all_pairs}, {"no_next", test_no_next}, {NULL, NULL}};

#else

/* Queue pairs cannot be opened. */
spccl_status __wrap_sp_ib_link_open(void *d, int n_writes, int n_receives, void **out, void *mine);
spccl_status __wrap_sp_ib_link_open(void *d, int n_writes, int n_receives, void **out, void *mine)
{
    (void)d;
    (void)n_writes;
    (void)n_receives;
    (void)out;
    (void)mine;
    return SP_FAIL(SPCCL_ERR_SYSTEM, "device rxe0 port 1: no queue pair for a test");
}

static void test_plugin(void)
{
    static const char *const words[N_RANKS] = {
        "ib: ncclnet is tried in place of ib with rank 1, 2: device rxe",
        "ib: ncclnet is tried in place of ib with rank 0, 2: device rxe",
        "ib: ncclnet is tried in place of ib with rank 0, 1: device rxe"};
    struct scene s = {.transports = "ib,ncclnet,tcp", .rdma = true};
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 1);
    fill(&s, "; ib failed: device rxe"); /* after what ncclnet says */
    run(&s, words);
    s.transports = "ib,ncclnet"; /* tcp may not carry messages */
    run(&s, words);
}

static void test_tcp(void)
{
    static const char *const words[N_RANKS] = {"ib: tcp is used in place of ib with rank 1, 2: device rxe",
                                               "ib: tcp is used in place of ib with rank 0, 2: device rxe",
                                               "ib: tcp is used in place of ib with rank 0, 1: device rxe"};
    struct scene s = {.transports = "ib,ncclnet,tcp"};
    setenv("SPCCL_NET_PLUGIN", "none", 1);
    fill(&s, "tcp, as ib failed: device rxe");
    run(&s, words);
}

static const struct test_case cases[] = {{"tcp", test_tcp}, {"plugin", test_plugin}, {NULL, NULL}};

#endif

int main(int argc, char **argv)
{
#if defined(TEST_ONLY_TRANSPORT)
    test_ranks_per_host = 1; /* ib and ncclnet are for other hosts */
#endif
    return test_main(cases, argc, argv);
}
