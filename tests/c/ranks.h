/* ranks.h - groups for the tests of collectives: ranks are threads of one process, the store is in memory. */
#ifndef SP_TEST_RANKS_H
#define SP_TEST_RANKS_H

#include "spccl.h"
#include "test.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

#define RANKS_CAP 65

struct mem_entry {
    char key[220];
    void *data;
    size_t bytes;
    struct mem_entry *next;
};
struct mem_store {
    pthread_mutex_t mu;
    pthread_cond_t cv;
    struct mem_entry *first;
};

static inline spccl_status mem_store_set(void *ctx, const char *key, const void *data, size_t bytes)
{
    struct mem_store *s = ctx;
    struct mem_entry *e = calloc(1, sizeof *e);
    snprintf(e->key, sizeof e->key, "%s", key);
    e->data = malloc(bytes);
    memcpy(e->data, data, bytes);
    e->bytes = bytes;
    pthread_mutex_lock(&s->mu);
    e->next = s->first;
    s->first = e;
    pthread_cond_broadcast(&s->cv);
    pthread_mutex_unlock(&s->mu);
    return SPCCL_OK;
}

static inline spccl_status mem_store_get(void *ctx, const char *key, void *buf, size_t cap,
                                         int64_t timeout_ms, size_t *out_bytes)
{
    struct mem_store *s = ctx;
    struct timespec until;
    spccl_status st = SPCCL_ERR_TIMEOUT;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(timeout_ms / 1000);
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&s->mu);
    for (;;) {
        for (struct mem_entry *e = s->first; e != NULL && st != SPCCL_OK; e = e->next)
            if (strcmp(e->key, key) == 0) {
                memcpy(buf, e->data, e->bytes < cap ? e->bytes : cap);
                *out_bytes = e->bytes;
                st = SPCCL_OK;
            }
        if (st == SPCCL_OK || pthread_cond_timedwait(&s->cv, &s->mu, &until) == ETIMEDOUT)
            break;
    }
    pthread_mutex_unlock(&s->mu);
    return st;
}

static inline void mem_store_clear(struct mem_store *s)
{
    while (s->first != NULL) {
        struct mem_entry *e = s->first;
        s->first = e->next;
        free(e->data);
        free(e);
    }
    pthread_cond_destroy(&s->cv);
    pthread_mutex_destroy(&s->mu);
}

/* Ranks that count as on one host (spccl_config.host_id); 0: all. */
static int test_ranks_per_host;

struct rank_ctx;
/* Changes the config of one rank; NULL: all ranks have the same. */
static void (*test_rank_config)(const struct rank_ctx *c, spccl_config *config);

/* One rank of a group under test. */
struct rank_ctx {
    int rank, n_ranks;
    spccl_comm *comm;
    struct mem_store *store;
    spccl_status created;
    char error[1024];
    void (*fn)(struct rank_ctx *);
    void *arg;
    const spccl_config *config;
    pthread_t thread;
};

static inline void *rank_main(void *arg)
{
    struct rank_ctx *c = arg;
    spccl_store store = {
        .struct_bytes = sizeof store, .ctx = c->store, .set = mem_store_set, .get = mem_store_get};
    spccl_config config = SPCCL_CONFIG_INIT;
    char host[24];
    if (c->config != NULL)
        config = *c->config;
    snprintf(host, sizeof host, "host %d", test_ranks_per_host != 0 ? c->rank / test_ranks_per_host : 0);
    if (test_ranks_per_host != 0)
        config.host_id = host;
    if (test_rank_config != NULL)
        test_rank_config(c, &config);
    c->created = spccl_comm_create(&store, c->rank, c->n_ranks, &config, &c->comm);
    if (c->created != SPCCL_OK)
        snprintf(c->error, sizeof c->error, "%s", spccl_last_error());
    else
        c->fn(c);
    spccl_comm_destroy(c->comm);
    return NULL;
}

/* Run fn on n_ranks threads, each with its communicator in c->comm. ctx [n_ranks] holds the results. */
static inline void run_ranks(int n_ranks, const spccl_config *config, void (*fn)(struct rank_ctx *),
                             void *arg, struct rank_ctx *ctx)
{
    struct mem_store store = {.first = NULL};
    pthread_mutex_init(&store.mu, NULL);
    pthread_cond_init(&store.cv, NULL);
    for (int r = 0; r < n_ranks; r++) {
        ctx[r] = (struct rank_ctx){
            .rank = r, .n_ranks = n_ranks, .store = &store, .fn = fn, .arg = arg, .config = config};
        if (pthread_create(&ctx[r].thread, NULL, rank_main, &ctx[r]) != 0) {
            fprintf(stderr, "cannot start rank %d\n", r);
            exit(1);
        }
    }
    for (int r = 0; r < n_ranks; r++)
        pthread_join(ctx[r].thread, NULL);
    mem_store_clear(&store);
}

#endif
