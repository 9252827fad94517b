/* test_plan_file.c - plans from files (docs/SCHEDULES.md): what is refused, by which sentence, before a group is made;
 * and that plans written by hand run, with the bits of the automatic choice if they add in rank order. That compiled
 * plans run is tested in tests/py/test_schedule.py. */
#include "core/plan/plan_file.h"
#include "ranks.h"
#include "spccl_experimental.h"

#include <sys/stat.h>
#include <unistd.h>

/* All-reduce of 2 ranks, one chunk each. */
#define HEAD "spccl-plan 1\nplan all_reduce pairs ranks=2 hosts=any chunks=2 block=1 slots=1\n"
#define RANK_0                                                                                               \
    "rank 0\n"                                                                                               \
    "send chunk=1 src=in to=1@input\n"                                                                       \
    "reduce chunk=0 from=1@input own=in at=0 out to=1@result\n"                                              \
    "recv chunk=1 from=1@result out # of rank 1\n"
#define RANK_1                                                                                               \
    "rank 1\n"                                                                                               \
    "send chunk=0 src=in to=0@input\n"                                                                       \
    "reduce chunk=1 from=0@input own=in at=1 out to=0@result\n"                                              \
    "recv chunk=0 from=0@result out\n"
#define PAIRS HEAD RANK_0 RANK_1 "end\n"
#define PLAN(steps_0, steps_1) HEAD "rank 0\n" steps_0 "rank 1\n" steps_1 "end\n"

/* Check a text of one plan, to its end. */
static spccl_status check_text(const char *text, size_t bytes, spccl_plan_info *info)
{
    spccl_plan_info next = {.struct_bytes = sizeof next};
    spccl_status st;
    *info = next;
    st = spccl_plan_check(text, bytes, 0, info);
    if (st == SPCCL_OK)
        st = spccl_plan_check(text, bytes, 1, &next);
    return st == SPCCL_ERR_ARG ? SPCCL_OK : st;
}

static void test_good(void)
{
    spccl_plan_info info;
    CHECK_OK(check_text(PAIRS, strlen(PAIRS), &info));
    CHECK(strcmp(info.name, "pairs") == 0 && strcmp(info.collective, "all_reduce") == 0 &&
              info.n_ranks == 2 && info.n_hosts == 0 && info.root == -1 && info.n_chunks == 2 &&
              info.rank_order == 1 && info.sends_sums == 0 && info.n_steps == 3 && info.n_hops == 2 &&
              info.chunks_sent == 2 && info.n_messages == 4 && info.line == 2 &&
              info.hash == sp_plan_hash(PAIRS, strlen(PAIRS)),
          "%s %s: %d hops, %d chunks, rank order %d", info.collective, info.name, info.n_hops,
          info.chunks_sent, info.rank_order);
    CHECK_FAILS(spccl_plan_check(PAIRS, strlen(PAIRS), 1, &info), SPCCL_ERR_ARG, "the text has 1");
    CHECK_FAILS(spccl_plan_check(NULL, 1, 0, &info), SPCCL_ERR_ARG, "text is NULL");
}

/* One fault each. Those before "Simulated" are in the text; the others only the simulation finds. */
static const struct {
    const char *text, *why;
} bad[] = {
    {"", "it does not begin with"},
    {"spccl-plan 2\nend\n", "version 2, this spccl reads 1"},
    {HEAD RANK_0 RANK_1, "line 11: the file ends before \"end\""},
    {HEAD RANK_0 "end\n", "wanted \"rank 1\""},
    {PAIRS "rank 2\n", "something follows"},
    {"spccl-plan 1\nplan all_reduce x ranks=65 hosts=any chunks=1\nend\n", "sets of 64 ranks"},
    {"spccl-plan 1\nplan all_reduce x ranks=4 hosts=2x3 chunks=1\nend\n", "2 hosts of 3 ranks are not 4"},
    {"spccl-plan 1\nplan broadcast x ranks=4 hosts=any chunks=1\nend\n", "a broadcast has root=R"},
    {"spccl-plan 1\nplan all_reduce x ranks=4 hosts=any chunks=1 block=16 slots=9\nend\n",
     "keeps 144 slices (slots times block), wanted at most 128: more than the queues have"},
    {"spccl-plan 1\nplan all_reduce x ranks=4 hosts=any chunks=99999999999999999999\nend\n",
     "wanted 1 to 1024"},
    {PLAN("send chunk=2 src=in to=1@input\n", ""), "chunk=2: wanted 0 to 1"},
    {PLAN("send chunk=1 src=in to=0@input\n", ""), "rank 0, step 0"},
    {PLAN("send chunk=1 src=in to=1,1@input\n", ""), "has rank 1 twice"},
    {PLAN("send chunk=1 src=slot1 to=1@input\n", ""), "wanted in, out, or slot0 to slot0"},
    {PLAN("send chunk=1 src=slot0 to=1@input after=1\nsend chunk=0 src=in to=1@input\n", ""),
     "it reads slot 0, which step 1 does not write"},
    {PLAN("send chunk=1 src=out to=1@input\n", ""), "it has after="},
    {PLAN("copy chunk=1\n", ""), "a copy is for the own block of an all_gather"},
    {PLAN("reduce chunk=0 own=in at=0 keep=0\n", ""), "no step reads what it keeps"},
    /* Simulated. */
    {PLAN("reduce chunk=0 own=in at=0 out\n", ""), "rank 0: its steps write 128 of 256 elements"},
    {PLAN("reduce chunk=0 own=in at=0 out\nreduce chunk=1 own=in at=0 out\n",
          "reduce chunk=0 own=in at=0 out\nreduce chunk=1 own=in at=0 out\n"),
     "rank 0, step 0: the result of chunk 0 lacks the data of rank 1"},
    {HEAD "rank 0\nsend chunk=1 src=out after=1 to=1@input\n"
          "reduce chunk=0 from=1@input own=in at=0 out to=1@result\n"
          "recv chunk=1 from=1@result out\n" RANK_1 "end\n",
     "rank 0, step 0: step 1, which it comes after, has chunk 0, not 1"},
    {HEAD "rank 0\nsend chunk=1 src=in to=1@result\nsend chunk=1 src=out after=0 to=1@input\n"
          "reduce chunk=0 from=1@input own=in at=0 out\nrecv chunk=1 from=1@result out\n" RANK_1 "end\n",
     "rank 0, step 1: chunk 1 is sent before it is in the output"},
    {HEAD "rank 0\nsend chunk=1 src=in to=1@input after=2\n"
          "reduce chunk=0 from=1@input own=in at=0 out to=1@result\n"
          "recv chunk=1 from=1@result out\n" RANK_1 "end\n",
     "rank 0, step 0: deadlock"},
    {HEAD "rank 0\nsend chunk=1 src=in to=1@input turn=0\nsend chunk=0 src=in to=1@input turn=0\n"
          "reduce chunk=0 from=1@input own=in at=0 out to=1@result\n"
          "recv chunk=1 from=1@result out\n" RANK_1 "end\n",
     "rank 1, step 1: rank 0 sent slice 0 of message 0 (chunk 0), wanted slice 1 of 1 (chunk 1)"},
    /* Each rank adds its own values last: the orders differ, and so would NaNs. */
    {HEAD "rank 0\nsend chunk=1 src=in to=1@input\nsend chunk=0 src=in to=1@result\n"
          "reduce chunk=0 from=1@input own=in at=1 out\nreduce chunk=1 from=1@result own=in at=1 out\n"
          "rank 1\nsend chunk=0 src=in to=0@input\nsend chunk=1 src=in to=0@result\n"
          "reduce chunk=1 from=0@input own=in at=1 out\nreduce chunk=0 from=0@result own=in at=1 out\n"
          "end\n",
     "is added in another order than on another rank"},
    /* Everyone sends everything, and nothing says that the result comes after the send: not in place. */
    {HEAD "rank 0\nsend chunk=1 src=in to=1@input\nsend chunk=0 src=in to=1@result\n"
          "reduce chunk=0 from=1@input own=in at=0 out\nreduce chunk=1 from=1@result own=in at=0 out\n"
          "rank 1\nsend chunk=0 src=in to=0@input\nsend chunk=1 src=in to=0@result\n"
          "reduce chunk=1 from=0@input own=in at=1 out\nreduce chunk=0 from=0@result own=in at=1 out\n"
          "end\n",
     "rank 0, step 2: it may write the output of chunk 0 before another step has read the input"},
    /* Two steps on one queue. */
    {HEAD "rank 0\nsend chunk=1 src=in to=1@input\nsend chunk=0 src=in to=1@input\n"
          "reduce chunk=0 from=1@input own=in at=0 out after=1\n"
          "reduce chunk=1 from=1@input own=in at=0 out after=0\n"
          "rank 1\nsend chunk=1 src=in to=0@input\nsend chunk=0 src=in to=0@input\n"
          "reduce chunk=1 from=0@input own=in at=1 out after=0\n"
          "reduce chunk=0 from=0@input own=in at=1 out after=1\nend\n",
     "sends on the same queue as step 0, but does not take turns"},
};

/* Right, but not for GPUs: each by the step that they cannot do. Then plans that they can. */
static const struct {
    const char *text, *why;
} gpus[] = {
    {PLAN("send chunk=1 src=in to=1@input\nreduce chunk=0 from=1@input own=in at=1 out to=1@result\n"
          "recv chunk=1 from=1@result out\n",
          "send chunk=0 src=in to=0@input\nreduce chunk=1 from=0@input own=in at=1 out to=0@result\n"
          "recv chunk=0 from=0@result out\n"),
     "rank 0, step 1: it does not add what all ranks have of chunk 0 in rank order, as GPUs do"},
    {PLAN("reduce chunk=0 own=in at=0 to=1@input turn=0\nreduce chunk=1 own=in at=0 to=1@input turn=0\n"
          "recv chunk=0 from=1@result out turn=1\nrecv chunk=1 from=1@result out turn=1\n",
          "reduce chunk=0 from=0@input own=in at=1 out to=0@result turn=0\n"
          "reduce chunk=1 from=0@input own=in at=1 out to=0@result turn=0\n"),
     "rank 0, step 0: it makes a sum of chunk 0 that is not finished; on GPUs the owner of a chunk adds all"},
    /* Both ranks add chunk 0, rank 1 alone chunk 1. */
    {PLAN("send chunk=0 src=in to=1@input turn=0\n"
          "reduce chunk=0 from=1@input own=in at=0 out after=0 turn=0\n"
          "send chunk=1 src=in to=1@input turn=0\nrecv chunk=1 from=1@result out\n",
          "send chunk=0 src=in to=0@input turn=0\n"
          "reduce chunk=0 from=0@input own=in at=1 out after=0 turn=0\n"
          "reduce chunk=1 from=0@input own=in at=1 out to=0@result turn=0\n"),
     "rank 1, step 2: 1 of 2 ranks add chunk 1; on GPUs one rank adds a chunk, or all ranks add all"},
    {"spccl-plan 1\nplan broadcast chain ranks=4 hosts=2x2 chunks=1 root=0\n"
     "rank 0\nsend chunk=0 src=in to=1@input\nrank 1\nrecv chunk=0 from=0@input out to=2@result\n"
     "rank 2\nrecv chunk=0 from=1@result out to=3@result\nrank 3\nrecv chunk=0 from=2@result out\nend\n",
     "rank 2, step 0: it takes chunk 0 from rank 1; on GPUs rank 3 sends it"},
    {"spccl-plan 1\nplan broadcast relays ranks=6 hosts=2x3 chunks=1 root=0\nrank 0\nsend chunk=0 src=in "
     "to=3@input\n"
     "rank 1\nrecv chunk=0 from=3@result out to=2@result\nrank 2\nrecv chunk=0 from=1@result out\n"
     "rank 3\nrecv chunk=0 from=0@input out to=1,4,5@result\nrank 4\nrecv chunk=0 from=3@result out\n"
     "rank 5\nrecv chunk=0 from=3@result out\nend\n",
     "rank 1, step 0: it takes chunk 0 from rank 3; on GPUs rank 0 relays it, although it is the root: it "
     "has "
     "the place of the chunk's owner, rank 3"},
    {PAIRS, ""},
    /* Rank 1 owns both chunks. */
    {PLAN("send chunk=0 src=in to=1@input turn=0\nrecv chunk=0 from=1@result out turn=0\n"
          "send chunk=1 src=in to=1@input turn=0\nrecv chunk=1 from=1@result out turn=0\n",
          "reduce chunk=0 from=0@input own=in at=1 out to=0@result turn=0\n"
          "reduce chunk=1 from=0@input own=in at=1 out to=0@result turn=0\n"),
     ""},
    {"spccl-plan 1\nplan broadcast relays ranks=4 hosts=2x2 chunks=1 root=0\n"
     "rank 0\nsend chunk=0 src=in to=1,2@result\nrank 1\nrecv chunk=0 from=0@result out\n"
     "rank 2\nrecv chunk=0 from=0@result out to=3@result\nrank 3\nrecv chunk=0 from=2@result out\nend\n",
     ""},
};

static void test_gpus(void)
{
    spccl_plan_info info;
    for (size_t i = 0; i < sizeof gpus / sizeof *gpus; i++) {
        CHECK_OK(check_text(gpus[i].text, strlen(gpus[i].text), &info));
        CHECK(strcmp(info.no_gpus, gpus[i].why) == 0, "plan %zu: \"%s\", wanted \"%s\"", i, info.no_gpus,
              gpus[i].why);
    }
}

static void test_refused(void)
{
    spccl_plan_info info;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_FAILS(check_text(bad[i].text, strlen(bad[i].text), &info), SPCCL_ERR_SETTING, bad[i].why);
}

/* Thousands of steps that take each other's messages: simulated before the check of turns, this took minutes. */
static void test_long(void)
{
    enum { CHUNKS = 1024 };
    char *text = malloc(1 << 20);
    spccl_plan_info info;
    size_t n = (size_t)sprintf(
        text, "spccl-plan 1\nplan all_gather long ranks=2 hosts=any chunks=%d block=16 slots=0\n", CHUNKS);
    for (int r = 0; r < 2; r++) {
        n += (size_t)sprintf(text + n, "rank %d\n", r);
        for (int c = 0; c < CHUNKS; c++)
            n += (size_t)sprintf(
                text + n,
                "copy chunk=%d\nsend chunk=%d src=in to=%d@input\nrecv chunk=%d from=%d@input "
                "out\n",
                r * CHUNKS + c, r * CHUNKS + c, 1 - r, (2 - r) * CHUNKS - 1 - c, 1 - r);
    }
    n += (size_t)sprintf(text + n, "end\n");
    CHECK_FAILS(check_text(text, n, &info), SPCCL_ERR_SETTING,
                "it sends on the same queue as step 1, but does not take turns");
    free(text);
}

/* A file that is cut at any byte, or has another byte anywhere, is refused or right; it never harms. */
static void test_mutated(void)
{
    char text[sizeof PAIRS];
    spccl_plan_info info;
    for (size_t n = 0; n + 1 < sizeof PAIRS - 1; n++)
        CHECK(check_text(PAIRS, n, &info) == SPCCL_ERR_SETTING, "cut at byte %zu", n);
    for (int round = 0; round < 3000; round++) {
        memcpy(text, PAIRS, sizeof text);
        for (int i = 0; i < 2; i++)
            text[test_rand() % (sizeof text - 1)] = PAIRS[test_rand() % (sizeof text - 1)];
        (void)check_text(text, sizeof text - 1, &info);
    }
}

/* ---- groups --------------------------------------------------------------------------------------- */

static char paths[2][64];

static void write_plan(int i, const char *text)
{
    FILE *f;
    snprintf(paths[i], sizeof paths[i], "/tmp/spccl_test_plan_%d_%d", (int)getpid(), i);
    f = fopen(paths[i], "wb");
    CHECK(f != NULL && fwrite(text, 1, strlen(text), f) == strlen(text) && fclose(f) == 0, "%s", paths[i]);
}

static void take_paths(const struct rank_ctx *c, spccl_config *config)
{
    static char text[RANKS_CAP][160]; /* ranks are threads */
    int i = c->rank != 0 && paths[1][0] != '\0';
    snprintf(text[c->rank], sizeof text[0], "file:%s", paths[i]);
    config->schedule = text[c->rank];
}

static void sum(struct rank_ctx *c)
{
    static const size_t sizes[] = {0, 1, 64, 65, 1000, 200000};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        size_t n = sizes[k];
        float *x = malloc(n * sizeof *x + 1);
        const char *text = NULL;
        for (size_t i = 0; i < n; i++)
            x[i] = i % 3 == 0 ? 0.1f * (float)(i % 1000) + (float)c->rank : 0;
        CHECK_OK(spccl_all_reduce(c->comm, x, x, n, SPCCL_FLOAT32, SPCCL_SUM, NULL));
        for (size_t i = 0; i < n; i++) {
            float want = i % 3 == 0 ? 0.1f * (float)(i % 1000) : 0;
            for (int r = 1; r < c->n_ranks && i % 3 == 0; r++)
                want += 0.1f * (float)(i % 1000) + (float)r;
            CHECK(x[i] == want, "%zu elements: element %zu is %g, wanted %g", n, i, (double)x[i],
                  (double)want);
        }
        CHECK_OK(spccl_comm_describe_schedule(c->comm, k, &text));
        CHECK(strstr(text, c->arg) != NULL, "%s", text);
        free(x);
    }
}

static void run_plan(int n_ranks, const char *text, const char *how, spccl_status want, const char *why)
{
    struct rank_ctx ctx[RANKS_CAP];
    if (text != NULL)
        write_plan(0, text);
    test_rank_config = take_paths;
    run_ranks(n_ranks, NULL, sum, (void *)(uintptr_t)how, ctx);
    for (int r = 0; r < n_ranks; r++)
        CHECK(ctx[r].created == want && strstr(ctx[r].error, why) != NULL, "rank %d: %s: %s", r,
              spccl_status_name(ctx[r].created), ctx[r].error);
    test_rank_config = NULL;
    unlink(paths[0]);
}

static void test_groups(void)
{
    run_plan(2, PAIRS, "plan pairs of spccl_test_plan_", SPCCL_OK, "");
    run_plan(3, PAIRS, "has no plan for it, ", SPCCL_OK, ""); /* a world size that the file lacks */
    run_plan(1, PAIRS, "has no plan for it", SPCCL_OK, "");
    run_plan(2, PLAN("reduce chunk=0 own=in at=0 out\n", ""), "", SPCCL_ERR_SETTING,
             "its steps write 128 of 256");
    snprintf(paths[0], sizeof paths[0], "/tmp/no/such/plan");
    run_plan(2, NULL, "", SPCCL_ERR_SETTING, "plan file /tmp/no/such/plan");
    snprintf(paths[0], sizeof paths[0], "/tmp");
    run_plan(2, NULL, "", SPCCL_ERR_SETTING, "plan file /tmp");
    snprintf(paths[0], sizeof paths[0], "/tmp/spccl_test_fifo_%d",
             (int)getpid()); /* nobody writes: no wait */
    CHECK(mkfifo(paths[0], 0600) == 0, "%s", paths[0]);
    run_plan(2, NULL, "", SPCCL_ERR_SETTING, "it does not begin with");
}

#define OWNED_BY_0                                                                                           \
    "spccl-plan 1\nplan all_reduce owned ranks=4 hosts=any chunks=1\n"                                       \
    "rank 0\nreduce chunk=0 from=1,2,3@input own=in at=0 out to=1,2,3@result\n"                              \
    "rank 1\nsend chunk=0 src=in to=0@input\nrecv chunk=0 from=0@result out\n"                               \
    "rank 2\nsend chunk=0 src=in to=0@input\nrecv chunk=0 from=0@result out\n"                               \
    "rank 3\nsend chunk=0 src=in to=0@input\nrecv chunk=0 from=0@result out\n"

/* GPUs run it alone, but not in a group with a plan that relays. */
static void test_direct_and_relayed(void)
{
    test_ranks_per_host = 2;
    run_plan(4, OWNED_BY_0 "end\n", "; on GPUs too", SPCCL_OK, "");
    run_plan(
        4,
        OWNED_BY_0
        "plan broadcast relays ranks=4 hosts=2x2 chunks=1 root=0\n"
        "rank 0\nsend chunk=0 src=in to=1,2@result\nrank 1\nrecv chunk=0 from=0@result out\n"
        "rank 2\nrecv chunk=0 from=0@result out to=3@result\nrank 3\nrecv chunk=0 from=2@result out\nend\n",
        "; not on GPUs: owners send results directly; relays (broadcast) relays them", SPCCL_OK, "");
    test_ranks_per_host = 0;
}

static void test_other_file(void)
{
    struct rank_ctx ctx[2];
    write_plan(0, PAIRS);
    write_plan(1, PAIRS "# another\n");
    test_rank_config = take_paths;
    run_ranks(2, NULL, sum, (void *)(uintptr_t) "", ctx);
    for (int r = 0; r < 2; r++)
        CHECK(ctx[r].created == SPCCL_ERR_MISMATCH &&
                  strstr(ctx[r].error, "give all ranks the same file") != NULL,
              "rank %d: %s", r, ctx[r].error);
    test_rank_config = NULL;
    unlink(paths[0]);
    unlink(paths[1]);
    paths[1][0] = '\0';
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"good", test_good},
        {"refused", test_refused},
        {"gpus", test_gpus},
        {"mutated", test_mutated},
        {"long", test_long},
        {"groups", test_groups},
        {"direct_and_relayed", test_direct_and_relayed},
        {"other_file", test_other_file},
        {NULL, NULL},
    };
    setenv("SPCCL_LOG", "off", 1); /* the tests cause these failures */
    return test_main(cases, argc, argv);
}
