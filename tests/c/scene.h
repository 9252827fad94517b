/* scene.h - runs a collective that is expected to fail, and records what each rank got. */
#ifndef SP_TEST_SCENE_H
#define SP_TEST_SCENE_H

#include "ranks.h"

#include <stdatomic.h>
#include <stdbool.h>

/* What must happen at once has this much time. It is far below the 20 s time-outs of groups here, and far
 * above what a sanitizer on a busy machine needs. */
#define SOON_MS 10000

/* The result of one rank. Its thread writes it; the test reads it after all threads have ended. */
struct outcome {
    spccl_status st;
    char text[1024];
    int64_t took_ms;
};

struct scene {
    struct outcome out[RANKS_CAP];
    atomic_int n_done;
    int kind;
};

static inline void note(struct rank_ctx *c, spccl_status st, int64_t start_ms)
{
    struct outcome *o = &((struct scene *)c->arg)->out[c->rank];
    o->st = st;
    snprintf(o->text, sizeof o->text, "%s", st != SPCCL_OK ? spccl_last_error() : "");
    o->took_ms = now_ms() - start_ms;
}

static inline void run_scene(int n_ranks, int timeout_ms, const char *transports,
                             void (*fn)(struct rank_ctx *), struct scene *s)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = timeout_ms;
    config.transports = transports;
    run_ranks(n_ranks, &config, fn, s, ctx);
    for (int r = 0; r < n_ranks; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

static inline bool has(const char *text, const char *part)
{
    return strstr(text, part) != NULL;
}

#endif
