/* test_gpu_watchdog.c - a thread that asks for a group's error gets it at once, on fake GPUs: the report of a
 * kernel, also while another thread polls the peers; an abort, also while the driver is busy. And deltas, which have no
 * group, wait no longer than the timeout for a stream. */
#include "fake_gpu.h"

#include "core/gpu/gpu_comm.h"
#include "core/run/comm.h"
#include "ranks.h"

#define N 1000u

static struct fake_stream streams[2];

/* Rank 0's kernel reports a broken frame while this thread holds the lock for polling the peers. */
static void reported(struct rank_ctx *c)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    void *x = fake_memory[c->rank];
    config.device = c->rank;
    CHECK_OK(spccl_cuda_attach(c->comm, &config));
    if (c->rank == 0) {
        sp_gpu_comm *g = atomic_load(&c->comm->gpu);
        sp_gpu_report *r = &g->control->report;
        int64_t deadline_ns = sp_deadline_in_ms(20000);
        spccl_status st;
        pthread_mutex_lock(&g->poll_mu);
        CHECK_OK(spccl_cuda_all_reduce(c->comm, x, x, N, SPCCL_FLOAT32, SPCCL_SUM, &streams[0]));
        while (__atomic_load_n(&r->fault, __ATOMIC_ACQUIRE) == SP_GPU_NO_FAULT &&
               !sp_deadline_passed(deadline_ns))
            usleep(100);
        st = spccl_comm_async_error(c->comm);
        CHECK(st == SPCCL_ERR_FORMAT, "wanted SPCCL_ERR_FORMAT at the first call, got %s",
              spccl_status_name(st));
        pthread_mutex_unlock(&g->poll_mu);
    } else {
        CHECK_OK(spccl_cuda_all_reduce(c->comm, x, x, N, SPCCL_FLOAT32, SPCCL_SUM, &streams[1]));
        (void)spccl_cuda_wait(c->comm, &streams[1], 20000);
    }
}

static void test_reported(void)
{
    struct rank_ctx ctx[2];
    memset(streams, 0, sizeof streams);
    fake.bad_rule = 9;
    run_ranks(2, NULL, reported, NULL, ctx);
    fake.bad_rule = 0;
    CHECK(fake.n_memories == 0, "%d memories are left", fake.n_memories);
}

static void set_driver(spccl_comm *comm, sp_driver driver)
{
    pthread_mutex_lock(&comm->mu);
    comm->driver = driver;
    pthread_mutex_unlock(&comm->mu);
}

static void asked(struct rank_ctx *c)
{
    set_driver(c->comm, SP_DRIVER_CALLER); /* a busy driver would look at the GPU only later */
    CHECK(sp_comm_break(c->comm, SPCCL_ERR_PEER, "the first reason"), "the first reason counts");
    CHECK(!sp_comm_break(c->comm, SPCCL_ERR_BUG, "the second"), "a later reason does not");
    CHECK(sp_comm_broken(c->comm) == SPCCL_ERR_PEER, "the group is broken");
    CHECK(strcmp(spccl_last_error(), "the first reason") == 0, "%s", spccl_last_error());
    set_driver(c->comm, SP_DRIVER_NONE);
}

static void test_asked(void)
{
    struct rank_ctx ctx[1];
    run_ranks(1, NULL, asked, NULL, ctx);
}

static void test_deltas(void)
{
    spccl_delta_target t = {fake_memory[0], 48, 1, 0, NULL, 0, 0, SPCCL_UINT8, 0};
    spccl_cuda_delta_plan *plan = NULL, *other = NULL;
    memset(streams, 0, sizeof streams);
    setenv("SPCCL_TIMEOUT_MS", "50", 1);
    CHECK_OK(spccl_cuda_delta_plan_create(&t, 1, &streams[0], &plan, NULL));
    CHECK_OK(spccl_cuda_delta_check(plan, NULL, 0, NULL, &streams[0]));
    streams[0].n_launched = 1; /* and never done */
    CHECK_FAILS(spccl_cuda_delta_plan_create(&t, 1, &streams[0], &other, NULL), SPCCL_ERR_TIMEOUT,
                "cuda_delta_plan_create: GPU 0: the stream still had work after 50 ms");
    CHECK_FAILS(spccl_cuda_delta_check(plan, NULL, 0, NULL, &streams[0]), SPCCL_ERR_TIMEOUT, "after 50 ms");
    CHECK_FAILS(spccl_cuda_delta_apply(plan, &streams[0]), SPCCL_ERR_STATE, "has not accepted");
    unsetenv("SPCCL_TIMEOUT_MS");
    spccl_cuda_delta_plan_destroy(plan);
    fake_free_lost(); /* of `other` */
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"reported", test_reported}, {"asked", test_asked}, {"deltas", test_deltas}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
