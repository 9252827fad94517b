/* plugin_wire.c - see plugin_wire.h. */
#include "transport/net/plugin/plugin_wire.h"

#include "core/base/bits.h"

#include <string.h>

#define CONNECT_INFO_MAGIC 0x4f4e7073u /* "spNO" */
#define RATES_AT (252u + SP_QUEUES_MAX * SP_PLUGIN_HANDLE_BYTES)
static const char address_magic[4] = {'s', 'p', 'N', '2'};

size_t sp_plugin_write_address(uint8_t *out)
{
    memcpy(out, address_magic, sizeof address_magic);
    return sizeof address_magic;
}

bool sp_plugin_is_address(const uint8_t *bytes, size_t n)
{
    return n == sizeof address_magic && memcmp(bytes, address_magic, n) == 0;
}

void sp_plugin_write_connect_info(const sp_plugin_connect_info *o, uint8_t out[SP_PLUGIN_CONNECT_INFO_BYTES])
{
    sp_store_le32(out, CONNECT_INFO_MAGIC);
    sp_store_le16(out + 4, o->usable ? 1 : 0);
    sp_store_le16(out + 6, (uint16_t)o->n_queues);
    sp_store_le32(out + 8, o->segment_bytes);
    sp_segments_write_text(o->name, out + 12, SP_PLUGIN_NAME_CAP);
    sp_segments_write_text(o->why, out + 52, SP_NET_TEXT_CAP);
    if (o->usable) /* else a thread that was given up may still write to them */
        memcpy(out + 252, o->handles, sizeof o->handles);
    else
        memset(out + 252, 0, sizeof o->handles);
    sp_store_le32(out + RATES_AT, o->plugin_mbps);
    sp_store_le32(out + RATES_AT + 4, o->tcp_mbps);
    sp_store_le32(out + RATES_AT + 8, o->rates_decide ? 1 : 0);
}

bool sp_plugin_read_connect_info(const uint8_t *bytes, size_t n, sp_plugin_connect_info *out)
{
    if (n != SP_PLUGIN_CONNECT_INFO_BYTES || sp_load_le32(bytes) != CONNECT_INFO_MAGIC ||
        sp_load_le16(bytes + 4) > 1 || sp_load_le32(bytes + RATES_AT + 8) > 1)
        return false;
    out->usable = sp_load_le16(bytes + 4) == 1;
    out->n_queues = sp_load_le16(bytes + 6);
    out->segment_bytes = sp_load_le32(bytes + 8);
    out->plugin_mbps = sp_load_le32(bytes + RATES_AT);
    out->tcp_mbps = sp_load_le32(bytes + RATES_AT + 4);
    out->rates_decide = sp_load_le32(bytes + RATES_AT + 8) == 1;
    memset(out->handles, 0, sizeof out->handles);
    if (out->usable)
        memcpy(out->handles, bytes + 252, sizeof out->handles);
    return out->n_queues >= 1 && out->n_queues <= SP_QUEUES_MAX &&
           sp_segments_read_text(bytes + 12, out->name, SP_PLUGIN_NAME_CAP) &&
           sp_segments_read_text(bytes + 52, out->why, SP_NET_TEXT_CAP);
}
