/* fuzz_plan.c - takes any bytes as a plan file: every plan of it is checked, and a group of 2 and of 4 ranks selects from it.
 * What passes the check has bounded memory, and places its steps for any size within the array. */
#include "core/plan/plan_file.h"
#include "fuzz.h"
#include "spccl_experimental.h"

#include <unistd.h>

#define PLANS_MAX 8 /* so that an input takes little time */

static void place(const sp_written_plan *w, size_t n_elems)
{
    size_t block =
        w->head.coll == SP_ALL_GATHER || w->head.coll == SP_REDUCE_SCATTER ? (size_t)w->head.n_ranks : 1;
    sp_plan *plan = NULL;
    EXPECT(sp_plan_place(w->plan, &w->head, n_elems, &plan) == SPCCL_OK);
    for (int i = 0; i < plan->n_steps; i++) {
        const sp_step *s = &plan->steps[i];
        EXPECT(s->n_elems != 0 && s->n_elems <= n_elems && s->after < plan->n_steps && s->after != i);
        EXPECT(s->src_off + s->n_elems <= n_elems * block && s->dst_off + s->n_elems <= n_elems * block);
        EXPECT(s->part == s->chunk && s->part < 65536);
    }
    sp_plan_destroy(plan);
}

static void select_plans(const char *path, int n_ranks)
{
    static const size_t sizes[] = {0, 1, 64, 65, 100000};
    sp_plan_set *set = NULL;
    if (sp_plan_set_read(path, &set) != SPCCL_OK)
        return;
    if (sp_plan_set_select(set, n_ranks - 1, n_ranks, NULL) == SPCCL_OK)
        for (int coll = 0; coll < SP_N_COLLS; coll++)
            for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                const sp_written_plan *w = sp_plan_set_find(set, (sp_coll)coll, 0);
                if (w != NULL)
                    place(w, sizes[i]);
            }
    else
        EXPECT(spccl_last_error()[0] != '\0');
    sp_plan_set_destroy(set);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[] = "/tmp/spccl_fuzz_plan_XXXXXX";
    int fd;
    if (bytes > 1 << 14)
        return 0;
    for (size_t i = 0; i < PLANS_MAX; i++) {
        spccl_plan_info info = {.struct_bytes = sizeof info};
        spccl_status st = spccl_plan_check(bytes != 0 ? (const void *)data : "", bytes, i, &info);
        EXPECT(st == SPCCL_OK || spccl_last_error()[0] != '\0');
        if (st != SPCCL_OK)
            break;
        EXPECT(info.n_ranks >= 1 && info.n_ranks <= 64 && info.kept_slices <= SP_PLAN_KEPT_MAX);
    }
    fd = mkstemp(path);
    EXPECT(fd >= 0 && write(fd, data, bytes) == (ssize_t)bytes && close(fd) == 0);
    select_plans(path, 2);
    select_plans(path, 4);
    unlink(path);
    return 0;
}
