/* ib_wire.c - see ib_wire.h. */
#include "transport/net/ib/ib_wire.h"

#include "core/base/bits.h"
#include "core/contract/link_rate.h"

#include <string.h>

#define CONNECT_INFO_MAGIC 0x53497073u /* "spIS" */
#define ADDRESS_HEAD 6u
#define PORT_BYTES (1u + SP_IB_GID_BYTES)
#define ENDS_AT 16u
#define END_BYTES 32u
#define RINGS_AT (ENDS_AT + END_BYTES * SP_IB_QPS_MAX)
#define RING_BYTES (8u + 4u * SP_IB_QPS_MAX)
#define WHY_AT (RINGS_AT + RING_BYTES * SP_QUEUES_MAX)
_Static_assert(WHY_AT + SP_NET_TEXT_CAP == SP_IB_CONNECT_INFO_BYTES, "as in ib_wire.h");
#define NUMBER_MASK 0xfffffffu
static const char address_magic[4] = {'s', 'p', 'I', '5'};
#define NEAR 0x80u /* in a port's network */

static bool is_ipv4(const uint8_t *gid)
{
    static const uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    return memcmp(gid, prefix, sizeof prefix) == 0;
}

uint8_t sp_ib_network(const sp_ib_device *device)
{
    if (!device->ethernet)
        return SP_IB_INFINIBAND;
    return is_ipv4(device->gid) ? SP_IB_ROCE_IPV4 : SP_IB_ROCE_IPV6;
}

/* How well an entry serves: 0 not at all. An IPv4 address is routed; a link-local one is not. */
static int gid_rank(bool ethernet, const sp_ib_gid *entry)
{
    static const uint8_t zero[SP_IB_GID_BYTES] = {0};
    const uint8_t *gid = entry->bytes;
    if (memcmp(gid, zero, sizeof zero) == 0 || (ethernet && strcmp(entry->type, "RoCE v2") != 0))
        return 0;
    if (!ethernet)
        return 1;
    if (is_ipv4(gid))
        return 3;
    return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80 ? 1 : 2;
}

int sp_ib_choose_gid(bool ethernet, const sp_ib_gid *table, int n)
{
    int best = 0, chosen = -1;
    for (int i = 0; i < n; i++)
        if (gid_rank(ethernet, &table[i]) > best) {
            best = gid_rank(ethernet, &table[i]);
            chosen = i;
        }
    return chosen;
}

size_t sp_ib_write_address(const sp_ib_address *a, uint8_t *out)
{
    memcpy(out, address_magic, sizeof address_magic);
    out[4] = (uint8_t)a->n;
    out[5] = (uint8_t)a->n_qps;
    for (uint32_t i = 0; i < a->n; i++) {
        out[ADDRESS_HEAD + i * PORT_BYTES] = (uint8_t)(a->ports[i].network | (a->ports[i].near ? NEAR : 0));
        memcpy(out + ADDRESS_HEAD + i * PORT_BYTES + 1, a->ports[i].gid, SP_IB_GID_BYTES);
    }
    return ADDRESS_HEAD + a->n * PORT_BYTES;
}

bool sp_ib_read_address(const uint8_t *bytes, size_t n, sp_ib_address *out)
{
    if (n < ADDRESS_HEAD || memcmp(bytes, address_magic, sizeof address_magic) != 0 || bytes[4] == 0 ||
        bytes[4] > SP_IB_RAILS_MAX || bytes[5] == 0 || bytes[4] * bytes[5] > SP_IB_QPS_MAX)
        return false;
    *out = (sp_ib_address){.n = bytes[4], .n_qps = bytes[5]};
    if (n != ADDRESS_HEAD + out->n * PORT_BYTES)
        return false;
    for (uint32_t i = 0; i < out->n; i++) {
        const uint8_t *port = bytes + ADDRESS_HEAD + i * PORT_BYTES;
        out->ports[i].network = port[0] & (NEAR - 1);
        out->ports[i].near = (port[0] & NEAR) != 0;
        memcpy(out->ports[i].gid, port + 1, SP_IB_GID_BYTES);
        if (out->ports[i].network == SP_IB_NO_DEVICE || out->ports[i].network > SP_IB_ROCE_IPV6)
            return false;
    }
    return true;
}

/* 0: other networks; 1: the same kind of network; 2: one subnet too. */
static int closeness(const sp_ib_address *low, uint32_t i, const sp_ib_address *high, uint32_t j)
{
    size_t subnet_bytes = low->ports[i].network == SP_IB_ROCE_IPV4 ? 15 : 8;
    if (low->ports[i].network != high->ports[j].network)
        return 0;
    return memcmp(low->ports[i].gid, high->ports[j].gid, subnet_bytes) == 0 ? 2 : 1;
}

/* Join free ports of this closeness, and with `near` only ports that are near at both ranks: first those of equal number,
 * then any. */
static void join_ports(const sp_ib_address *low, const sp_ib_address *high, int wanted, bool near,
                       sp_ib_pairing *out)
{
    bool low_used[SP_IB_RAILS_MAX] = {false}, high_used[SP_IB_RAILS_MAX] = {false};
    for (int any = 0; any <= 1; any++)
        for (uint32_t i = 0; i < low->n; i++)
            for (uint32_t j = 0; j < high->n; j++) {
                if (low_used[i] || high_used[j] || (i != j && any == 0) ||
                    closeness(low, i, high, j) < wanted ||
                    (near && !(low->ports[i].near && high->ports[j].near)))
                    continue;
                low_used[i] = high_used[j] = true;
                out->low[out->n] = (uint8_t)i;
                out->high[out->n++] = (uint8_t)j;
            }
}

void sp_ib_pair(const sp_ib_address *low, const sp_ib_address *high, sp_ib_pairing *out)
{
    *out = (sp_ib_pairing){.n_qps = low->n_qps < high->n_qps ? low->n_qps : high->n_qps};
    for (int wanted = 2; wanted >= 1 && out->n == 0; wanted--)
        for (int near = 1; near >= 0 && out->n == 0; near--)
            join_ports(low, high, wanted, near == 1, out);
}

uint32_t sp_ib_rails_mbps(const sp_ib_address *a, uint32_t a_mbps, const sp_ib_address *b, uint32_t b_mbps)
{
    sp_ib_pairing pairing;
    sp_ib_pair(a, b, &pairing);
    return pairing.n * sp_rate_of_pair(a_mbps / a->n, b_mbps / b->n);
}

int sp_ib_keep(int rank, const int *distances, int n, int n_rails, int *kept)
{
    int n_kept = 0;
    for (int distance = 0, n_sorted = 0; n_sorted < n; distance++) {
        int same[SP_IB_DEVICES_MAX], n_same = 0;
        for (int i = 0; i < n; i++)
            if (distances[i] == distance)
                same[n_same++] = i;
        n_sorted += n_same;
        for (int i = 0; i < n_same && n_kept < n_rails; i++)
            kept[n_kept++] = same[n > n_rails ? (rank + i) % n_same : i];
    }
    return n_kept;
}

void sp_ib_write_connect_info(const sp_ib_connect_info *o, uint8_t out[SP_IB_CONNECT_INFO_BYTES])
{
    memset(out, 0, SP_IB_CONNECT_INFO_BYTES);
    sp_store_le32(out, CONNECT_INFO_MAGIC);
    sp_store_le16(out + 4, (uint16_t)o->n_qps);
    sp_store_le16(out + 6, (uint16_t)o->n_queues);
    sp_store_le32(out + 8, o->segment_bytes);
    sp_store_le32(out + 12, o->usable);
    for (size_t i = 0; i < SP_IB_QPS_MAX; i++) {
        uint8_t *end = out + ENDS_AT + END_BYTES * i;
        sp_store_le16(end, o->ends[i].ethernet ? 1 : 0);
        sp_store_le16(end + 2, o->ends[i].lid);
        sp_store_le32(end + 4, o->ends[i].mtu_bytes);
        sp_store_le32(end + 8, o->ends[i].queue_pair);
        sp_store_le32(end + 12, o->ends[i].packet);
        memcpy(end + 16, o->ends[i].gid, SP_IB_GID_BYTES);
    }
    for (size_t i = 0; i < SP_QUEUES_MAX; i++) {
        sp_store_le64(out + RINGS_AT + RING_BYTES * i, o->rings[i].address);
        for (size_t q = 0; q < SP_IB_QPS_MAX; q++)
            sp_store_le32(out + RINGS_AT + RING_BYTES * i + 8 + 4 * q, o->rings[i].rkey[q]);
    }
    memcpy(out + WHY_AT, o->why, strnlen(o->why, SP_NET_TEXT_CAP - 1));
}

static bool read_end(const uint8_t *bytes, bool usable, sp_ib_end *out)
{
    *out = (sp_ib_end){.ethernet = sp_load_le16(bytes) == 1,
                       .lid = sp_load_le16(bytes + 2),
                       .mtu_bytes = sp_load_le32(bytes + 4),
                       .queue_pair = sp_load_le32(bytes + 8),
                       .packet = sp_load_le32(bytes + 12)};
    memcpy(out->gid, bytes + 16, SP_IB_GID_BYTES);
    return sp_load_le16(bytes) <= 1 && out->queue_pair <= 0xffffff && out->packet <= 0xffffff &&
           (!usable || out->mtu_bytes >= 256);
}

bool sp_ib_read_connect_info(const uint8_t *bytes, size_t n, sp_ib_connect_info *out)
{
    bool fine = true;
    if (n != SP_IB_CONNECT_INFO_BYTES || sp_load_le32(bytes) != CONNECT_INFO_MAGIC)
        return false;
    *out = (sp_ib_connect_info){.n_qps = sp_load_le16(bytes + 4),
                                .n_queues = sp_load_le16(bytes + 6),
                                .segment_bytes = sp_load_le32(bytes + 8),
                                .usable = sp_load_le32(bytes + 12)};
    if (out->n_qps > SP_IB_QPS_MAX || out->usable >> out->n_qps != 0 || out->n_queues < 1 ||
        out->n_queues > SP_QUEUES_MAX)
        return false;
    for (size_t i = 0; i < SP_IB_QPS_MAX; i++)
        fine = read_end(bytes + ENDS_AT + END_BYTES * i, (out->usable >> i & 1) != 0, &out->ends[i]) && fine;
    for (size_t i = 0; i < SP_QUEUES_MAX; i++) {
        out->rings[i].address = sp_load_le64(bytes + RINGS_AT + RING_BYTES * i);
        for (size_t q = 0; q < SP_IB_QPS_MAX; q++)
            out->rings[i].rkey[q] = sp_load_le32(bytes + RINGS_AT + RING_BYTES * i + 8 + 4 * q);
    }
    return sp_segments_read_text(bytes + WHY_AT, out->why, SP_NET_TEXT_CAP) && fine;
}

/* ---- the 32 bits of a write ---- */

uint32_t sp_ib_imm(enum sp_ib_kind kind, uint32_t queue, uint64_t number)
{
    return (uint32_t)kind << 30 | queue << 28 | ((uint32_t)number & NUMBER_MASK);
}

static spccl_status read_data(const sp_ib_expected *want, uint32_t queue, uint32_t number, uint32_t bytes)
{
    uint64_t next = want->queues[queue].next;
    if (number != (next & NUMBER_MASK) || next >= want->queues[queue].announced)
        return SP_FAIL(SPCCL_ERR_FORMAT, "segment %u of queue %u; wanted segment %llu, below %llu", number,
                       queue, (unsigned long long)next, (unsigned long long)want->queues[queue].announced);
    if (bytes < SP_RECORD_HEAD_BYTES || bytes > want->segment_bytes || bytes % 16 != 0)
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "a segment of %u bytes in queue %u; wanted 16 to %u, a multiple of 16", bytes, queue,
                       want->segment_bytes);
    return SPCCL_OK;
}

static spccl_status read_credit(const sp_ib_expected *want, uint32_t queue, uint32_t number, uint32_t bytes,
                                uint64_t *credit)
{
    uint64_t old = want->queues[queue].credit;
    uint32_t more = (number - (uint32_t)old) & NUMBER_MASK;
    *credit = old + more;
    if (bytes != 0 || more == 0 || *credit > want->queues[queue].n_posted + SP_SEGMENTS)
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "credit %u for queue %u, with %u bytes; wanted more than %llu, at most %llu", number,
                       queue, bytes, (unsigned long long)old,
                       (unsigned long long)want->queues[queue].n_posted + SP_SEGMENTS);
    return SPCCL_OK;
}

spccl_status sp_ib_read_imm(const sp_ib_expected *want, uint32_t imm, uint32_t bytes, sp_ib_arrival *out)
{
    uint32_t kind = imm >> 30, queue = imm >> 28 & 3, number = imm & NUMBER_MASK;
    *out = (sp_ib_arrival){.kind = (enum sp_ib_kind)kind, .queue = queue};
    if (queue < want->n_queues && kind == SP_IB_DATA)
        return read_data(want, queue, number, bytes);
    if (queue < want->n_queues && kind == SP_IB_CREDIT)
        return read_credit(want, queue, number, bytes, &out->credit);
    if (kind == SP_IB_PROBE && want->probe && number == SP_IB_PROBE_NUMBER)
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_FORMAT, "a write with immediate %08x; wanted a segment or a credit of %u queues",
                   imm, want->n_queues);
}
