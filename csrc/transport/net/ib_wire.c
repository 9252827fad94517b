/* ib_wire.c - see ib_wire.h. */
#include "transport/net/ib_wire.h"

#include "core/base/bits.h"

#include <string.h>

#define CONNECT_INFO_MAGIC 0x4f497073u /* "spIO" */
#define NUMBER_MASK 0xfffffffu
static const char address_magic[4] = {'s', 'p', 'I', '1'};

uint8_t sp_ib_network(const sp_ib_device *device)
{
    static const uint8_t ipv4[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    if (!device->ethernet)
        return SP_IB_INFINIBAND;
    return memcmp(device->gid, ipv4, sizeof ipv4) == 0 ? SP_IB_ROCE_IPV4 : SP_IB_ROCE_IPV6;
}

void sp_ib_write_address(uint8_t network, uint8_t out[SP_IB_ADDRESS_HEAD])
{
    memcpy(out, address_magic, sizeof address_magic);
    out[4] = network;
}

bool sp_ib_read_address(const uint8_t *bytes, size_t n, uint8_t *network, const uint8_t **tcp,
                        size_t *tcp_bytes)
{
    if (n <= SP_IB_ADDRESS_HEAD || memcmp(bytes, address_magic, sizeof address_magic) != 0 ||
        bytes[4] == SP_IB_NO_DEVICE || bytes[4] > SP_IB_ROCE_IPV6)
        return false;
    *network = bytes[4];
    *tcp = bytes + SP_IB_ADDRESS_HEAD;
    *tcp_bytes = n - SP_IB_ADDRESS_HEAD;
    return true;
}

void sp_ib_write_connect_info(const sp_ib_connect_info *o, uint8_t out[SP_IB_CONNECT_INFO_BYTES])
{
    uint8_t *why = out + 44 + 12 * SP_QUEUES_MAX;
    memset(out, 0, SP_IB_CONNECT_INFO_BYTES);
    sp_store_le32(out, CONNECT_INFO_MAGIC);
    sp_store_le16(out + 4, o->usable ? 1 : 0);
    sp_store_le16(out + 6, (uint16_t)o->n_queues);
    sp_store_le32(out + 8, o->segment_bytes);
    sp_store_le16(out + 12, o->end.ethernet ? 1 : 0);
    sp_store_le16(out + 14, o->end.lid);
    sp_store_le32(out + 16, o->end.mtu_bytes);
    sp_store_le32(out + 20, o->end.queue_pair);
    sp_store_le32(out + 24, o->end.packet);
    memcpy(out + 28, o->end.gid, SP_IB_GID_BYTES);
    for (size_t i = 0; i < SP_QUEUES_MAX; i++) {
        sp_store_le64(out + 44 + 12 * i, o->rings[i].address);
        sp_store_le32(out + 52 + 12 * i, o->rings[i].rkey);
    }
    memcpy(why, o->why, strnlen(o->why, SP_NN_TEXT_CAP - 1));
}

bool sp_ib_read_connect_info(const uint8_t *bytes, size_t n, sp_ib_connect_info *out)
{
    const uint8_t *why = bytes + 44 + 12 * SP_QUEUES_MAX;
    size_t why_bytes;
    if (n != SP_IB_CONNECT_INFO_BYTES || sp_load_le32(bytes) != CONNECT_INFO_MAGIC ||
        sp_load_le16(bytes + 4) > 1 || sp_load_le16(bytes + 12) > 1)
        return false;
    *out = (sp_ib_connect_info){.usable = sp_load_le16(bytes + 4) == 1,
                                .n_queues = sp_load_le16(bytes + 6),
                                .segment_bytes = sp_load_le32(bytes + 8),
                                .end = {.ethernet = sp_load_le16(bytes + 12) == 1,
                                        .lid = sp_load_le16(bytes + 14),
                                        .mtu_bytes = sp_load_le32(bytes + 16),
                                        .queue_pair = sp_load_le32(bytes + 20),
                                        .packet = sp_load_le32(bytes + 24)}};
    memcpy(out->end.gid, bytes + 28, SP_IB_GID_BYTES);
    for (size_t i = 0; i < SP_QUEUES_MAX; i++) {
        out->rings[i].address = sp_load_le64(bytes + 44 + 12 * i);
        out->rings[i].rkey = sp_load_le32(bytes + 52 + 12 * i);
    }
    why_bytes = strnlen((const char *)why, SP_NN_TEXT_CAP);
    for (size_t i = 0; i < why_bytes && i < SP_NN_TEXT_CAP - 1; i++) /* the text goes to logs */
        out->why[i] = why[i] >= 32 && why[i] < 127 ? (char)why[i] : '?';
    return why_bytes < SP_NN_TEXT_CAP && out->n_queues >= 1 && out->n_queues <= SP_QUEUES_MAX &&
           out->end.queue_pair <= 0xffffff && out->end.packet <= 0xffffff &&
           (!out->usable || out->end.mtu_bytes >= 256);
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
    if (bytes < SP_NN_HEAD_BYTES || bytes > want->segment_bytes || bytes % 16 != 0)
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
    if (bytes != 0 || more == 0 || *credit > want->queues[queue].n_posted + SP_NN_SEGMENTS)
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "credit %u for queue %u, with %u bytes; wanted more than %llu, at most %llu", number,
                       queue, bytes, (unsigned long long)old,
                       (unsigned long long)want->queues[queue].n_posted + SP_NN_SEGMENTS);
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
