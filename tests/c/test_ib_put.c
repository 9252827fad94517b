/* test_ib_put.c - puts of transport ib: they arrive before their message, over any number of queue pairs; and puts that
 * must not be. tools/softroce.py runs it. */
#include "core/base/bits.h"
#include "core/base/status.h"
#include "endpoints.h"
#include "transport/net/ib/ib.h"

static const struct environment processes = {"ib", true};

static void check_flush(const struct member *m)
{
    CHECK(sp_ib_self(m->ep)->peers[0].rx[0].flushed != 0, "no flush has ended");
}

static struct member make_puts(void (*fn)(struct member *))
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

static void wait_message(struct member *m, int queue, const void **out, size_t *bytes)
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

static bool open_sides(struct member *m, struct sides *s)
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

static void close_sides(struct member *m, struct sides *s)
{
    m->t->puts->close_region(m->ep, s->region);
    leave_group(m);
    free(s->memory);
}

/* ---- right puts ---- */

/* Message number i, and what is put before it into slot i % SLOTS. */
static size_t message_bytes(const struct member *m, uint64_t i)
{
    return 16 + mix(m->seed + i) % 9000;
}
static size_t slot_bytes(const struct member *m, uint64_t i)
{
    return 1 + mix(m->seed + i + 1000) % SLOT_BYTES;
}

/* Put the slot in three pieces, the last one first. AGAIN: no space. */
static spccl_status put_slot(struct member *m, const struct sides *s, uint64_t i)
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
static void put_all(struct member *m, const struct sides *s)
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
static void flush_message(struct member *m)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    spccl_status st;
    while ((st = m->t->puts->flush(m->ep, 0, 0)) == SPCCL_AGAIN && !sp_deadline_passed(deadline_ns))
        if (!sleep_armed(m) || progress(m) != SPCCL_OK)
            break;
    CHECK(st == SPCCL_OK, "flush: %d: %s", (int)st, spccl_last_error());
}

static void read_all(struct member *m, const struct sides *s)
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
    check_flush(m);
}

static void exchange(struct member *m)
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

static void test_exchange(void)
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
static void test_few(void)
{
    struct member m = make_puts(exchange);
    m.config.n_puts = 16;
    m.kind = 30;
    run_group(&processes, &m);
}

/* ---- puts that must not be ---- */

/* Refused by the rank that would put: nothing is written. */
static void bad_put(struct member *m)
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

static void test_bad_put(void)
{
    struct member m = make_puts(bad_put);
    m.config.n_puts = 5;
    run_group(&processes, &m);
}

/* The peer's device refuses a put: with a key that the peer did not give, and (kind 1) behind the peer's region, whose
 * size in the handle is wrong. Rank 0 loses rank 1, and names device and rank; rank 1's memory is as it was. */
static void refused_put(struct member *m)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    struct sides s;
    char device[100];
    spccl_status st = SPCCL_OK;
    void *space = NULL;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        sp_put put = {
            .from = s.region, .to = s.handle, .bytes = 64, .to_off = m->kind == 1 ? REGION_BYTES - 32 : 0};
        if (m->kind == 1)
            sp_store_le64(s.handle + 16, REGION_BYTES + 64);
        for (int k = 24; m->kind == 0 && k < 40; k += 4)
            sp_store_le32(s.handle + k, sp_load_le32(s.handle + k) ^ 0x5500);
        memset(s.memory, 0xee, REGION_BYTES);
        CHECK_OK(m->t->reserve(m->ep, 1, 0, 16, &space));
        CHECK_OK(m->t->puts->put(m->ep, 1, 0, &put));
        CHECK_OK(m->t->commit(m->ep, 1, 0, 0));
        while ((st = m->t->reserve(m->ep, 1, 0, 16, &space)) == SPCCL_OK && !sp_deadline_passed(deadline_ns))
            (void)progress(m);
        sp_ib_device_text(&sp_ib_self(m->ep)->devices[0], device, sizeof device);
        CHECK(st == SPCCL_ERR_PEER && strstr(spccl_last_error(), device) != NULL &&
                  strstr(spccl_last_error(), "rank 1") != NULL &&
                  strstr(spccl_last_error(), "remote access error") != NULL,
              "%d: %s", (int)st, spccl_last_error());
        CHECK(m->t->puts->put(m->ep, 1, 0, &put) == SPCCL_ERR_PEER, "a put to a lost peer");
    }
    barrier(m, 1);
    for (size_t i = 0; m->rank == 1 && i < REGION_BYTES; i++)
        if (s.memory[i] != 0) {
            CHECK(false, "byte %zu was written", i);
            break;
        }
    close_sides(m, &s);
}

static void test_refused_put(void)
{
    for (int kind = 0; kind < 2; kind++) {
        struct member m = make_group(&processes, 2, refused_put);
        m.kind = kind;
        m.config.n_puts = 4;
        run_group(&processes, &m);
    }
}

/* Memory that no device registers: the reason names the device. An endpoint without n_puts has no puts. */
static void bad_region(struct member *m)
{
    sp_region_config c = {.address = (uint8_t *)(uintptr_t)4096, .bytes = 4096, .dmabuf = -1};
    sp_region *region = NULL;
    uint8_t handle[SP_REGION_HANDLE_BYTES];
    spccl_status st;
    if (!join_group(m))
        return;
    CHECK(!m->t->puts->reaches(m->ep, 1 - m->rank), "puts reach the peer");
    for (c.dmabuf = -1; c.dmabuf < 1; c.dmabuf++) {
        st = m->t->puts->open_region(m->ep, &c, &region, handle);
        CHECK(st == SPCCL_ERR_SYSTEM && region == NULL && strstr(spccl_last_error(), "device ") != NULL &&
                  strstr(spccl_last_error(), c.dmabuf < 0 ? "ibv_reg_mr" : "ibv_reg_dmabuf_mr") != NULL,
              "%d: %s", (int)st, spccl_last_error());
    }
    m->t->puts->close_region(m->ep, NULL);
    barrier(m, 1);
    leave_group(m);
}

static void test_bad_region(void)
{
    struct member m = make_group(&processes, 2, bad_region);
    run_group(&processes, &m);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"exchange", test_exchange},     {"few", test_few},
        {"bad_put", test_bad_put},       {"refused_put", test_refused_put},
        {"bad_region", test_bad_region}, {NULL, NULL}};
    sp_ib_choice choice;
    sp_ib_choose(0, "", &choice);
    if (choice.n == 0) {
        printf("skipped: %s\n", choice.why);
        return 77;
    }
    return test_main(cases, argc, argv);
}
