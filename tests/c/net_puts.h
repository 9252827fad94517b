/* net_puts.h - what the tests of puts over transport ncclnet share. */
#ifndef SP_TEST_NET_PUTS_H
#define SP_TEST_NET_PUTS_H

#include "puts.h"
#include "transport/net/ncclnet.h"

static const struct environment processes = {"ncclnet", true};

/* Two ranks, four puts at a time. */
static inline void run_pair(void (*fn)(struct member *))
{
    struct member m = make_puts(fn);
    m.config.n_puts = 4;
    run_group(&processes, &m);
}

static inline void check_flush(const struct member *m)
{
    CHECK(sp_nn_self(m->ep)->peers[0].flush_ended != 0, "no flush has ended");
}

/* Rank 0: message 3 of 16 bytes, after a put of 64 bytes. */
static inline void put_one(struct member *m, const struct sides *s)
{
    sp_put put = {.from = s->region, .to = s->handle, .bytes = 64};
    void *space = NULL;
    memset(s->memory, 0xee, 64);
    CHECK_OK(m->t->reserve(m->ep, 1, 0, 16, &space));
    fill_message(space, 16, 3);
    CHECK_OK(m->t->puts->put(m->ep, 1, 0, &put));
    CHECK_OK(m->t->commit(m->ep, 1, 0, 0));
}

/* Until the message is here and flushed, or the peer is lost. armed: sleep in between. A hang wakes nobody. */
static inline spccl_status await_flushed(struct member *m, bool armed)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    const void *message = NULL;
    size_t bytes = 0;
    spccl_status st;
    do {
        (void)progress(m);
        st = m->t->peek(m->ep, 1 - m->rank, 0, &message, &bytes);
        if (st == SPCCL_OK)
            st = m->t->puts->flush(m->ep, 1 - m->rank, 0);
        if (st == SPCCL_AGAIN && armed)
            CHECK(sleep_armed(m), "rank %d: nothing woke it", m->rank);
        sched_yield();
    } while (st == SPCCL_AGAIN && !sp_deadline_passed(deadline_ns));
    return st;
}

static inline spccl_status take_flushed(struct member *m)
{
    return await_flushed(m, true);
}

#endif
