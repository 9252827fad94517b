/* boot_links.h - the second part of start-up: choose a transport for each pair of ranks, and connect.
 *
 * A rank puts this into the store under "spccl/<name>/address/<rank>" (little-endian):
 *   u32 magic, u32 wire version, u32 world size, u32 slice bytes, u32 number of transports, u8 host[44],
 *   u32 schedule, u32 whether rates may change the order, u64 hash of the plan file,
 *   u64[3] hashes of the profile (sp_profile_hash), u32 what is forced (SP_BOOT_FORCES_*), then for each transport
 *   u32 name bytes, name, u32 rate in Mbit/s (0: unknown), u32 address bytes, address */
#ifndef SP_BOOT_LINKS_H
#define SP_BOOT_LINKS_H

#include "core/run/boot.h"

#define SP_BOOT_HOST_AT 20u
#define SP_BOOT_SCHEDULE_AT (SP_BOOT_HOST_AT + SP_HOST_ID_BYTES)
#define SP_BOOT_RATES_AT (SP_BOOT_SCHEDULE_AT + 4u)
#define SP_BOOT_PLANS_AT (SP_BOOT_RATES_AT + 4u)
#define SP_BOOT_PROFILE_AT (SP_BOOT_PLANS_AT + 8u)
#define SP_BOOT_FORCED_AT (SP_BOOT_PROFILE_AT + 8u * SP_PROFILE_HASHES)
#define SP_BOOT_HEAD_BYTES (SP_BOOT_FORCED_AT + 4u)
#define SP_BOOT_BLOB_CAP (SP_BOOT_HEAD_BYTES + SP_TRANSPORTS_MAX * (12u + 16u + SP_ADDRESS_BYTES_MAX))

/* What one rank published. */
typedef struct sp_published {
    size_t bytes;
    uint8_t blob[SP_BOOT_BLOB_CAP];
} sp_published;

/* A transport in what a rank published. Zeros: there is none. */
typedef struct sp_published_transport {
    int position; /* in that rank's order */
    uint32_t mbps;
    const uint8_t *address; /* in the blob */
    size_t address_bytes;
} sp_published_transport;

/* Check what rank `peer` published. Errors: MISMATCH (another version, or other settings: such ranks would wait for each
 * other for ever), PEER (it cannot join, and says why). (boot.c) */
spccl_status sp_published_check(const sp_boot_config *c, int peer, const sp_published *p);
/* Find a transport by its name. The blob has been checked; nothing behind its head is trusted. False: the rank
 * does not offer it, or the bytes end too early. */
bool sp_published_find(const sp_published *p, const char *name, sp_published_transport *out);

/* Does endpoint i reach a peer? its: the address there. control: that of its control link, which some endpoints need.
 * `why` as of can_reach. (links.c) */
bool sp_links_reach(const sp_links *links, int i, const sp_published_transport *its,
                    const sp_published_transport *control, char *why, size_t cap);
/* Use it. (links.c) */
spccl_status sp_links_add_peer(sp_links *links, int peer, int i, const sp_published_transport *its,
                               const sp_published_transport *control);

/* Choose the transport of each link, connect, and close the endpoints that no link uses. If a transport fails for a pair,
 * the next one is tried, or its control link carries the pair. all: [world_size], this rank's entry is not used. Errors: UNREACHABLE,
 * TIMEOUT, AUTH, and those of the transports. */
spccl_status sp_boot_connect(sp_links *links, const sp_boot_config *c, const sp_published *all);

#endif
