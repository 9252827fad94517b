/* test_create_fails.c - spccl_comm_create fails on one rank before that rank has published its address. The
 * others get its reason at once, and do not wait until the deadline. */
#include "ranks.h"
#include "scene.h"

#define N_RANKS 3
#define DEADLINE_MS 120000
#define EARLY_MS 60000 /* far below the deadline, also on a slow machine */

enum { BAD_SETTING, BAD_ARGUMENT, N_FAILURES };

static struct {
    int failing, kind;
    bool own_secret;
    int64_t took_ms[N_RANKS];
} test;

static void *join_main(void *arg)
{
    static const uint8_t secret[32] = {1, 2, 3};
    struct rank_ctx *c = arg;
    spccl_store store = {
        .struct_bytes = sizeof store, .ctx = c->store, .set = mem_store_set, .get = mem_store_get};
    spccl_config config = SPCCL_CONFIG_INIT;
    int64_t start = now_ms();
    config.timeout_ms = DEADLINE_MS;
    config.secret = test.own_secret ? secret : NULL;
    if (c->rank == test.failing && test.kind == BAD_SETTING)
        config.slice_bytes = 7;
    if (c->rank == test.failing && test.kind == BAD_ARGUMENT)
        config.n_sockets = 99;
    c->created = spccl_comm_create(&store, c->rank, N_RANKS, &config, &c->comm);
    snprintf(c->error, sizeof c->error, "%s", spccl_last_error());
    test.took_ms[c->rank] = now_ms() - start;
    spccl_comm_destroy(c->comm);
    return NULL;
}

static void run_join(struct rank_ctx ctx[N_RANKS])
{
    struct mem_store store = {.first = NULL};
    pthread_mutex_init(&store.mu, NULL);
    pthread_cond_init(&store.cv, NULL);
    for (int r = 0; r < N_RANKS; r++) {
        ctx[r] = (struct rank_ctx){.rank = r, .n_ranks = N_RANKS, .store = &store};
        CHECK(pthread_create(&ctx[r].thread, NULL, join_main, &ctx[r]) == 0, "cannot start rank %d", r);
    }
    for (int r = 0; r < N_RANKS; r++)
        pthread_join(ctx[r].thread, NULL);
    mem_store_clear(&store);
}

static void check_rank(const struct rank_ctx *c)
{
    static const char *const reasons[N_FAILURES] = {"slice of 7 bytes", "config.n_sockets is 99"};
    char name[40];
    snprintf(name, sizeof name, "rank %d cannot join", test.failing);
    CHECK(test.took_ms[c->rank] < EARLY_MS, "rank %d took %lld ms", c->rank,
          (long long)test.took_ms[c->rank]);
    CHECK(strstr(c->error, reasons[test.kind]) != NULL, "rank %d: %s", c->rank, c->error);
    if (c->rank == test.failing)
        CHECK(c->created == (test.kind == BAD_SETTING ? SPCCL_ERR_SETTING : SPCCL_ERR_ARG), "rank %d: %d",
              c->rank, (int)c->created);
    else
        CHECK(c->created == SPCCL_ERR_PEER && strstr(c->error, name) != NULL, "rank %d: %d %s", c->rank,
              (int)c->created, c->error);
}

static void test_peers_learn_why(void)
{
    for (test.failing = 0; test.failing < N_RANKS; test.failing++)
        for (test.kind = 0; test.kind < N_FAILURES; test.kind++)
            for (int own_secret = 0; own_secret < 2; own_secret++) {
                struct rank_ctx ctx[N_RANKS];
                test.own_secret = own_secret;
                run_join(ctx);
                for (int r = 0; r < N_RANKS; r++)
                    check_rank(&ctx[r]);
            }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"peers_learn_why", test_peers_learn_why}, {NULL, NULL}};
    setenv("SPCCL_LOG", "off", 1); /* the test causes these failures */
    return test_main(cases, argc, argv);
}
