/* ib_wire.h - what two ranks tell each other over transport ib: an address in the store, a connect info over the control link,
 * and the 32 bits that come with each write. The last note, FIN, is in segments.h.
 * Nothing here is trusted: each reader checks sizes and numbers. */
#ifndef SP_IB_WIRE_H
#define SP_IB_WIRE_H

#include "transport/net/ib/ib_verbs.h"
#include "transport/net/segments/segments.h"

/* The address: "spI5", u8 n_ports, u8 queue pairs per port, { u8 network (+ 128: near), gid[16] }[n_ports]. Without a usable
 * device n_ports is 0. */
enum { SP_IB_NO_DEVICE, SP_IB_INFINIBAND, SP_IB_ROCE_IPV4, SP_IB_ROCE_IPV6 };
typedef struct sp_ib_address {
    uint32_t n, n_qps; /* n_qps: SPCCL_DEBUG_IB_QPS */
    struct {
        uint8_t network, gid[SP_IB_GID_BYTES];
        bool near; /* sp_ib_device.near */
    } ports[SP_IB_RAILS_MAX];
} sp_ib_address;
uint8_t sp_ib_network(const sp_ib_device *device);
/* The GID that a port uses, by its content: its index differs from host to host. RoCE: one of type RoCE v2, and of these an
 * IPv4 address before a global IPv6 address before a link-local one. InfiniBand: the first. A zero GID is none. Returns
 * its index, or -1: there is none. */
int sp_ib_choose_gid(bool ethernet, const sp_ib_gid *table, int n);
/* Keep at most n_rails of n devices: those of the least distance, 0 or more, first. If not all are kept, ranks begin at
 * different ones of a distance, so the ranks of a host share them evenly. kept: [n_rails] indexes. Returns their number. */
int sp_ib_keep(int rank, const int *distances, int n, int n_rails, int *kept);
/* Returns its bytes. */
size_t sp_ib_write_address(const sp_ib_address *a, uint8_t *out);
/* False: not an address, or the rank has no usable device. */
bool sp_ib_read_address(const uint8_t *bytes, size_t n, sp_ib_address *out);

/* The rails of a pair of ranks: rail i joins port low[i] of the lower rank and port high[i] of the other. Each rail has
 * n_qps queue pairs: as many as the rank that wants fewer says. */
typedef struct sp_ib_pairing {
    uint32_t n, n_qps; /* n * n_qps <= SP_IB_QPS_MAX */
    uint8_t low[SP_IB_RAILS_MAX], high[SP_IB_RAILS_MAX];
} sp_ib_pairing;
/* Ports of the same kind of network are joined. If some pairs of ports are in one subnet, others are not used; and of
 * these, if some are near at both ranks, others are not used. A subnet is 24 bits of an IPv4 address, else the first 8
 * bytes of the GID. */
void sp_ib_pair(const sp_ib_address *low, const sp_ib_address *high, sp_ib_pairing *out);
/* Mbit/s of the rails of a pair. a_mbps, b_mbps: of all ports of a rank; its ports have the same rate. The order of the
 * two ranks does not matter. */
uint32_t sp_ib_rails_mbps(const sp_ib_address *a, uint32_t a_mbps, const sp_ib_address *b, uint32_t b_mbps);

/* First note over the control link: the ends of the connections, and where the receive rings are.
 *   0 "spIS"   4 u16 n_qps   6 u16 n_queues   8 u32 segment bytes   12 u32 usable queue pairs, a bit each
 *   16 { u16 ethernet, u16 lid, u32 MTU, u32 queue pair, u32 packet, gid[16] }[SP_IB_QPS_MAX]
 *   528 { u64 address, u32 rkey[SP_IB_QPS_MAX] }[SP_QUEUES_MAX]   816 why[SP_NET_TEXT_CAP] */
#define SP_IB_CONNECT_INFO_BYTES (816u + SP_NET_TEXT_CAP)
typedef struct sp_ib_connect_info {
    uint32_t n_qps, n_queues, segment_bytes, usable;
    sp_ib_end ends[SP_IB_QPS_MAX];
    struct {
        uint64_t address;
        uint32_t rkey[SP_IB_QPS_MAX];
    } rings[SP_QUEUES_MAX];
    char why[SP_NET_TEXT_CAP]; /* some are not usable: the reason */
} sp_ib_connect_info;
void sp_ib_write_connect_info(const sp_ib_connect_info *o, uint8_t out[SP_IB_CONNECT_INFO_BYTES]);
/* False: the bytes are not a connect info. */
bool sp_ib_read_connect_info(const uint8_t *bytes, size_t n, sp_ib_connect_info *out);

/* Second and third message: which queue pairs are connected, and over which the probes went both ways, a bit each
 * (sp_segments_result). */
#define SP_IB_RESULT_MAGIC 0x55497073u /* "spIU" */

/* The 32 bits of a write: kind at bit 30, queue at bit 28, and the low 28 bits of a number. */
enum sp_ib_kind {
    SP_IB_DATA,   /* a segment; its number */
    SP_IB_CREDIT, /* no bytes; segments below this number may be sent */
    SP_IB_PROBE   /* shows at start-up that the network carries writes */
};
#define SP_IB_PROBE_NUMBER 0x5a5a5a5u
uint32_t sp_ib_imm(enum sp_ib_kind kind, uint32_t queue, uint64_t number);

/* What may arrive now over one queue pair. */
typedef struct sp_ib_expected {
    uint32_t n_queues, segment_bytes;
    bool probe;
    struct {
        uint64_t next, announced;  /* the queue pair's next segment; segments below `announced` may come */
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
