/* test_ib_collectives.c - compares every collective over transport ib with plain scalar code. Ranks are threads.
 * tools/softroce.py runs it. */
#include "cases.h"

static void test_random(void)
{
    for (int n = 2; n <= 4; n += 2)
        random_plan(n, 24, 20000, "ib");
}

/* Arrays larger than the queues. */
static void test_large(void)
{
    struct one_case cases[N_COLLS];
    for (int coll = 0; coll < N_COLLS; coll++)
        cases[coll] = (struct one_case){.coll = coll,
                                        .dtype = coll % 2 ? SPCCL_FLOAT32 : SPCCL_BFLOAT16,
                                        .n = 700077,
                                        .density_pct = 100 >> coll,
                                        .in_place = coll % 2,
                                        .seed = test_rand()};
    run_plan(cases, N_COLLS, 2, "ib");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"random", test_random}, {"large", test_large}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
