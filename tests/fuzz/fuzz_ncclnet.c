/* fuzz_ncclnet.c - takes any bytes as what a peer of transport ncclnet sends: its address, its notes over tcp, the
 * segments that arrive in a ring. No access may be out of bounds, and what is accepted must be in range.
 *   0  u8  what: address, connect info, result, FIN, segments (modulo 5)
 *   1  the bytes. Segments: for each u8 length in units of 16 bytes, then as many bytes as are left, at most that many */
#include "core/base/bits.h"
#include "fuzz.h"
#include "transport/net/plugin/plugin_wire.h"
#include "transport/net/segments/segment_ring.h"

#define RING_BYTES ((size_t)1 << 16)

static void check_text(const char *text, size_t cap)
{
    size_t n = strnlen(text, cap);
    EXPECT(n < cap);
    for (size_t i = 0; i < n; i++)
        EXPECT(text[i] >= 32 && text[i] < 127);
}

static void try_notes(int what, const uint8_t *data, size_t bytes)
{
    sp_plugin_connect_info info;
    sp_segments_result result;
    sp_segments_fin fin;
    if (what == 0)
        (void)sp_plugin_is_address(data, bytes);
    if (what == 1 && sp_plugin_read_connect_info(data, bytes, &info)) {
        uint8_t again[SP_PLUGIN_CONNECT_INFO_BYTES];
        sp_plugin_connect_info same;
        EXPECT(info.n_queues >= 1 && info.n_queues <= SP_QUEUES_MAX);
        check_text(info.name, sizeof info.name);
        check_text(info.why, sizeof info.why);
        sp_plugin_write_connect_info(&info, again);
        EXPECT(sp_plugin_read_connect_info(again, sizeof again, &same) && strcmp(same.name, info.name) == 0 &&
               strcmp(same.why, info.why) == 0 &&
               memcmp(same.handles, info.handles, sizeof same.handles) == 0 &&
               same.plugin_mbps == info.plugin_mbps && same.tcp_mbps == info.tcp_mbps &&
               same.rates_decide == info.rates_decide);
    }
    if (what == 2 && sp_segments_read_result(data, bytes, SP_PLUGIN_RESULT_MAGIC, 1, &result))
        check_text(result.why, sizeof result.why);
    if (what == 3)
        (void)sp_segments_read_fin(data, bytes, 2, &fin);
}

static volatile unsigned sink; /* the reads below must happen */

/* Segments arrive; every message that can be taken is read to its last byte and released. */
static void try_segments(const uint8_t *data, size_t bytes)
{
    sp_segment_ring ring;
    spccl_status st = SPCCL_AGAIN;
    uint64_t done = 0;
    EXPECT(sp_segment_ring_open(&ring, RING_BYTES, 0, true) == SPCCL_OK);
    while (bytes > 1 && (st == SPCCL_AGAIN || st == SPCCL_OK) && done < atomic_load(&ring.allowed)) {
        const void *message;
        size_t n, wanted = (1 + (size_t)data[0]) * 16, here = sp_min_size(bytes - 1, wanted);
        memset(sp_segment_ring_segment(&ring, done), 0, ring.segment_bytes);
        memcpy(sp_segment_ring_segment(&ring, done), data + 1, here);
        ring.bytes[done % SP_SEGMENTS] = (uint32_t)wanted;
        atomic_store(&ring.done, ++done);
        data += 1 + here;
        bytes -= 1 + here;
        while ((st = sp_segment_ring_peek(&ring, RING_BYTES / 4, &message, &n)) == SPCCL_OK) {
            EXPECT(n >= 1 && n <= RING_BYTES / 4 && (const uint8_t *)message >= ring.memory.data &&
                   (const uint8_t *)message + n <= ring.memory.data + 2 * RING_BYTES);
            for (size_t i = 0; i < n; i++)
                sink += ((const uint8_t *)message)[i];
            (void)sp_segment_ring_release(&ring, n);
        }
    }
    EXPECT(st == SPCCL_AGAIN || st == SPCCL_ERR_FORMAT);
    sp_segment_ring_close(&ring);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes == 0)
        return 0;
    if (data[0] % 5 == 4)
        try_segments(data + 1, bytes - 1);
    else
        try_notes(data[0] % 5, data + 1, bytes - 1);
    return 0;
}
