/* test_tcp_endings.c - one connection of a tcp peer ends. The peer is then not yet gone: its abort may be on
 * its way over another connection, and this rank waits for it. */
#include "endpoints.h"
#include "transport/net/tcp/tcp.h"

#include <fcntl.h>

enum { ABORTS, SAYS_NOTHING };
#define ABORT_AFTER_MS 150
#define ABORT_LATE_MS 400 /* the transport waits 600 ms for an abort after a connection ended */
#define N_TRIES 20
#define REASON "the first reason"

/* What rank 0 got, and how long rank 1 took between the cut and its abort. The ranks are threads. */
static struct {
    spccl_status st;
    char text[SP_ABORT_TEXT_CAP], error[400];
    int64_t took_ms, abort_ms;
} result;

/* Close rank 1's end of a queue as if the network had cut it: rank 1 does not notice. */
static void cut_queue(struct member *m, int queue)
{
    struct sp_tcp_peer *p = &sp_tcp_self(m->ep)->peers[0];
    int nowhere = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK(nowhere >= 0 && dup2(nowhere, p->sockets[(uint32_t)queue * p->n_sockets].fd) >= 0,
          "no queue to cut");
    close(nowhere);
}

/* Rank 0 sends and receives until a call fails with ABORTED or PEER. */
static spccl_status watch(struct member *m, char *text, bool *space_was_refused)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    while (!sp_deadline_passed(deadline_ns)) {
        const void *p;
        void *space;
        size_t bytes;
        int peer = -1;
        spccl_status st = m->t->progress(m->ep, &peer, text);
        if (st != SPCCL_OK)
            return st;
        st = m->t->peek(m->ep, 1, 0, &p, &bytes);
        if (st != SPCCL_AGAIN)
            return st;
        st = m->t->reserve(m->ep, 1, 0, 16, &space);
        CHECK(st == SPCCL_AGAIN || (st == SPCCL_OK && !*space_was_refused) || st == SPCCL_ERR_PEER,
              "reserve: %d, space was refused before: %d", (int)st, *space_was_refused);
        *space_was_refused = *space_was_refused || st == SPCCL_AGAIN;
        if (st == SPCCL_OK)
            CHECK_OK(m->t->commit(m->ep, 1, 0, 0));
        usleep(1000);
    }
    return SPCCL_ERR_TIMEOUT;
}

static void ending(struct member *m)
{
    int64_t start_ns;
    if (!join_group(m))
        return;
    start_ns = sp_now_ns();
    if (m->rank == 1) {
        cut_queue(m, 0);
        usleep(ABORT_AFTER_MS * 1000);
        if (m->kind == ABORTS)
            m->t->abort_peers(m->ep, REASON);
        result.abort_ms = (sp_now_ns() - start_ns) / 1000000;
        while (atomic_load(&m->shared->n_done) == 0)
            usleep(1000);
    } else {
        bool space_was_refused = false;
        memset(result.text, 0, sizeof result.text);
        result.st = watch(m, result.text, &space_was_refused);
        result.took_ms = (sp_now_ns() - start_ns) / 1000000;
        snprintf(result.error, sizeof result.error, "%s", spccl_last_error());
        CHECK(space_was_refused, "a queue that is cut has space");
        atomic_store(&m->shared->n_done, 1);
    }
    leave_group(m);
}

static void run_ending(int kind)
{
    const struct environment tcp = {"tcp", false};
    struct member m = make_group(&tcp, 2, ending);
    m.kind = kind;
    run_group(&tcp, &m);
}

/* On a busy machine rank 1 may abort too late. Such a try shows nothing and is repeated. */
static void test_abort_arrives(void)
{
    int n_seen = 0;
    for (int i = 0; i < N_TRIES && n_seen < 3; i++) {
        run_ending(ABORTS);
        if (result.abort_ms > ABORT_LATE_MS)
            continue;
        n_seen++;
        CHECK(result.st == SPCCL_ERR_ABORTED && strcmp(result.text, REASON) == 0, "%d \"%s\" after %d ms: %s",
              (int)result.st, result.text, (int)result.took_ms, result.error);
    }
    CHECK(n_seen == 3, "rank 1 was late in %d of %d tries", N_TRIES - n_seen, N_TRIES);
}

static void test_no_abort(void)
{
    run_ending(SAYS_NOTHING);
    CHECK(result.st == SPCCL_ERR_PEER && result.took_ms >= 2 * ABORT_AFTER_MS &&
              strstr(result.error, "connection broke") != NULL,
          "%d after %d ms: %s", (int)result.st, (int)result.took_ms, result.error);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"abort_arrives", test_abort_arrives}, {"no_abort", test_no_abort}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
