/* test_transport_forks.c - ranks that fork, as for a data loader. A child that lives on does not disturb its
 * parent's connections, and does not keep them open. */
#include "endpoints.h"

enum { CHILD_LOOKS_ON, CHILD_CLOSES, N_CHILD_KINDS };

/* Rank 1 has a child that lives on with copies of its descriptors. Whatever the child does, the connections
 * end when the parent leaves or is killed. */
static void forked(struct member *m)
{
    int64_t start_ns;
    pid_t child = -1;
    if (!join_group(m))
        return;
    if (m->rank == 1 && (child = fork()) == 0) {
        int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
        if (m->kind == CHILD_CLOSES)
            leave_group(m);
        atomic_fetch_add(&m->shared->step, 1);
        while (atomic_load(&m->shared->step) < 2 && !sp_deadline_passed(deadline_ns))
            usleep(1000);
        _exit(0);
    }
    await_atomic(&m->shared->step, 1); /* until the child has done its part */
    if (m->rank == 1) {
        send_now(m, 0, 0, 5000, 1);
        CHECK_OK(take_now(m, 0, 1, 3000, 2));
        if (m->killed_rank == 1)
            kill(getpid(), SIGKILL);
        leave_group(m);
        CHECK(waitpid(child, NULL, 0) == child, "the child is gone");
        return;
    }
    CHECK_OK(take_now(m, 1, 0, 5000, 1));
    send_now(m, 1, 1, 3000, 2);
    start_ns = sp_now_ns();
    CHECK(take_now(m, 1, 0, 1, 0) == SPCCL_ERR_PEER, "%s: rank 1 is gone, though its child is not",
          m->t->name);
    CHECK(sp_now_ns() - start_ns < PATIENCE_MS * INT64_C(1000000) / 2, "%s: noticed late", m->t->name);
    atomic_fetch_add(&m->shared->step, 1);
    leave_group(m);
}

static void test_forked(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++)
        for (int kind = 0; kind < N_CHILD_KINDS && environments[g].processes; kind++) {
            struct member m = make_group(&environments[g], 2, forked);
            m.kind = kind;
            m.config.n_sockets = 2;
            run_group(&environments[g], &m);
            m.killed_rank = 1;
            m.config.deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
            run_group(&environments[g], &m);
        }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"forked", test_forked}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
