/* test_sched.c - sp_plan_check simulates every schedule and collective for 1 to 17 ranks. */
#include "core/base/mem.h"
#include "core/plan/sched.h"
#include "core/plan/sched_build.h"
#include "test.h"

#define RANKS_MAX 17
#define RELAY_RANKS_MAX 64 /* on hosts */

/* Those that keep the order of their queues, as plans from files must, are checked for that too. */
static spccl_status check(sp_plan *const *plans, sp_coll coll, size_t n_elems, int root, int n_slices,
                          int cap)
{
    const char *name = plans[0]->name;
    sp_check_args a = {.plans = plans,
                       .world_size = plans[0]->world_size,
                       .coll = coll,
                       .n_elems = n_elems,
                       .root = root,
                       .n_chunks = 1,
                       .n_slices = n_slices,
                       .queue_cap = cap,
                       .fixed_order =
                           cap == 1 && strcmp(name, "relayed") != 0 && strcmp(name, "hierarchical") != 0,
                       .fault = SPCCL_ERR_BUG};
    return sp_plan_check(&a, NULL);
}

static void free_plans(sp_plan **plans, int n)
{
    for (int r = 0; r < n; r++)
        sp_plan_destroy(plans[r]);
}

static int make_plans(sp_plan **plans, sp_schedule schedule, sp_coll coll, int n_ranks, size_t n_elems,
                      int root)
{
    for (int r = 0; r < n_ranks; r++) {
        sp_plan_args a = {.coll = coll, .rank = r, .world_size = n_ranks, .root = root, .n_elems = n_elems};
        spccl_status st = sp_plan_create(schedule, &a, &plans[r]);
        if (st != SPCCL_OK) {
            CHECK(st == SPCCL_ERR_UNSUPPORTED, "%s", spccl_last_error());
            free_plans(plans, r);
            return 0;
        }
    }
    return 1;
}

static void test_all_plans(void)
{
    static const size_t sizes[] = {0, 1, 63, 64, 65, 1000, 4096 * 17 + 7};
    sp_plan *plans[RANKS_MAX];
    int n_checked = 0;
    for (int n = 1; n <= RANKS_MAX; n++)
        for (int coll = 0; coll < SP_N_COLLS; coll++)
            for (int schedule = 0; schedule < SP_N_SCHEDULES; schedule++)
                for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                    int root = (int)(test_rand() % (uint64_t)n);
                    if (!make_plans(plans, (sp_schedule)schedule, (sp_coll)coll, n, sizes[i], root))
                        continue;
                    for (int cap = 1; cap <= 3; cap++) {
                        /* 9 slices are several blocks of those that a ring keeps. */
                        int n_slices = cap == 1 && schedule >= SP_SCHED_RING ? 9 : 3;
                        spccl_status st = check(plans, (sp_coll)coll, sizes[i], root, n_slices, cap);
                        CHECK(st == SPCCL_OK, "%s %s, %d ranks, %zu elements, cap %d: %s",
                              sp_schedule_name((sp_schedule)schedule), sp_coll_name((sp_coll)coll), n,
                              sizes[i], cap, spccl_last_error());
                    }
                    n_checked++;
                    free_plans(plans, n);
                }
    CHECK(n_checked > 400, "only %d plans were made", n_checked);
}

/* Tests the check itself: each plan here has one fault, which it must find. */
static void test_check_sees_faults(void)
{
    sp_plan *plans[4];
    sp_plan *p;
    for (int fault = 0; fault < 9; fault++) {
        const char *name = "";
        sp_schedule schedule = fault < 5 ? SP_SCHED_DIRECT : SP_SCHED_RING;
        CHECK(make_plans(plans, schedule, SP_ALL_REDUCE, 4, 4096, 0), "no plan");
        p = plans[1];
        for (int i = 0; i < p->n_steps; i++) {
            sp_step *s = &p->steps[i];
            if (fault == 0 && s->kind == SP_STEP_SEND) {
                name = "a contribution is not sent";
                s->n_to = 0;
                break;
            }
            if (fault == 1 && s->kind == SP_STEP_RECV) {
                name = "a result is written at the wrong offset";
                s->dst_off = 0;
            }
            if (fault == 2 && s->kind == SP_STEP_REDUCE) {
                name = "a contribution is not added";
                s->n_from--;
            }
            if (fault == 3 && s->kind == SP_STEP_REDUCE) {
                name = "a step waits for itself";
                s->after = i;
            }
            if (fault == 4 && s->kind == SP_STEP_SEND) {
                name = "a wrong part is sent";
                s->part = 7;
                break;
            }
            if (fault == 5 && s->keeps) {
                name = "a sum is not kept";
                s->keeps = false;
                break;
            }
            if (fault == 6 && s->source == SP_SOURCE_KEPT_SUM) {
                name = "a kept sum is not sent";
                s->n_to = 0;
                break;
            }
            if (fault == 7 && s->source == SP_SOURCE_OUT) {
                name = "a result is sent before it is there";
                s->after = -1;
            }
            if (fault == 8 && s->kind == SP_STEP_REDUCE && s->gives_sum) {
                name = "a sum that is not finished is written";
                s->gives_sum = false;
            }
        }
        CHECK(check(plans, SP_ALL_REDUCE, 4096, 0, 3, 1) == SPCCL_ERR_BUG, "not seen: %s", name);
        free_plans(plans, 4);
    }
}

/* host_of [n]: one host, one rank per host, hosts of equal size, or any. */
static void draw_hosts(int *host_of, int n, int kind)
{
    int per_host = 1 + (int)(test_rand() % (uint64_t)n);
    for (int r = 0; r < n; r++)
        host_of[r] = kind == 0   ? n - 1
                     : kind == 1 ? n - 1 - r
                     : kind == 2 ? r / per_host
                                 : (int)(test_rand() % (uint64_t)n);
}

static void test_hosts(void)
{
    int host_of[RELAY_RANKS_MAX];
    for (int round = 0; round < 400; round++) {
        int n = 1 + (int)(test_rand() % RELAY_RANKS_MAX), at = 0;
        sp_hosts *h = NULL;
        draw_hosts(host_of, n, round % 4);
        CHECK_OK(sp_hosts_create(host_of, n, &h));
        CHECK(h->host_of[0] == 0 && h->first[0] == 0 && h->first[h->n_hosts] == n, "%d hosts", h->n_hosts);
        for (int host = 0; host < h->n_hosts; host++)
            for (int i = 0; i < sp_hosts_size(h, host); i++, at++) {
                int r = h->ranks[at];
                CHECK(h->host_of[r] == host && h->place[r] == i, "rank %d: host %d, place %d", r,
                      h->host_of[r], h->place[r]);
                CHECK(host_of[r] == host_of[h->ranks[h->first[host]]], "rank %d is on another host", r);
                CHECK(i == 0 || r > h->ranks[at - 1], "ranks of host %d are not rising", host);
            }
        sp_free(h);
    }
}

/* Messages of a result that leave the owner's host: at most one for each other host that wants it. */
static void check_crossings(sp_plan **plans, const sp_hosts *h, sp_coll coll)
{
    for (int r = 0; r < h->world_size; r++)
        for (int i = 0; i < plans[r]->n_steps; i++) {
            const sp_step *s = &plans[r]->steps[i];
            int n_out = 0;
            if (s->n_to == 0 || s->queue_out != SP_QUEUE_RESULT)
                continue;
            for (int j = 0; j < s->n_to; j++)
                n_out += h->host_of[plans[r]->ranks[s->to + j]] != h->host_of[r];
            if (s->part != r) /* a relay */
                CHECK(n_out == 0, "%s: rank %d relays part %d to %d other hosts", sp_coll_name(coll), r,
                      s->part, n_out);
            else
                CHECK(n_out >= h->n_hosts - 2 && n_out < h->n_hosts,
                      "%s: rank %d sends its result to %d of %d hosts", sp_coll_name(coll), r, n_out,
                      h->n_hosts);
        }
}

static void check_on_hosts(sp_schedule schedule)
{
    sp_plan *plans[RELAY_RANKS_MAX];
    int host_of[RELAY_RANKS_MAX];
    for (int round = 0; round < 240; round++) {
        int n = round < 160 ? 1 + round % 20 : 21 + (int)(test_rand() % (RELAY_RANKS_MAX - 20));
        sp_coll coll = (sp_coll)(round / 4 % SP_N_COLLS);
        if (!sp_schedule_has(schedule, coll))
            continue;
        sp_plan_args a = {.coll = coll,
                          .world_size = n,
                          .root = (int)(test_rand() % (uint64_t)n),
                          .n_elems = test_rand() % 5 == 0 ? 65 : 4096 * 17 + 7};
        sp_hosts *h = NULL;
        draw_hosts(host_of, n, (int)(test_rand() % 4));
        CHECK_OK(sp_hosts_create(host_of, n, &h));
        a.hosts = h;
        for (a.rank = 0; a.rank < n; a.rank++)
            CHECK_OK(sp_plan_create(schedule, &a, &plans[a.rank]));
        for (int cap = 1; cap <= 3; cap++)
            CHECK(check(plans, coll, a.n_elems, a.root, cap == 1 && n < 20 ? 9 : 3, cap) == SPCCL_OK,
                  "%s %s, %d ranks on %d hosts, root %d, cap %d: %s", sp_schedule_name(schedule),
                  sp_coll_name(coll), n, h->n_hosts, a.root, cap, spccl_last_error());
        if (schedule == SP_SCHED_RELAYED)
            check_crossings(plans, h, coll);
        free_plans(plans, n);
        sp_free(h);
    }
}

static void test_relayed(void)
{
    check_on_hosts(SP_SCHED_RELAYED);
}

static void test_ring(void)
{
    check_on_hosts(SP_SCHED_RING);
}

static void test_hierarchical(void)
{
    check_on_hosts(SP_SCHED_HIERARCHICAL);
}

/* One host of many ranks, and hosts of one: the large host's first rank adds and relays for all the others. No plan is
 * longer. */
static void test_one_large_host(void)
{
    static const sp_schedule schedules[] = {SP_SCHED_RELAYED, SP_SCHED_HIERARCHICAL};
    int host_of[RELAY_RANKS_MAX];
    for (int n = 2; n <= RELAY_RANKS_MAX; n += n < 24 ? 1 : 20)
        for (int large = 1; large <= n; large++)
            for (int i = 0; i < 2 * SP_N_COLLS; i++) {
                sp_plan_args a = {.coll = (sp_coll)(i / 2), .world_size = n, .n_elems = 4096 * 17};
                sp_plan *plan = NULL;
                sp_hosts *h = NULL;
                for (int r = 0; r < n; r++)
                    host_of[r] = r < large ? 0 : r - large + 1;
                CHECK_OK(sp_hosts_create(host_of, n, &h));
                a.hosts = h;
                for (a.rank = 0; a.rank < n && sp_schedule_has(schedules[i % 2], a.coll);
                     a.rank += a.rank < 2 ? 1 : 7) {
                    CHECK_OK(sp_plan_create(schedules[i % 2], &a, &plan));
                    sp_plan_destroy(plan);
                    plan = NULL;
                }
                sp_free(h);
            }
}

static void test_part_range(void)
{
    for (int i = 0; i < 2000; i++) {
        size_t n = (size_t)(test_rand() % 100000), at = 0;
        int parts = 1 + (int)(test_rand() % 17);
        for (int p = 0; p < parts; p++) {
            size_t off, len;
            sp_part_range(n, parts, p, &off, &len);
            CHECK(off == at, "part %d of %d of %zu starts at %zu, wanted %zu", p, parts, n, off, at);
            CHECK(off % 64 == 0 || len == 0, "part %d of %d of %zu starts at %zu", p, parts, n, off);
            at += len;
        }
        CHECK(at == n, "parts cover %zu of %zu", at, n);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"all_plans", test_all_plans},
        {"check_sees_faults", test_check_sees_faults},
        {"hosts", test_hosts},
        {"relayed", test_relayed},
        {"ring", test_ring},
        {"hierarchical", test_hierarchical},
        {"one_large_host", test_one_large_host},
        {"part_range", test_part_range},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
