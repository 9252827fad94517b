/* ib_wire.h - what two ranks tell each other over transport ib: an address in the store, a connect info over the tcp link,
 * and the 32 bits that come with each write. The other notes over the tcp link are those of ncclnet (ncclnet_wire.h).
 * Nothing here is trusted: each reader checks sizes and numbers. */
#ifndef SP_IB_WIRE_H
#define SP_IB_WIRE_H

#include "transport/net/ib_verbs.h"
#include "transport/net/ncclnet_ring.h"
#include "transport/net/ncclnet_wire.h"

/* The address: "spI1", u8 network, then the address of the tcp endpoint. Network 0: no usable device; nothing follows. */
#define SP_IB_ADDRESS_HEAD 5u
enum { SP_IB_NO_DEVICE, SP_IB_INFINIBAND, SP_IB_ROCE_IPV4, SP_IB_ROCE_IPV6 };
uint8_t sp_ib_network(const sp_ib_device *device);
void sp_ib_write_address(uint8_t network, uint8_t out[SP_IB_ADDRESS_HEAD]);
/* False: not an address, or the rank has no usable device. */
bool sp_ib_read_address(const uint8_t *bytes, size_t n, uint8_t *network, const uint8_t **tcp,
                        size_t *tcp_bytes);

/* First note over the tcp link: the end of the connection, and where the receive rings are.
 *   0 "spIO"   4 u16 usable   6 u16 n_queues   8 u32 segment bytes   12 u16 ethernet   14 u16 lid   16 u32 MTU
 *   20 u32 queue pair   24 u32 packet   28 gid[16]   44 { u64 address, u32 rkey }[SP_QUEUES_MAX]
 *   92 why[SP_NN_TEXT_CAP] */
#define SP_IB_CONNECT_INFO_BYTES (44u + 12u * SP_QUEUES_MAX + SP_NN_TEXT_CAP)
typedef struct sp_ib_connect_info {
    bool usable;
    uint32_t n_queues, segment_bytes;
    sp_ib_end end;
    struct {
        uint64_t address;
        uint32_t rkey;
    } rings[SP_QUEUES_MAX];
    char why[SP_NN_TEXT_CAP]; /* not usable: the reason */
} sp_ib_connect_info;
void sp_ib_write_connect_info(const sp_ib_connect_info *o, uint8_t out[SP_IB_CONNECT_INFO_BYTES]);
/* False: the bytes are not a connect info. */
bool sp_ib_read_connect_info(const uint8_t *bytes, size_t n, sp_ib_connect_info *out);

/* The 32 bits of a write: kind at bit 30, queue at bit 28, and the low 28 bits of a number. */
enum sp_ib_kind {
    SP_IB_DATA,   /* a segment; its number */
    SP_IB_CREDIT, /* no bytes; segments below this number may be sent */
    SP_IB_PROBE   /* shows at start-up that the network carries writes */
};
#define SP_IB_PROBE_NUMBER 0x5a5a5a5u
uint32_t sp_ib_imm(enum sp_ib_kind kind, uint32_t queue, uint64_t number);

/* What may arrive now on one connection. */
typedef struct sp_ib_expected {
    uint32_t n_queues, segment_bytes;
    bool probe;
    struct {
        uint64_t next, announced;  /* the next segment; segments below `announced` may come */
        uint64_t credit, n_posted; /* of the other direction: the last credit, and segments sent */
    } queues[SP_QUEUES_MAX];
} sp_ib_expected;
typedef struct sp_ib_arrival {
    enum sp_ib_kind kind;
    uint32_t queue;
    uint64_t credit; /* SP_IB_CREDIT */
} sp_ib_arrival;
/* Check what came with a write of `bytes` bytes. Errors: FORMAT (the text is a clause). */
spccl_status sp_ib_read_imm(const sp_ib_expected *want, uint32_t imm, uint32_t bytes, sp_ib_arrival *out);

#endif
