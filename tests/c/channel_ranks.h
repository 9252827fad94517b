/* channel_ranks.h - what test_cuda_channels.c and test_cuda_ports.c share. Ranks are threads. */
#ifndef SP_CHANNEL_RANKS_H
#define SP_CHANNEL_RANKS_H

#include "channel_kernels.h"
#include "cuda_sums.h"
#include "ring_kernel.h"

#define N_RANKS 3
/* A deadline that no test waits for. */
#define LONG_MS 120000

static inline spccl_channels *make_channels(struct rank_ctx *c, spccl_channel_kind kind,
                                            uint64_t window_bytes, uint32_t n_per_peer)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    spccl_channels *channels = NULL;
    config.kind = kind;
    config.window_bytes = window_bytes;
    config.n_per_peer = n_per_peer;
    CHECK_OK(spccl_channels_create(c->comm, &config, &channels));
    return channels;
}

/* Transports of the next groups; NULL: the default. */
static const char *group_transports;

static inline void run_group(int n_ranks, void (*fn)(struct rank_ctx *), void *arg)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.transports = group_transports;
    config.timeout_ms = LONG_MS;
    run_ranks(n_ranks, &config, fn, arg, ctx);
    for (int r = 0; r < n_ranks; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

/* Wait until all ranks have come here. False: they have not, in time. */
static inline bool wait_for_all(const struct rank_ctx *c, _Atomic int *n)
{
    int64_t until = now_ms() + LONG_MS;
    ++*n;
    while (*n < c->n_ranks && now_ms() < until)
        sleep_ms(1);
    CHECK(*n == c->n_ranks, "rank %d: only %d of %d ranks have come", c->rank, *n, c->n_ranks);
    return *n == c->n_ranks;
}

/* Every byte of a block depends on its rank, its place and the round. */
static inline void fill_block(uint8_t *x, size_t bytes, int rank, int round)
{
    for (size_t i = 0; i < bytes; i++)
        x[i] = (uint8_t)(i * 7 + i / 251 + (size_t)rank * 31 + (size_t)round * 101 + 1);
}

static inline void check_blocks(const struct rank_ctx *c, size_t bytes, int round)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    for (int r = 0; r < c->n_ranks; r++) {
        size_t at;
        fill_block(m->want, bytes, r, round);
        at = first_difference(m->got + (size_t)r * bytes, m->want, bytes);
        CHECK(at == bytes, "rank %d of %d, round %d: block of rank %d of %zu bytes differs at %zu", c->rank,
              c->n_ranks, round, r, bytes, at);
    }
}

/* The ring of examples/channels from in_d to out_d. */
static inline struct ring_job ring_job_of(const struct rank_ctx *c, size_t bytes)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    return (struct ring_job){
        .block = m->in_d, .out = m->out_d, .block_bytes = bytes, .world_size = c->n_ranks};
}

/* ---- an exchange of all pairs ---- */

#define PER_PEER 3u
#define PIECE 1040u /* bytes of a put */

static inline uint32_t seed_of(int from, int to, uint32_t index)
{
    return 1u + (uint32_t)from * 1000003u + (uint32_t)to * 10007u + index * 101u;
}

/* A window has a piece for each sender and channel. */
static inline uint64_t piece_off(int sender, uint32_t index)
{
    return ((uint64_t)sender * PER_PEER + index) * PIECE;
}

static inline void want(spccl_status wanted, spccl_status got, const char *text)
{
    CHECK(got == wanted && strstr(spccl_last_error(), text) != NULL, "%s: \"%s\", wanted \"%s\"",
          spccl_status_name(got), spccl_last_error(), text);
}

#endif
