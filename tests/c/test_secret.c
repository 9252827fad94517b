/* test_secret.c - no copy of the job secret stays on the stack of a thread that made a group. */
#include "ranks.h"

#include "core/contract/transport.h"
#include "transport/common/auth.h"

#define PATIENCE_MS 30000
#define STACK_BYTES ((size_t)1 << 20)

struct stack_job {
    spccl_store store;
    const spccl_config *config; /* NULL: the store passes the secret on */
    const spccl_unique_id *id;  /* not NULL: instead of the store */
    int rank;
};

static void *join_and_leave(void *arg)
{
    const struct stack_job *j = arg;
    spccl_comm *comm = NULL;
    float x = 1;
    if (j->id != NULL)
        CHECK_OK(spccl_comm_init_rank(j->id, j->rank, 2, j->config, &comm));
    else
        CHECK_OK(spccl_comm_create(&j->store, j->rank, 2, j->config, &comm));
    CHECK_OK(spccl_all_reduce(comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    CHECK_OK(spccl_comm_destroy(comm));
    return NULL;
}

/* Run two ranks on stacks that the test allocates, and searches afterwards. */
static void run_on_stacks(struct stack_job *jobs, uint8_t *stacks[2])
{
    pthread_t threads[2];
    for (int r = 0; r < 2; r++) {
        pthread_attr_t attr;
        memset(stacks[r], 0, STACK_BYTES);
        pthread_attr_init(&attr);
        CHECK(pthread_attr_setstack(&attr, stacks[r], STACK_BYTES) == 0, "setstack");
        CHECK(pthread_create(&threads[r], &attr, join_and_leave, &jobs[r]) == 0, "thread");
        pthread_attr_destroy(&attr);
    }
    for (int r = 0; r < 2; r++)
        pthread_join(threads[r], NULL);
}

static void search(uint8_t *const stacks[2], const uint8_t *secret, const char *what)
{
    for (int r = 0; r < 2; r++)
        CHECK(memmem(stacks[r], STACK_BYTES, secret, SP_SECRET_BYTES) == NULL,
              "%s: rank %d leaves its secret on its stack", what, r);
}

/* The secret that rank 0 of this group put into the store. */
static const uint8_t *secret_of(const struct mem_store *mem, const char *name)
{
    for (const struct mem_entry *e = mem->first; e != NULL; e = e->next)
        if (strstr(e->key, name) != NULL && strstr(e->key, "/secret") != NULL && e->bytes == SP_SECRET_BYTES)
            return e->data;
    CHECK(false, "no secret of group %s in the store", name);
    return NULL;
}

static void search_with_store(const char *transport, uint8_t *stacks[2])
{
    struct mem_store mem = {.mu = PTHREAD_MUTEX_INITIALIZER, .cv = PTHREAD_COND_INITIALIZER};
    spccl_config config = SPCCL_CONFIG_INIT;
    uint8_t *given = calloc(1, SP_SECRET_BYTES);
    struct stack_job jobs[2];
    CHECK_OK(sp_random_bytes(given, SP_SECRET_BYTES));
    config.transports = transport;
    config.timeout_ms = PATIENCE_MS;
    for (int r = 0; r < 2; r++)
        jobs[r] = (struct stack_job){.store = {.struct_bytes = sizeof(spccl_store),
                                               .ctx = &mem,
                                               .set = mem_store_set,
                                               .get = mem_store_get},
                                     .config = &config,
                                     .rank = r};
    config.name = "given";
    config.secret = given;
    run_on_stacks(jobs, stacks);
    search(stacks, given, "config.secret");
    config.name = "made";
    config.secret = NULL;
    run_on_stacks(jobs, stacks);
    search(stacks, secret_of(&mem, "made"), "a store");
    while (mem.first != NULL) {
        struct mem_entry *e = mem.first;
        mem.first = e->next;
        free(e->data);
        free(e);
    }
    free(given);
}

static void test_secret(void)
{
    static const char *const transports[] = {"shm", "tcp", "inproc"};
    uint8_t *stacks[2] = {aligned_alloc(4096, STACK_BYTES), aligned_alloc(4096, STACK_BYTES)};
    spccl_unique_id *id = calloc(1, sizeof *id);
    struct stack_job jobs[2] = {{.id = id, .rank = 0}, {.id = id, .rank = 1}};
    for (size_t i = 0; i < sizeof transports / sizeof *transports; i++)
        search_with_store(transports[i], stacks);
    CHECK_OK(spccl_get_unique_id(id));
    run_on_stacks(jobs, stacks);
    search(stacks, (const uint8_t *)id->bytes + 44, "a unique id");
    for (int r = 0; r < 2; r++)
        free(stacks[r]);
    free(id);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"secret", test_secret}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
