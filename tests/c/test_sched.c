/* test_sched.c - sp_plan_check simulates every schedule and collective for 1 to 17 ranks. */
#include "core/plan/sched.h"
#include "core/plan/sched_build.h"
#include "test.h"

#define RANKS_MAX 17

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
                        spccl_status st = sp_plan_check(plans, n, (sp_coll)coll, sizes[i], root, 3, cap);
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
    for (int fault = 0; fault < 5; fault++) {
        const char *name = "";
        CHECK(make_plans(plans, SP_SCHED_DIRECT, SP_ALL_REDUCE, 4, 4096, 0), "no plan");
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
        }
        CHECK(sp_plan_check(plans, 4, SP_ALL_REDUCE, 4096, 0, 3, 1) == SPCCL_ERR_BUG, "not seen: %s", name);
        free_plans(plans, 4);
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
        {"part_range", test_part_range},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
