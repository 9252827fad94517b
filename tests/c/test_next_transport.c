/* test_next_transport.c - a transport that fails for a pair of ranks at start-up: both ends take the next one, with one
 * warning, and collectives are right. Ranks are threads. With TEST_ONLY_TRANSPORT it is ib that fails, in the guest of
 * tools/softroce.py, and the next one is a net plugin; else fault.h.
 * There it also tests what ib has to do with cards: which devices it finds and chooses, and a card that a plugin wants. */
#include "captured_log.h"
#include "ranks.h"

#include "core/base/status.h"
#include "core/run/comm.h"
#include "fault.h"
#include "transport/net/ib/ib_verbs.h"

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
        CHECK(link->transport->is_rdma == s->rdma, "rank %d to %d: \"%s\"", c->rank, peer, text);
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

static void run(struct scene *s, void (*fn)(struct rank_ctx *), const char *const words[N_RANKS])
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = 120000;
    config.transports = s->transports;
    begin_log();
    run_ranks(N_RANKS, &config, fn, s, ctx);
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
    run(&s, check_group, words);
}

/* All pairs leave, so the endpoint that failed is closed. */
static void test_all_pairs(void)
{
    static const char *const words[N_RANKS] = {"with rank 1, 2", "with rank 0, 2", "with rank 0, 1"};
    struct scene s = {.transports = "fault,inproc"};
    fill(&s, "inproc; fault failed");
    sp_fault = (sp_fault_plan){.inner = "tcp", .fails = "pair", .fails_rank = -1};
    run(&s, check_group, words);
    s.transports = "fault,tcp"; /* fault over tcp has no control link: tcp is a next one as others are */
    fill(&s, "; fault failed: it failed for a test");
    run(&s, check_group, words);
}

/* Nothing fails: the first one carries all pairs, and the others are closed. */
static void test_no_next(void)
{
    static const char *const silent[N_RANKS] = {NULL};
    struct scene s = {.transports = "fault,shm,tcp"};
    fill(&s, "fault: ");
    sp_fault = (sp_fault_plan){.inner = "tcp"};
    run(&s, check_group, silent);
    sp_fault = (sp_fault_plan){.inner = "tcp", .fails = "pair", .fails_rank = -1};
    s.transports = "shm,fault"; /* what is before it in the list is no next one */
    fill(&s, "shm: ");
    run(&s, check_group, silent);
}

static const struct test_case cases[] = {
    {"some_pairs", test_some_pairs}, {"all_pairs", test_all_pairs}, {"no_next", test_no_next}, {NULL, NULL}};

#else

/* Queue pairs cannot be opened, unless this is set. */
static bool opens_qps;
spccl_status __real_sp_ib_link_open(void *d, int n_writes, int n_receives, void **out, void *mine);
spccl_status __wrap_sp_ib_link_open(void *d, int n_writes, int n_receives, void **out, void *mine);
spccl_status __wrap_sp_ib_link_open(void *d, int n_writes, int n_receives, void **out, void *mine)
{
    if (opens_qps)
        return __real_sp_ib_link_open(d, n_writes, n_receives, out, mine);
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
    run(&s, check_group, words);
    s.transports = "ib,ncclnet"; /* tcp may not carry messages */
    run(&s, check_group, words);
}

static void test_tcp(void)
{
    static const char *const words[N_RANKS] = {"ib: tcp is used in place of ib with rank 1, 2: device rxe",
                                               "ib: tcp is used in place of ib with rank 0, 2: device rxe",
                                               "ib: tcp is used in place of ib with rank 0, 1: device rxe"};
    struct scene s = {.transports = "ib,ncclnet,tcp"};
    setenv("SPCCL_NET_PLUGIN", "none", 1);
    fill(&s, "tcp, as ib failed: device rxe");
    run(&s, check_group, words);
}

/* Join a second group, for which this process cannot have the card, while the first one is up. Both carry sums. */
static void check_second(struct rank_ctx *c)
{
    const struct scene *scenes = c->arg;
    const spccl_store store = {
        .struct_bytes = sizeof store, .ctx = c->store, .set = mem_store_set, .get = mem_store_get};
    struct rank_ctx second = *c;
    spccl_config config = *c->config;
    char host[24];
    snprintf(host, sizeof host, "host %d", c->rank);
    config.host_id = host;
    config.name = "second";
    config.transports = scenes[1].transports;
    second.arg = (void *)&scenes[1];
    second.comm = NULL;
    check_group(c);
    CHECK_OK(spccl_comm_create(&store, c->rank, c->n_ranks, &config, &second.comm));
    if (second.comm != NULL)
        check_group(&second);
    check_group(c);
    CHECK_OK(spccl_comm_destroy(second.comm));
}

/* ib, a plugin and tcp on one card: the first two take turns. The plugin's device is named as the interface of rxe0. */
static void test_one_card(void)
{
    static const char *const words[N_RANKS] = {
        "of this process uses this card", "of this process uses this card", "of this process uses this card"};
    struct scene first_ib[2] = {{.transports = "ib", .rdma = true}, {.transports = "ncclnet,tcp"}};
    struct scene first_plugin[2] = {{.transports = "ncclnet", .rdma = true}, {.transports = "ib,tcp"}};
    opens_qps = true;
    setenv("SPCCL_IB_DEVICE", "rxe0", 1);
    setenv("TEST_NET_DEVICE", "va", 1);
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_12.so", 1);
    fill(&first_ib[0], "ib: device rxe0");
    fill(&first_ib[1], "tcp, as the plugin failed: device va: transport ib of this process uses this card");
    fill(&first_plugin[0], "ncclnet: plugin Test Sockets");
    fill(&first_plugin[1],
         "tcp, as ib failed: device rxe0 port 1: transport ncclnet of this process uses this");
    for (int turn = 0; turn < 2; turn++) {
        run(first_ib, check_second, words);
        run(first_plugin, check_second, words);
    }
    opens_qps = false;
    unsetenv("SPCCL_IB_DEVICE");
}

/* `spccl info` lists the devices of the guest. */
static void test_info(void)
{
    spccl_info_entry e = {.struct_bytes = sizeof e};
    size_t i = 0;
    while (spccl_info(i, &e) == SPCCL_OK && strcmp(e.name, "ib") != 0)
        i++;
    CHECK(strcmp(e.name, "ib") == 0 && strcmp(e.kind, "transport") == 0 &&
              strcmp(e.value, "in, devices usable") == 0,
          "%s %s: \"%s\"", e.kind, e.name, e.value);
    CHECK(strstr(e.why, "device rxe0 port 1 (RoCE v2, ") != NULL && strstr(e.why, "GID 10.77.0.1)") != NULL &&
              strstr(e.why, "device rxe1 port 1 (RoCE v2, ") != NULL,
          "\"%s\"", e.why);
}

/* Distances of rxe0 and rxe1 from a GPU, in the order in which they are asked for. */
static int distances[2], n_asked;
int __wrap_sp_pci_distance(const char *a, const char *b);
int __wrap_sp_pci_distance(const char *a, const char *b)
{
    CHECK(strcmp(a, "a GPU") == 0 || strcmp(b, "a GPU") == 0, "%s and %s", a, b);
    return distances[n_asked++ % 2];
}

/* A GPU's messages take the devices closest to it, of all ranks the same ones. */
static void test_near(void)
{
    static const struct {
        int distances[2], n_rails;
        const char *want; /* devices in order; + : near */
    } gpus[] = {{{0, 0}, 4, "rxe0+rxe1+"},
                {{3, 0}, 4, "rxe1+rxe0"},
                {{1, 2}, 4, "rxe0+rxe1"},
                {{2, 1}, 1, "rxe1+"},
                {{1, 2}, 1, "rxe0+"}};
    for (size_t i = 0; i < 2 * sizeof gpus / sizeof *gpus; i++) {
        sp_ib_choice choice;
        char got[8 * SP_IB_NAME_CAP] = "", rails[8];
        int rank = (int)i % 2;
        n_asked = 0;
        memcpy(distances, gpus[i / 2].distances, sizeof distances);
        snprintf(rails, sizeof rails, "%d", gpus[i / 2].n_rails);
        setenv("SPCCL_DEBUG_IB_RAILS", rails, 1);
        sp_ib_choose(rank, "a GPU", &choice);
        for (int d = 0; d < choice.n; d++) {
            strcat(got, choice.devices[d].name);
            strcat(got, choice.devices[d].near ? "+" : "");
        }
        CHECK(strcmp(got, gpus[i / 2].want) == 0 && n_asked == 2, "case %zu, rank %d: %s, wanted %s (%s)",
              i / 2, rank, got, gpus[i / 2].want, choice.why);
    }
    setenv("SPCCL_DEBUG_IB_RAILS", "1", 1);
}

static const struct test_case cases[] = {{"info", test_info},         {"near", test_near},
                                         {"tcp", test_tcp},           {"plugin", test_plugin},
                                         {"one_card", test_one_card}, {NULL, NULL}};

#endif

int main(int argc, char **argv)
{
#if defined(TEST_ONLY_TRANSPORT)
    test_ranks_per_host = 1; /* ib and ncclnet are for other hosts */
#endif
    return test_main(cases, argc, argv);
}
