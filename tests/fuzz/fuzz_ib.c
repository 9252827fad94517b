/* fuzz_ib.c - takes any bytes as what a peer of transport ib sends: its address, its connect info, its result, or the 32 bits
 * and sizes of writes, of which some came before. What is accepted must be in range.
 *   0  u8  what: address, connect info, writes, result (modulo 4)
 *   1  the bytes. Writes: u32 how many segments came before, then for each write u32 immediate, u32 bytes */
#include "core/base/bits.h"
#include "fuzz.h"
#include "transport/net/ib/ib_wire.h"

static void try_address(const uint8_t *data, size_t bytes)
{
    sp_ib_address a, other;
    sp_ib_pairing pairing;
    if (!sp_ib_read_address(data, bytes, &a))
        return;
    EXPECT(a.n >= 1 && a.n <= SP_IB_RAILS_MAX);
    sp_ib_pair(&a, &a, &pairing);
    EXPECT(pairing.n >= 1 && pairing.n <= a.n && pairing.n * pairing.n_qps <= SP_IB_QPS_MAX);
    for (uint32_t i = 0; i < pairing.n; i++)
        EXPECT(pairing.low[i] < a.n && pairing.high[i] < a.n);
    other = a; /* a rank with another order of ports: both ranks get the same rate */
    for (uint32_t i = 0; i < a.n; i++)
        other.ports[i] = a.ports[a.n - 1 - i];
    EXPECT(sp_ib_rails_mbps(&a, 200000, &other, 50000) == sp_ib_rails_mbps(&other, 50000, &a, 200000));
}

static void try_connect_info(const uint8_t *data, size_t bytes)
{
    sp_ib_connect_info info, same;
    uint8_t again[SP_IB_CONNECT_INFO_BYTES];
    if (!sp_ib_read_connect_info(data, bytes, &info))
        return;
    EXPECT(info.n_queues >= 1 && info.n_queues <= SP_QUEUES_MAX && info.n_qps <= SP_IB_QPS_MAX &&
           info.usable >> info.n_qps == 0 && info.ends[0].queue_pair <= 0xffffff);
    for (size_t i = 0; i < strnlen(info.why, sizeof info.why); i++)
        EXPECT(info.why[i] >= 32 && info.why[i] < 127);
    EXPECT(strnlen(info.why, sizeof info.why) < sizeof info.why);
    sp_ib_write_connect_info(&info, again);
    EXPECT(sp_ib_read_connect_info(again, sizeof again, &same) &&
           same.ends[15].packet == info.ends[15].packet && same.rings[3].address == info.rings[3].address &&
           strcmp(same.why, info.why) == 0);
}

static void try_result(const uint8_t *data, size_t bytes)
{
    sp_segments_result r;
    if (!sp_segments_read_result(data, bytes, SP_IB_RESULT_MAGIC, (1u << SP_IB_QPS_MAX) - 1, &r))
        return;
    EXPECT(r.value >> SP_IB_QPS_MAX == 0 && strnlen(r.why, sizeof r.why) < sizeof r.why);
    for (size_t i = 0; i < strlen(r.why); i++)
        EXPECT(r.why[i] >= 32 && r.why[i] < 127);
}

/* Writes arrive one after the other. Whatever they are, no segment comes without credit, and no credit is more than the
 * ring holds. */
static void try_writes(const uint8_t *data, size_t bytes)
{
    sp_ib_expected want = {.n_queues = 2, .segment_bytes = 4096, .probe = true};
    uint64_t before = bytes >= 4 ? sp_load_le32(data) : 0; /* immediates have the low 28 bits of a number */
    if (bytes < 4)
        return;
    data += 4;
    bytes -= 4;
    for (int i = 0; i < 2; i++) {
        want.queues[i].next = want.queues[i].n_posted = before;
        want.queues[i].announced = want.queues[i].credit = before + SP_SEGMENTS;
    }
    for (; bytes >= 8; data += 8, bytes -= 8) {
        sp_ib_arrival a;
        uint32_t n = sp_load_le32(data + 4);
        if (sp_ib_read_imm(&want, sp_load_le32(data), n, &a) != SPCCL_OK)
            continue;
        EXPECT(a.queue < 2 || a.kind == SP_IB_PROBE);
        if (a.kind == SP_IB_DATA) {
            EXPECT(n >= SP_RECORD_HEAD_BYTES && n <= 4096 &&
                   want.queues[a.queue].next < before + SP_SEGMENTS);
            want.queues[a.queue].next++;
        } else if (a.kind == SP_IB_CREDIT) {
            EXPECT(a.credit > want.queues[a.queue].credit && a.credit <= want.queues[a.queue].n_posted + 16);
            want.queues[a.queue].credit = a.credit;
        } else {
            want.probe = false;
        }
        want.queues[0].n_posted++;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes < 1)
        return 0;
    switch (data[0] % 4) {
    case 0:
        try_address(data + 1, bytes - 1);
        break;
    case 1:
        try_connect_info(data + 1, bytes - 1);
        break;
    case 2:
        try_writes(data + 1, bytes - 1);
        break;
    case 3:
        try_result(data + 1, bytes - 1);
        break;
    }
    return 0;
}
