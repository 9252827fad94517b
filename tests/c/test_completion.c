/* test_completion.c - a collective is done as soon as its own bytes have left this process, although later
 * collectives still have bytes to send. */
#include "ranks.h"

#include <stdatomic.h>
#include <stdbool.h>

#define SLOW_S 60
#define FILL_MS 500
#define BIG ((size_t)64 << 20) /* bytes: far more than queues and sockets hold while nobody reads */

static atomic_bool first_done;

/* Rank 0 issues a small all-reduce and a large broadcast. Rank 1 takes part in the small one, and in the
 * large one only once rank 0 knows that the small one is done. */
static void two_in_flight(struct rank_ctx *c)
{
    uint8_t *big = calloc(BIG, 1);
    float x = (float)c->rank + 1;
    spccl_request *first = NULL, *second = NULL;
    memset(big, c->rank == 0 ? 0x5a : 0, BIG);
    if (c->rank == 0) {
        spccl_status st;
        CHECK_OK(spccl_all_reduce(c->comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, &first));
        CHECK_OK(spccl_broadcast(c->comm, big, BIG, SPCCL_UINT8, 0, &second));
        st = spccl_request_wait(first, SLOW_S * 1000 / 4);
        CHECK(st == SPCCL_OK, "%s: %s", spccl_status_name(st), spccl_last_error());
        CHECK(spccl_request_test(second) == SPCCL_AGAIN, "the second collective was not held up");
        atomic_store(&first_done, true);
        CHECK_OK(spccl_request_wait(second, -1));
        spccl_request_free(first);
        spccl_request_free(second);
    } else {
        for (int64_t start = now_ms();
             now_ms() - start < FILL_MS;) /* reads until this rank's buffers are full */
            CHECK_OK(spccl_comm_async_error(c->comm));
        CHECK_OK(spccl_all_reduce(c->comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL));
        for (int i = 0; !atomic_load(&first_done) && i < SLOW_S * 100 / 2; i++)
            sleep_ms(10);
        CHECK_OK(spccl_broadcast(c->comm, big, BIG, SPCCL_UINT8, 0, NULL));
        CHECK(big[0] == 0x5a && big[BIG - 1] == 0x5a, "%x %x", big[0], big[BIG - 1]);
    }
    CHECK(x == 3, "rank %d: %f", c->rank, (double)x);
    free(big);
}

static void run_two(const char *transport, uint32_t n_sockets)
{
    struct rank_ctx ctx[2];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.transports = transport;
    config.n_sockets = n_sockets;
    config.timeout_ms = SLOW_S * 1000;
    atomic_store(&first_done, false);
    run_ranks(2, &config, two_in_flight, NULL, ctx);
    for (int r = 0; r < 2; r++)
        CHECK(ctx[r].created == SPCCL_OK, "%s: rank %d: %s", transport, r, ctx[r].error);
}

static void test_tcp(void)
{
    run_two("tcp", 1);
    run_two("tcp", 3);
}

static void test_shm(void)
{
    run_two("shm", 0);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"tcp", test_tcp}, {"shm", test_shm}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
