/* rendezvous_wire.h - bytes of the unique id, and of the messages between the rendezvous server and a client.
 *
 * The unique id, 128 bytes:
 *     0  u32          "SPID"
 *     4  u32          version
 *     8  u16          port
 *    10  u8           number of addresses
 *    11  u8           zero
 *    12  16 bytes     id of the endpoint
 *    28  32 bytes     secret
 *    60  64 bytes     addresses: u8 family (4 or 6), then 4 or 16 bytes in network order; the rest is zero
 *   124  u32          checksum: FNV-1a of bytes 0 to 123
 *
 * After the handshake:
 *   client -> server   u32 op (1 set, 2 get, 3 done), u32 key bytes, u32 data bytes, u32 timeout in ms,
 *                      key, data
 *   server -> client   i32 status, u32 data bytes, data
 * "done" says that this client's rank is in its group; its data is u32 world size. */
#ifndef SP_RENDEZVOUS_WIRE_H
#define SP_RENDEZVOUS_WIRE_H

#include "core/base/bits.h"
#include "spccl.h"

#define SP_RDV_ID_MAGIC 0x44495053u /* "SPID" */
#define SP_RDV_ID_VERSION 2u
#define SP_RDV_NAME_AT 12u
#define SP_RDV_SECRET_AT 28u
#define SP_RDV_IPS_AT 60u
#define SP_RDV_CHECKSUM_AT 124u
#define SP_RDV_REQUEST_BYTES 16u
#define SP_RDV_REPLY_BYTES 8u
#define SP_RDV_KEY_MAX 255u
#define SP_RDV_DATA_MAX 65536u
enum { SP_RDV_SET = 1, SP_RDV_GET = 2, SP_RDV_DONE = 3 };

static inline uint32_t sp_rdv_checksum(const char *id)
{
    uint32_t h = 0x811c9dc5u;
    for (size_t i = 0; i < SP_RDV_CHECKSUM_AT; i++)
        h = (h ^ (uint8_t)id[i]) * 0x01000193u;
    return h;
}

#endif
