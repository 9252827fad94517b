/* test_ib_put.c - puts of transport ib: they arrive before their message, over any number of queue pairs; and puts that
 * must not be. tools/softroce.py runs it. */
#include "core/base/bits.h"
#include "puts.h"
#include "transport/net/ib/ib.h"

static const struct environment processes = {"ib", true};

static void check_flush(const struct member *m)
{
    CHECK(sp_ib_self(m->ep)->peers[0].rx[0].flushed != 0, "no flush has ended");
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
    check_flushed = check_flush;
    return test_main(cases, argc, argv);
}
