/* test_fault_injection.c - collectives over a transport that injects faults (fault.h).
 *   delays: calls return AGAIN although they could go on. Every result must be right.
 *   cut connections: every rank must get an error that names a rank.
 *   flipped bits in an envelope or a frame's header: an error, or the right result.
 *   flipped bits in the payload, which has no checksum: no crash, no hang, no access outside a buffer. */
#include "fault.h"
#include "ranks.h"

#include <stdbool.h>

#define N_RANKS 3
#define HEAD_BYTES 112 /* envelope and frame header */

struct scene {
    size_t n;
    int density_pct, n_collectives;
    uint64_t seed;
    bool may_be_wrong; /* do not check the results */
    _Atomic int n_errors, n_wrong;
};

static float input(const struct scene *s, int rank, int k, size_t i)
{
    uint64_t x = (s->seed + (uint64_t)rank * 31 + (uint64_t)k * 1009 + i) * 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    return (int)(x % 100) < s->density_pct ? (float)(x / 128 % 64) + 1 : 0; /* small integers: exact sums */
}

static void all_reduces(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    float *buf = malloc(s->n * sizeof *buf);
    for (int k = 0; k < s->n_collectives; k++) {
        spccl_status st;
        for (size_t i = 0; i < s->n; i++)
            buf[i] = input(s, c->rank, k, i);
        st = spccl_all_reduce(c->comm, buf, buf, s->n, SPCCL_FLOAT32, SPCCL_SUM, NULL);
        if (st != SPCCL_OK) {
            s->n_errors++;
            CHECK(strstr(spccl_last_error(), "rank") != NULL, "an error that names no rank: \"%s\"",
                  spccl_last_error());
            CHECK(st != SPCCL_ERR_BUG, "\"%s\"", spccl_last_error());
            break;
        }
        for (size_t i = 0; i < s->n && !s->may_be_wrong; i++)
            if (buf[i] != input(s, 0, k, i) + input(s, 1, k, i) + input(s, 2, k, i)) {
                s->n_wrong++;
                break;
            }
    }
    free(buf);
}

static void run_scene(struct scene *s)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = 20000;
    config.transports = "fault";
    run_ranks(N_RANKS, &config, all_reduces, s, ctx);
    for (int r = 0; r < N_RANKS; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

static const char *const inner[] = {"inproc", "tcp"};

static void test_held_back(void)
{
    for (int i = 0; i < 2; i++)
        for (unsigned hold = 2; hold <= 8; hold *= 2) {
            struct scene s = {
                .n = 200000, .density_pct = (int)(test_rand() % 40), .n_collectives = 6, .seed = test_rand()};
            sp_fault = (sp_fault_plan){.inner = inner[i], .seed = test_rand(), .hold_one_in = hold};
            run_scene(&s);
            CHECK(s.n_errors == 0 && s.n_wrong == 0, "%s, 1 in %u: %d errors, %d wrong", inner[i], hold,
                  s.n_errors, s.n_wrong);
        }
}

static void test_cut(void)
{
    for (int i = 0; i < 2; i++)
        for (int rank = 0; rank < N_RANKS; rank++) {
            struct scene s = {.n = 300000, .density_pct = 30, .n_collectives = 1000, .seed = test_rand()};
            sp_fault = (sp_fault_plan){.inner = inner[i],
                                       .seed = 1,
                                       .cut_rank = rank,
                                       .cut_after = 1 + (unsigned)(test_rand() % 60)};
            run_scene(&s);
            CHECK(s.n_errors == N_RANKS, "%s: rank %d cut after %u messages: %d ranks noticed", inner[i],
                  rank, sp_fault.cut_after, s.n_errors);
            CHECK(s.n_wrong == 0, "%d wrong results", s.n_wrong);
        }
}

static void flip(unsigned within, int n_rounds)
{
    for (int round = 0; round < n_rounds; round++) {
        struct scene s = {.n = 1 + (size_t)(test_rand() % 60000),
                          .density_pct = (int)(test_rand() % 60),
                          .n_collectives = 8,
                          .seed = test_rand(),
                          .may_be_wrong = within == 0};
        unsigned before = sp_fault_n_flipped();
        sp_fault = (sp_fault_plan){
            .inner = inner[round % 4 == 0], .seed = test_rand(), .flip_one_in = 9, .flip_within = within};
        run_scene(&s);
        CHECK(s.n_wrong == 0, "%d wrong results, %d errors after %u flips", s.n_wrong, s.n_errors,
              sp_fault_n_flipped() - before);
    }
}

static void test_flipped_heads(void)
{
    unsigned before = sp_fault_n_flipped();
    flip(HEAD_BYTES, 60);
    CHECK(sp_fault_n_flipped() - before > 60, "%u flips", sp_fault_n_flipped() - before);
}

static void test_flipped_anywhere(void)
{
    static const char *const formats[] = {"auto", "tile", "pici", "coo", "dense"};
    for (int f = 0; f < 5; f++) {
        setenv("SPCCL_FORMAT", formats[f], 1);
        flip(0, 16);
    }
    unsetenv("SPCCL_FORMAT");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"held_back", test_held_back},
        {"cut", test_cut},
        {"flipped_heads", test_flipped_heads},
        {"flipped_anywhere", test_flipped_anywhere},
        {NULL, NULL},
    };
    setenv("SPCCL_LOG", "off", 0); /* the tests cause these failures */
    return test_main(cases, argc, argv);
}
