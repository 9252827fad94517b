/* tcp_address.c - where an endpoint of transport tcp listens, and the address that it publishes. See tcp.h.
 * The address, little-endian:
 *    0 "spT1"   4 id[16]   20 host identity[44]   64 u16 port   66 u16 n
 *   68 n times: u8 family (4 or 6), IP address[16] in network order (IPv4: the first 4 bytes) */
#include "core/base/bits.h"
#include "core/base/env.h"
#include "core/base/status.h"
#include "transport/net/tcp/tcp.h"

#include <stdio.h>
#include <string.h>

#define HEAD_BYTES 68u
#define IP_BYTES 17u
_Static_assert(HEAD_BYTES + SP_IPS_MAX * IP_BYTES <= SP_ADDRESS_BYTES_MAX, "an address fits");
static const char magic[4] = {'s', 'p', 'T', '1'};

spccl_status sp_tcp_listen(struct sp_tcp *ep, int *listen_fd)
{
    char who[40];
    snprintf(who, sizeof who, "rank %d: tcp", ep->config.rank);
    memcpy(ep->self.host, ep->config.host, sizeof ep->self.host);
    return sp_ip_listen(who, "SPCCL_TCP_ADDR", sp_env_text(SP_ENV_TCP_ADDR), &ep->self.ips, listen_fd);
}

/* ---- addresses as bytes ---- */

spccl_status sp_tcp_write_address(sp_endpoint *opaque, uint8_t *out, size_t *bytes)
{
    const sp_tcp_address *self = &sp_tcp_self(opaque)->self;
    uint16_t port = 0;
    memcpy(out, magic, sizeof magic);
    memcpy(out + 4, self->id, sizeof self->id);
    memcpy(out + 20, self->host, sizeof self->host);
    for (int i = 0; i < self->ips.n; i++) {
        uint8_t *at = out + HEAD_BYTES + (size_t)i * IP_BYTES;
        at[0] = self->ips.at[i].storage.ss_family == AF_INET ? 4 : 6;
        sp_ip_get(&self->ips.at[i], at + 1, &port);
    }
    sp_store_le16(out + 64, port);
    sp_store_le16(out + 66, (uint16_t)self->ips.n);
    *bytes = HEAD_BYTES + (size_t)self->ips.n * IP_BYTES;
    return SPCCL_OK;
}

bool sp_tcp_parse_address(const uint8_t *bytes, size_t n_bytes, sp_tcp_address *out)
{
    uint16_t port;
    if (n_bytes < HEAD_BYTES || memcmp(bytes, magic, sizeof magic) != 0)
        return false;
    memcpy(out->id, bytes + 4, sizeof out->id);
    memcpy(out->host, bytes + 20, sizeof out->host);
    port = sp_load_le16(bytes + 64);
    out->ips.n = sp_load_le16(bytes + 66);
    if (out->ips.n == 0 || out->ips.n > SP_IPS_MAX || n_bytes != HEAD_BYTES + (size_t)out->ips.n * IP_BYTES)
        return false;
    for (int i = 0; i < out->ips.n; i++) {
        const uint8_t *at = bytes + HEAD_BYTES + (size_t)i * IP_BYTES;
        if (at[0] != 4 && at[0] != 6)
            return false;
        sp_ip_set(&out->ips.at[i], at[0] == 4 ? AF_INET : AF_INET6, at + 1, port);
    }
    return true;
}

/* ---- who can be reached ---- */

bool sp_tcp_same_host(const sp_tcp_address *a, const sp_tcp_address *b)
{
    return memcmp(a->host, b->host, sizeof a->host) == 0;
}

bool sp_tcp_only_loopback(const sp_tcp_address *a, const sp_tcp_address *b)
{
    return sp_host_same_kernel(a->host, b->host) && a->ips.n == 1 && b->ips.n == 1 &&
           sp_ip_is_loopback(&a->ips.at[0]) && sp_ip_is_loopback(&b->ips.at[0]);
}

static bool has_outside(const sp_tcp_address *a, int family)
{
    for (int i = 0; i < a->ips.n; i++)
        if (a->ips.at[i].storage.ss_family == family && !sp_ip_is_loopback(&a->ips.at[i]))
            return true;
    return false;
}

bool sp_tcp_can_reach(sp_endpoint *opaque, const uint8_t *address, size_t bytes, char *why, size_t why_cap)
{
    const sp_tcp_address *self = &sp_tcp_self(opaque)->self;
    sp_tcp_address peer;
    const char *text = "other host";
    bool yes = true;
    if (!sp_tcp_parse_address(address, bytes, &peer)) {
        text = "no tcp address";
        yes = false;
    } else if (sp_tcp_same_host(self, &peer)) {
        text = "same host";
    } else if (sp_tcp_only_loopback(self, &peer)) {
        text = "other host by name, over the loopback of SPCCL_TCP_ADDR";
    } else if (!(has_outside(self, AF_INET) && has_outside(&peer, AF_INET)) &&
               !(has_outside(self, AF_INET6) && has_outside(&peer, AF_INET6))) {
        text = "other host, and the two hosts have no IP version in common outside loopback";
        yes = false;
    }
    snprintf(why, why_cap, "%s", text);
    return yes;
}

void sp_tcp_describe(sp_endpoint *opaque, int peer, char *out, size_t cap)
{
    char mine[SP_SOCK_TEXT_CAP], theirs[SP_SOCK_TEXT_CAP];
    size_t used = strlen(out);
    sp_sock_ip_texts(sp_tcp_self(opaque)->peers[peer].control, mine, theirs, sizeof mine);
    snprintf(out + used, cap - used, " (%s to %s)", mine, theirs);
}

void sp_tcp_local_ip(sp_endpoint *opaque, int peer, char *out, size_t cap)
{
    const struct sp_tcp_peer *p = &sp_tcp_self(opaque)->peers[peer];
    char mine[SP_SOCK_TEXT_CAP], theirs[SP_SOCK_TEXT_CAP];
    sp_sock_ip_texts(p->control, mine, theirs, sizeof mine);
    snprintf(out, cap, "%s", p->use_loopback ? "" : mine);
}
