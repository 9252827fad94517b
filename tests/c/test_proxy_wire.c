/* test_proxy_wire.c - messages of rings between hosts: what is written is read back, and every wrong position,
 * length or count is refused. */
#include "core/gpu/proxy/proxy_wire.h"

#include "test.h"

#include "core/base/bits.h"

#define WORKERS 3u
#define RING 4096u

static uint64_t words[4][2 * WORKERS];
static sp_proxy_positions at = {words[0], words[1], words[2], words[3], 2, WORKERS, RING, 0, 1, false};
static uint8_t message[8192];

/* A ring of results of worker 1 has 1024 bytes free, and the peer may free up to 640 of ours. */
static void reset(void)
{
    memset(words, 0, sizeof words);
    words[0][WORKERS + 1] = 640;
    words[1][WORKERS + 1] = 128;
    words[2][WORKERS + 1] = RING * 10 + 3072;
    words[3][WORKERS + 1] = RING * 10;
}

static const sp_proxy_entry credit = {.queue = 1, .worker = 1, .position = 640};
static const sp_proxy_entry span = {
    .is_span = true, .queue = 1, .worker = 1, .position = RING * 10 + 3072, .bytes = 1024};

static size_t write_two(sp_proxy_entry first, sp_proxy_entry second)
{
    size_t off = sp_proxy_data_off(2);
    sp_proxy_put_head(message, 1, 1);
    sp_proxy_put_entry(message, 0, &first);
    sp_proxy_put_entry(message, 1, &second);
    memset(message + off, 0x5a, 1024);
    return off + 1024;
}

/* Read a message to its end. */
static spccl_status read_all(size_t bytes)
{
    sp_proxy_reader r;
    sp_proxy_entry e;
    const uint8_t *data = NULL;
    spccl_status st = sp_proxy_open_message(&r, message, bytes);
    while (st == SPCCL_OK)
        st = sp_proxy_next_entry(&r, &at, &e, &data);
    return st;
}

static void test_reads_what_was_written(void)
{
    sp_proxy_reader r;
    sp_proxy_entry e;
    const uint8_t *data = NULL;
    size_t bytes;
    reset();
    bytes = write_two(credit, span);
    CHECK_OK(sp_proxy_open_message(&r, message, bytes));
    CHECK_OK(sp_proxy_next_entry(&r, &at, &e, &data));
    CHECK(!e.is_span && e.queue == 1 && e.worker == 1 && e.position == 640, "the credit");
    CHECK_OK(sp_proxy_next_entry(&r, &at, &e, &data));
    CHECK(e.is_span && e.queue == 1 && e.worker == 1 && e.position == span.position && e.bytes == 1024,
          "the span");
    CHECK(data == message + sp_proxy_data_off(2), "the data start at %td", data - message);
    CHECK(sp_proxy_next_entry(&r, &at, &e, &data) == SPCCL_AGAIN, "no further entry");
}

static void refused(sp_proxy_entry first, sp_proxy_entry second, const char *what)
{
    reset();
    CHECK(read_all(write_two(first, second)) == SPCCL_ERR_FORMAT, "%s was not refused", what);
}

static void test_wrong_numbers(void)
{
    sp_proxy_entry c = credit, e = span;
    c.position = 656, refused(c, span, "a credit for more than was sent");
    c.position = 112, refused(c, span, "a credit that goes back");
    c.position = 633, refused(c, span, "a credit between units");
    c = credit, c.queue = 2, refused(c, span, "a queue that does not exist");
    c = credit, c.worker = WORKERS, refused(c, span, "a worker that does not exist");
    e.position -= 16, refused(credit, e, "a span before the last one's end");
    e.position += 32, refused(credit, e, "a span behind a gap");
    e = span, e.bytes = 0, refused(credit, e, "an empty span");
    e = span, e.bytes = 1016, refused(credit, e, "a span of half units");
    e = span, e.bytes = 1040, refused(credit, e, "a span beyond the credit");
    e = span, e.bytes = UINT32_MAX - 15, refused(credit, e, "a span of 2^32 bytes");
    e = span, e.skipped = 16, refused(credit, e, "a skip in a span that ends at the end of the ring");
    c = credit, c.is_span = true, c.bytes = 16, refused(c, span, "a credit of bytes");
    c = credit, c.is_span = true, c.skipped = 16, refused(c, span, "a credit that skips");
    c = credit;
    e = span, e.queue = 0, e.position = 0, e.bytes = 2048,
    refused(credit, e, "a span longer than the message");
    e = span, e.bytes = 512, refused(credit, e, "bytes behind the last span");
    at.n_queues = 1;
    refused(credit, span, "results of a rank that sends none");
    at.n_queues = 2;
}

/* A receiver that waits for a frame gives credit for the bytes at the end of the ring into which no header fits,
 * before the sender has skipped them. The span that skips them may be longer than the ring. */
static void test_skipped_end(void)
{
    for (uint32_t left = 16; left <= 96; left += 16) {
        uint64_t end = (uint64_t)RING * 3 - left, most = left < 64 ? end + left : end;
        sp_proxy_entry c = {.queue = 1, .worker = 1};
        CHECK(sp_proxy_credit_max(end, RING) == most, "%u bytes left: %llu, wanted %llu", left,
              (unsigned long long)sp_proxy_credit_max(end, RING), (unsigned long long)most);
        for (c.position = end; c.position <= end + 128; c.position += 16) {
            reset();
            words[0][WORKERS + 1] = end;
            CHECK((read_all(write_two(c, span)) == SPCCL_AGAIN) == (c.position <= most),
                  "%u bytes left: a credit of %llu: %s", left, (unsigned long long)c.position,
                  spccl_last_error());
        }
    }
    CHECK(sp_proxy_credit_max(RING * 3, RING) == RING * 3, "at the start of the ring");
    CHECK(sp_proxy_span_max(RING) == RING + 48, "the longest span has %zu bytes", sp_proxy_span_max(RING));
    for (uint32_t bytes = RING + 48; bytes <= RING + 64; bytes += 16) {
        size_t off = sp_proxy_data_off(1);
        sp_proxy_entry e = {
            .is_span = true, .queue = 1, .worker = 1, .position = RING * 3 - 48, .bytes = bytes};
        reset();
        words[2][WORKERS + 1] = RING * 3 - 48;
        words[3][WORKERS + 1] = RING * 3;
        sp_proxy_put_head(message, 0, 1);
        sp_proxy_put_entry(message, 0, &e);
        CHECK((read_all(off + bytes) == SPCCL_AGAIN) == (bytes == RING + 48), "a span of %u bytes: %s", bytes,
              spccl_last_error());
    }
}

/* Fill the end of a ring with frames of these sizes from `left` bytes before the end on, then a mark if a header fits. */
static void lay_frames(uint8_t *ring, uint32_t left, const uint32_t *sizes)
{
    uint32_t off = RING - left;
    memset(ring, 0x77, RING);
    for (; *sizes != 0; off += *sizes++) {
        memset(ring + off, 0x5a, *sizes);
        sp_store_le32(ring + off, 0x46435053u); /* "SPCF" */
        sp_store_le64(ring + off + 24, *sizes);
    }
    if (RING - off >= 64)
        sp_store_le32(ring + off, SP_INBOX_WRAP);
}

/* Skipped bytes are found, do not travel, and the receiver's kernel finds the same frames and mark. */
static void test_skips_do_not_travel(void)
{
    static const uint32_t sizes[][3] = {{0}, {96, 0}, {96, 208, 0}, {304, 0}};
    static const uint32_t lefts[] = {16, 48, 64, 304, 320, 352, 368, 384, 1024};
    static uint8_t ring[RING], got[RING];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t k = 0; k < sizeof lefts / sizeof *lefts; k++) {
            uint32_t left = lefts[k], used = sizes[i][0] + (sizes[i][0] != 0 ? sizes[i][1] : 0), skip = 0;
            sp_proxy_entry e = {.is_span = true, .queue = 1, .worker = 1, .position = RING * 3 - left};
            size_t off = sp_proxy_data_off(1);
            if (used > left)
                continue;
            lay_frames(ring, left, sizes[i]);
            e.bytes = left;
            CHECK(sp_proxy_find_skip(ring, RING, &e, &skip) && skip == 0, "%u skipped before the end", skip);
            e.bytes = left + 512;
            CHECK(sp_proxy_find_skip(ring, RING, &e, &e.skipped) && e.skipped == left - used,
                  "%u skipped of %u left; wanted %u", e.skipped, left, left - used);
            reset();
            words[2][WORKERS + 1] = words[3][WORKERS + 1] = e.position;
            sp_proxy_put_head(message, 0, 1);
            sp_proxy_put_entry(message, 0, &e);
            sp_proxy_read_span(message + off, ring, RING, &e);
            CHECK(read_all(off + e.bytes - e.skipped) == SPCCL_AGAIN, "%s", spccl_last_error());
            memset(got, 0, RING);
            sp_proxy_write_span(got, RING, &e, message + off);
            CHECK(memcmp(got, ring, 512) == 0 && memcmp(got + RING - left, ring + RING - left, used) == 0,
                  "frames differ, %u of %u bytes before the end", used, left);
            CHECK(e.skipped < 64 || sp_load_le32(got + RING - e.skipped) == SP_INBOX_WRAP, "no mark");
            for (e.skipped = left + 16; e.skipped <= left + 32; e.skipped += 8) {
                sp_proxy_put_entry(message, 0, &e);
                CHECK(read_all(off + e.bytes - e.skipped) == SPCCL_ERR_FORMAT, "%u skipped of %u left",
                      e.skipped, left);
            }
        }
    lay_frames(ring, 1024, sizes[1]);
    sp_store_le64(ring + RING - 1024 + 24, 2048);
    CHECK(!sp_proxy_find_skip(ring, RING, &(sp_proxy_entry){.position = RING - 1024, .bytes = 2000},
                              &(uint32_t){0}),
          "a frame past the end of the ring");
}

/* The proxies share the workers: a message to another proxy than the worker's is refused. */
static void test_other_proxy(void)
{
    static uint64_t many[4][2 * 40];
    for (uint32_t n = 1; n <= 5; n++)
        for (uint32_t worker = 0; worker < 40; worker++) {
            uint32_t served = 0;
            for (uint32_t k = 0; k < n; k++) {
                sp_proxy_positions p = {many[0], many[1], many[2], many[3], 2, 40, RING, k, n, false};
                sp_proxy_entry e = {.worker = worker};
                const uint8_t *data = NULL;
                sp_proxy_reader r;
                sp_proxy_put_head(message, 1, 0);
                sp_proxy_put_entry(message, 0, &e);
                CHECK_OK(sp_proxy_open_message(&r, message, sp_proxy_data_off(1)));
                served += sp_proxy_next_entry(&r, &p, &e, &data) == SPCCL_OK;
            }
            CHECK(served == 1, "worker %u: %u of %u proxies serve it", worker, served, n);
        }
}

/* Rings in GPU memory: runs have no bytes in the message, and skip none. The checks of positions are the same. */
static void test_direct(void)
{
    sp_proxy_reader r;
    sp_proxy_entry e = span, skip = span, c = credit;
    const uint8_t *data = NULL;
    size_t bytes = sp_proxy_data_off(2);
    at.direct = true;
    reset();
    (void)write_two(credit, span);
    CHECK_OK(sp_proxy_open_message(&r, message, bytes));
    CHECK_OK(sp_proxy_next_entry(&r, &at, &e, &data));
    CHECK_OK(sp_proxy_next_entry(&r, &at, &e, &data));
    CHECK(e.is_span && e.position == span.position && e.bytes == 1024 && data == NULL, "the span");
    CHECK(sp_proxy_next_entry(&r, &at, &e, &data) == SPCCL_AGAIN, "no further entry");
    CHECK(read_all(bytes + 16) == SPCCL_ERR_FORMAT, "bytes in the message were not refused");
    e = span, e.position += 32, refused(credit, e, "a span behind a gap");
    e = span, e.bytes = 1040, refused(credit, e, "a span beyond the credit");
    c.position = 656, refused(c, span, "a credit for more than was sent");
    words[0][WORKERS + 1] = 640; /* the ring is free, from its second unit on */
    words[1][WORKERS + 1] = 128;
    words[2][WORKERS + 1] = words[3][WORKERS + 1] = skip.position = RING * 10 + 16;
    skip.bytes = RING, skip.skipped = 16;
    (void)write_two(credit, skip);
    CHECK(read_all(bytes) == SPCCL_ERR_FORMAT && strstr(spccl_last_error(), "skipped") != NULL, "a skip: %s",
          spccl_last_error());
    at.direct = false;
}

static void test_wrong_heads(void)
{
    size_t bytes;
    reset();
    bytes = write_two(credit, span);
    CHECK(read_all(bytes) == SPCCL_AGAIN, "the message is right: %s", spccl_last_error());
    for (size_t n = 0; n < bytes; n++)
        CHECK(read_all(n) == SPCCL_ERR_FORMAT, "the first %zu bytes were not refused", n);
    sp_store_le32(message + 4, UINT32_MAX);
    sp_store_le32(message + 8, UINT32_MAX);
    CHECK(read_all(bytes) == SPCCL_ERR_FORMAT, "2^33 entries were not refused");
    for (unsigned bit = 0; bit < 32; bit++) { /* of the magic number */
        bytes = write_two(credit, span);
        message[bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK(read_all(bytes) == SPCCL_ERR_FORMAT, "bit %u of the head", bit);
    }
}

static void test_credits_wait(void)
{
    CHECK(sp_proxy_may_wait(16, RING, 0), "a small credit goes with the next frames");
    CHECK(!sp_proxy_may_wait(16, RING, SP_PROXY_CREDIT_WAIT_NS), "no credit waits for longer");
    CHECK(sp_proxy_may_wait(RING / 8 - 1, RING, 0) && !sp_proxy_may_wait(RING / 8, RING, 0),
          "the sender may need an eighth of a ring");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"reads_what_was_written", test_reads_what_was_written},
                                             {"wrong_numbers", test_wrong_numbers},
                                             {"skipped_end", test_skipped_end},
                                             {"skips_do_not_travel", test_skips_do_not_travel},
                                             {"other_proxy", test_other_proxy},
                                             {"direct", test_direct},
                                             {"wrong_heads", test_wrong_heads},
                                             {"credits_wait", test_credits_wait},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
