/* plugin_wire.h - what two ranks tell each other so that transport ncclnet can start and end: an address in the
 * store, and two notes over the control link; the last one, FIN, is in segments.h. All are little-endian.
 * Nothing here is trusted: each reader checks sizes, numbers and texts. */
#ifndef SP_PLUGIN_WIRE_H
#define SP_PLUGIN_WIRE_H

#include "core/contract/transport.h"
#include "transport/net/plugin/plugin_abi.h"
#include "transport/net/segments/segments.h"

/* The address: "spN2". Without a plugin it has no bytes. */
/* First message: what came of loading the plugin, and where the queues listen.
 *   0 "spNO"   4 u16 usable   6 u16 n_queues   8 u32 segment bytes   12 name[40]   52 why[200]
 *   252 handles[SP_QUEUES_MAX][128]   764 u32 plugin's Mbit/s   768 u32 tcp's Mbit/s   772 u32 rates decide */
#define SP_PLUGIN_CONNECT_INFO_BYTES (264u + SP_QUEUES_MAX * SP_PLUGIN_HANDLE_BYTES)
typedef struct sp_plugin_connect_info {
    bool usable;
    uint32_t n_queues, segment_bytes;
    char name[SP_PLUGIN_NAME_CAP];
    char why[SP_NET_TEXT_CAP]; /* not usable: the reason */
    uint8_t handles[SP_QUEUES_MAX][SP_PLUGIN_HANDLE_BYTES];
    uint32_t plugin_mbps, tcp_mbps; /* rates of the devices that it uses, and of tcp; 0: unknown */
    bool rates_decide;              /* sp_endpoint_config.rates_decide */
} sp_plugin_connect_info;

/* Second message: whether all queues are connected, 1 or 0 (sp_segments_result). */
#define SP_PLUGIN_RESULT_MAGIC 0x564e7073u /* "spNV" */

/* Returns its bytes. */
size_t sp_plugin_write_address(uint8_t *out);
/* False: not an address, or the rank has no plugin. */
bool sp_plugin_is_address(const uint8_t *bytes, size_t n);
void sp_plugin_write_connect_info(const sp_plugin_connect_info *o, uint8_t out[SP_PLUGIN_CONNECT_INFO_BYTES]);
/* False: the bytes are not a connect info. */
bool sp_plugin_read_connect_info(const uint8_t *bytes, size_t n, sp_plugin_connect_info *out);

#endif
