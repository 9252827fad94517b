/* puts.h - tests of puts over any transport that has them: right ones, and wrong ones that are refused. A program that
 * includes it defines `processes`, the environment, and sets check_flushed. */
#ifndef SP_TEST_PUTS_H
#define SP_TEST_PUTS_H

#include "core/base/status.h"
#include "endpoints.h"

static const struct environment processes;
/* Set by the program: rank 1 has flushed, check that something was done. */
static void (*check_flushed)(const struct member *m);

static inline struct member make_puts(void (*fn)(struct member *))
{
    struct member m = make_group(&processes, 2, fn);
    m.config.n_queues = 1; /* as proxies have */
    return m;
}

enum { SLOTS = 24, SLOT_BYTES = 12288, REGION_BYTES = SLOTS * SLOT_BYTES };

/* A rank's regions: rank 0 puts, rank 1 is written to. The message that says the handle goes first. */
struct sides {
    uint8_t *memory;
    sp_region *region;
    uint8_t handle[SP_REGION_HANDLE_BYTES]; /* of rank 1 */
};

static inline void wait_message(struct member *m, int queue, const void **out, size_t *bytes)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    spccl_status st;
    while ((st = m->t->peek(m->ep, 1 - m->rank, queue, out, bytes)) == SPCCL_AGAIN &&
           !sp_deadline_passed(deadline_ns)) {
        (void)progress(m);
        sched_yield();
    }
    CHECK(st == SPCCL_OK, "rank %d: no message: %d: %s", m->rank, (int)st, spccl_last_error());
}

static inline bool open_sides(struct member *m, struct sides *s)
{
    sp_region_config c = {
        .bytes = REGION_BYTES, .dmabuf = -1, .peers_write = m->rank == 1, .flush = m->rank == 1};
    void *space = NULL;
    const void *message = NULL;
    size_t bytes = 0;
    *s = (struct sides){.memory = calloc(1, REGION_BYTES)};
    c.address = s->memory;
    if (!join_group(m))
        return false;
    CHECK(m->t->puts->reaches(m->ep, 1 - m->rank), "no puts");
    CHECK_OK(m->t->puts->open_region(m->ep, &c, &s->region, s->handle));
    if (m->rank == 1) {
        CHECK_OK(m->t->reserve(m->ep, 0, 0, sizeof s->handle, &space));
        memcpy(space, s->handle, sizeof s->handle);
        CHECK_OK(m->t->commit(m->ep, 0, 0, 0));
        return true;
    }
    wait_message(m, 0, &message, &bytes);
    CHECK(bytes == sizeof s->handle, "%zu bytes", bytes);
    memcpy(s->handle, message, sizeof s->handle);
    CHECK_OK(m->t->release(m->ep, 1, 0));
    return true;
}

static inline void close_sides(struct member *m, struct sides *s)
{
    m->t->puts->close_region(m->ep, s->region);
    leave_group(m);
    free(s->memory);
}

/* ---- right puts ---- */

/* Message number i, and what is put before it into slot i % SLOTS. */
static inline size_t message_bytes(const struct member *m, uint64_t i)
{
    return 16 + mix(m->seed + i) % 9000;
}
static inline size_t slot_bytes(const struct member *m, uint64_t i)
{
    return 1 + mix(m->seed + i + 1000) % SLOT_BYTES;
}

/* Put the slot in three pieces, the last one first. AGAIN: no space. */
static inline spccl_status put_slot(struct member *m, const struct sides *s, uint64_t i)
{
    size_t n = slot_bytes(m, i), off = (size_t)(i % SLOTS) * SLOT_BYTES, bytes = message_bytes(m, i);
    size_t cuts[] = {0, n / 3, n / 2, n};
    void *space = NULL;
    if (m->t->puts->room(m->ep, 1) < 3)
        return SPCCL_AGAIN;
    SP_TRY(m->t->reserve(m->ep, 1, 0, bytes, &space));
    fill_message(s->memory + off, n, i * 31 + 5);
    for (int k = 2; k >= 0; k--) {
        sp_put put = {.from = s->region,
                      .to = s->handle,
                      .from_off = off + cuts[k],
                      .to_off = off + cuts[k],
                      .bytes = cuts[k + 1] - cuts[k]};
        if (put.bytes != 0)
            CHECK_OK(m->t->puts->put(m->ep, 1, 0, &put));
    }
    fill_message(space, bytes, i);
    m->n_sent[1][0]++;
    return m->t->commit(m->ep, 1, 0, 0);
}

/* m->kind messages. Rank 1 says after each that it has read the slot. */
static inline void put_all(struct member *m, const struct sides *s)
{
    int64_t deadline_ns = sp_deadline_in_ms(2 * PATIENCE_MS);
    uint64_t n = (uint64_t)m->kind, n_put = 0, n_read = 0;
    while (n_read < n && !sp_deadline_passed(deadline_ns)) {
        spccl_status st = SPCCL_AGAIN;
        if (n_put < n && n_put < n_read + SLOTS)
            st = put_slot(m, s, n_put);
        CHECK(st == SPCCL_OK || st == SPCCL_AGAIN, "put %d: %d: %s", (int)n_put, (int)st, spccl_last_error());
        n_put += st == SPCCL_OK;
        while (try_take(m, 1, 0, 16, n_read) == SPCCL_OK)
            n_read++;
        CHECK_OK(progress(m));
        if (st == SPCCL_AGAIN)
            sched_yield();
    }
    CHECK(n_read == n, "%d of %d messages", (int)n_read, m->kind);
    flush_now(m, 1);
    while (m->t->puts->room(m->ep, 1) != m->config.n_puts && !sp_deadline_passed(deadline_ns))
        CHECK_OK(progress(m)); /* puts have arrived, and their completions may come later */
    CHECK(m->t->puts->room(m->ep, 1) == m->config.n_puts, "room for %u puts", m->t->puts->room(m->ep, 1));
}

/* Wait for the flush of the message that peek showed. */
static inline void flush_message(struct member *m)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    spccl_status st;
    while ((st = m->t->puts->flush(m->ep, 0, 0)) == SPCCL_AGAIN && !sp_deadline_passed(deadline_ns))
        if (!sleep_armed(m) || progress(m) != SPCCL_OK)
            break;
    CHECK(st == SPCCL_OK, "flush: %d: %s", (int)st, spccl_last_error());
}

static inline void read_all(struct member *m, const struct sides *s)
{
    for (uint64_t i = 0; i < (uint64_t)m->kind && test_n_failed == 0; i++) {
        const uint8_t *slot = s->memory + (size_t)(i % SLOTS) * SLOT_BYTES;
        const void *message = NULL;
        size_t bytes = 0;
        wait_message(m, 0, &message, &bytes);
        if (i % 3 != 0) /* here it is not needed; some messages are looked at at once */
            flush_message(m);
        CHECK(is_message(slot, slot_bytes(m, i), i * 31 + 5), "slot of message %d has other bytes", (int)i);
        CHECK_OK(try_take(m, 0, 0, message_bytes(m, i), i));
        send_now(m, 0, 0, 16, i);
    }
    flush_now(m, 0);
    check_flushed(m);
}

static inline void exchange(struct member *m)
{
    struct sides s;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0)
        put_all(m, &s);
    else
        read_all(m, &s);
    barrier(m, 1);
    close_sides(m, &s);
}

static inline void test_exchange(void)
{
    static const uint32_t counts[] = {3, SP_PUTS_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        struct member m = make_puts(exchange);
        m.config.n_puts = counts[i];
        m.kind = 100;
        run_group(&processes, &m);
    }
}

/* For a network that loses packets: each loss takes 0.27 s. */
static inline void test_few(void)
{
    struct member m = make_puts(exchange);
    m.config.n_puts = 16;
    m.kind = 30;
    run_group(&processes, &m);
}

/* ---- puts that must not be ---- */

/* Refused by the rank that would put: nothing is written. */
static inline void bad_put(struct member *m)
{
    struct sides s;
    void *space = NULL;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        const sp_transport_puts *puts = m->t->puts;
        sp_put good = {.from = s.region, .to = s.handle, .bytes = 64}, bad[4] = {good, good, good, good};
        uint8_t no_handle[SP_REGION_HANDLE_BYTES] = {0};
        CHECK(puts->put(m->ep, 1, 0, &good) == SPCCL_ERR_BUG, "a put without a message");
        CHECK_OK(m->t->reserve(m->ep, 1, 0, 16, &space));
        bad[0].from_off = REGION_BYTES - 63;
        bad[1].to_off = REGION_BYTES - 63;
        bad[2].to_off = SIZE_MAX - 15;
        bad[3].bytes = (size_t)REGION_BYTES + 1;
        for (int i = 0; i < 4; i++)
            CHECK(puts->put(m->ep, 1, 0, &bad[i]) == SPCCL_ERR_BUG, "a put outside of a region: %d", i);
        bad[0] = good;
        bad[0].to = no_handle;
        CHECK(puts->put(m->ep, 1, 0, &bad[0]) == SPCCL_ERR_FORMAT &&
                  strstr(spccl_last_error(), "rank 1") != NULL,
              "no handle: %s", spccl_last_error());
        for (uint32_t n = puts->room(m->ep, 1); n > 0; n--) {
            CHECK(puts->room(m->ep, 1) == n, "room for %u, wanted %u", puts->room(m->ep, 1), n);
            CHECK_OK(puts->put(m->ep, 1, 0, &good));
        }
        CHECK(puts->put(m->ep, 1, 0, &good) == SPCCL_ERR_BUG, "a put without room");
        fill_message(space, 16, 3);
        CHECK_OK(m->t->commit(m->ep, 1, 0, 0));
    } else {
        CHECK_OK(take_now(m, 0, 0, 16, 3));
    }
    barrier(m, 1);
    close_sides(m, &s);
}

static inline void test_bad_put(void)
{
    struct member m = make_puts(bad_put);
    m.config.n_puts = 5;
    run_group(&processes, &m);
}

#endif
