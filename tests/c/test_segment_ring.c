/* test_segment_ring.c - the rings of transport ncclnet: what is written on one side is read on the other, segment by
 * segment, whatever the sizes and the order of calls; and a sender that lies is found out. */
#include "core/base/bits.h"
#include "spccl.h"
#include "test.h"
#include "transport/net/segments/segment_ring.h"

#define RING_BYTES ((size_t)1 << 16)
#define MESSAGE_MAX (RING_BYTES / 4)

/* What the two threads and the plugin do: give segments to the other ring, in order. Up to n of them. */
static void carry(sp_segment_ring *from, sp_segment_ring *to, int n)
{
    uint64_t k = atomic_load(&from->done);
    for (; n > 0 && k < atomic_load(&from->allowed) && k < atomic_load(&to->allowed); n--, k++) {
        uint32_t bytes = from->bytes[k % SP_SEGMENTS];
        CHECK(bytes >= 16 && bytes <= from->segment_bytes && bytes % 16 == 0, "a segment of %u bytes", bytes);
        memcpy(sp_segment_ring_segment(to, k), sp_segment_ring_segment(from, k), bytes);
        to->bytes[k % SP_SEGMENTS] = bytes;
        atomic_store(&from->done, k + 1);
        atomic_store(&to->done, k + 1);
    }
}

static size_t random_size(void)
{
    uint64_t r = test_rand() % 100;
    if (r < 50)
        return 1 + test_rand() % 100;
    return r < 90 ? 1 + test_rand() % 5000 : MESSAGE_MAX - test_rand() % 40;
}

static void fill(uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(seed * 31 + i * 7 + (i >> 8));
}

static int is_filled(const uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != (uint8_t)(seed * 31 + i * 7 + (i >> 8)))
            return 0;
    return 1;
}

/* Random calls on both sides. After the last message everything is pushed, carried, read and counted. */
static void test_random_calls(void)
{
    enum { N = 20000 };
    static size_t sizes[N];
    sp_segment_ring tx, rx;
    uint64_t sent = 0, taken = 0;
    void *reserved = NULL;
    size_t reserved_bytes = 0;
    int idle = 0;
    CHECK_OK(sp_segment_ring_open(&tx, RING_BYTES, 3, false));
    CHECK_OK(sp_segment_ring_open(&rx, RING_BYTES, 3, true));
    for (uint64_t i = 0; i < N; i++)
        sizes[i] = random_size();
    while (taken < N && idle < 1000) {
        const void *p;
        size_t bytes;
        uint64_t before = taken, what = test_rand() % 8;
        if (what < 3 && sent < N && reserved == NULL) {
            reserved = sp_segment_ring_reserve(&tx, what == 0 ? MESSAGE_MAX : sizes[sent]);
            reserved_bytes = what == 0 ? MESSAGE_MAX : sizes[sent];
        } else if (what < 4 && reserved != NULL) {
            if (reserved_bytes != sizes[sent]) /* less than before: it must not fail */
                reserved = sp_segment_ring_reserve(&tx, sizes[sent]);
            CHECK(reserved != NULL && (uintptr_t)reserved % 16 == 0, "a smaller reservation failed");
            if (reserved == NULL)
                break;
            fill(reserved, sizes[sent], sent);
            if (test_rand() % 2 == 0)
                (void)sp_segment_ring_push(&tx);
            (void)sp_segment_ring_commit(&tx);
            reserved = NULL;
            sent++;
        } else if (what == 5) {
            (void)sp_segment_ring_push(&tx);
        } else if (what == 6) {
            carry(&tx, &rx, (int)(test_rand() % 6));
        } else if (sp_segment_ring_peek(&rx, MESSAGE_MAX, &p, &bytes) == SPCCL_OK) {
            CHECK(bytes == sizes[taken] && is_filled(p, bytes, taken), "message %llu",
                  (unsigned long long)taken);
            (void)sp_segment_ring_release(&rx, bytes);
            taken++;
        }
        CHECK(sp_segment_ring_left(&tx) <= sent, "more have left than were sent");
        idle = taken == before ? idle + 1 : 0;
    }
    CHECK(taken == N, "%llu of %d messages arrived", (unsigned long long)taken, N);
    CHECK(sp_segment_ring_left(&tx) == sent, "%llu of %llu have left",
          (unsigned long long)sp_segment_ring_left(&tx), (unsigned long long)sent);
    sp_segment_ring_close(&tx);
    sp_segment_ring_close(&rx);
}

/* Wrong bytes in a ring are an error, and no access outside of it. */
static void test_lies(void)
{
    static const struct {
        uint32_t head[4], bytes;
    } lies[] = {{{16, 0, 3, 0}, 32},
                {{0, 0, 3, 0x534d5053}, 16},
                {{0xffffffff, 0, 3, 0x534d5053}, 16},
                {{MESSAGE_MAX + 1, 0, 3, 0x534d5053}, 4096},
                {{16, 1, 3, 0x534d5053}, 32},
                {{16, 0, 2, 0x534d5053}, 32},
                {{17, 0, 3, 0x534d5053}, 32}};
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        sp_segment_ring rx;
        const void *p;
        size_t bytes;
        CHECK_OK(sp_segment_ring_open(&rx, RING_BYTES, 3, true));
        CHECK(sp_segment_ring_peek(&rx, MESSAGE_MAX, &p, &bytes) == SPCCL_AGAIN, "a message out of nothing");
        memcpy(sp_segment_ring_segment(&rx, 0), lies[i].head, sizeof lies[i].head);
        rx.bytes[0] = lies[i].bytes;
        atomic_store(&rx.done, 1);
        CHECK(sp_segment_ring_peek(&rx, MESSAGE_MAX, &p, &bytes) == SPCCL_ERR_FORMAT, "lie %zu", i);
        sp_segment_ring_close(&rx);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"random_calls", test_random_calls}, {"lies", test_lies}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
