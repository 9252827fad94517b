/* tcp_address.c - where an endpoint of transport tcp listens, and the address that it publishes. See tcp.h.
 * The address, little-endian:
 *    0 "spT1"   4 id[16]   20 host identity[44]   64 u16 port   66 u16 n
 *   68 n times: u8 family (4 or 6), IP address[16] in network order (IPv4: the first 4 bytes) */
#include "core/base/bits.h"
#include "core/base/env.h"
#include "core/base/status.h"
#include "transport/net/tcp.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#define HEAD_BYTES 68u
#define IP_BYTES 17u
/* The kernel lowers this to somaxconn. Each connection that finds the backlog full is a second late. */
#define BACKLOG 4096
_Static_assert(HEAD_BYTES + SP_TCP_IPS_MAX * IP_BYTES <= SP_ADDRESS_BYTES_MAX, "an address fits");
static const char magic[4] = {'s', 'p', 'T', '1'};

static void set_ipv4(sp_sock_address *out, const void *address, uint16_t port)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(port)};
    memcpy(&in.sin_addr, address, sizeof in.sin_addr);
    memset(out, 0, sizeof *out);
    memcpy(&out->storage, &in, sizeof in);
    out->bytes = sizeof in;
}

static void set_ipv6(sp_sock_address *out, const void *address, uint16_t port)
{
    struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    memcpy(&in6.sin6_addr, address, sizeof in6.sin6_addr);
    memset(out, 0, sizeof *out);
    memcpy(&out->storage, &in6, sizeof in6);
    out->bytes = sizeof in6;
}

/* Get the IP address, in network order, and the port. */
static void get_parts(const sp_sock_address *a, uint8_t out[16], uint16_t *port)
{
    struct sockaddr_in in;
    struct sockaddr_in6 in6;
    memset(out, 0, 16);
    if (a->storage.ss_family == AF_INET) {
        memcpy(&in, &a->storage, sizeof in);
        memcpy(out, &in.sin_addr, sizeof in.sin_addr);
        *port = ntohs(in.sin_port);
    } else {
        memcpy(&in6, &a->storage, sizeof in6);
        memcpy(out, &in6.sin6_addr, sizeof in6.sin6_addr);
        *port = ntohs(in6.sin6_port);
    }
}

static void set_port(sp_sock_address *a, uint16_t port)
{
    uint8_t raw[16];
    uint16_t old;
    get_parts(a, raw, &old);
    if (a->storage.ss_family == AF_INET)
        set_ipv4(a, raw, port);
    else
        set_ipv6(a, raw, port);
}

bool sp_tcp_is_loopback(const sp_sock_address *a)
{
    uint8_t raw[16];
    uint16_t port;
    get_parts(a, raw, &port);
    return a->storage.ss_family == AF_INET ? raw[0] == 127 : memcmp(raw, &in6addr_loopback, 16) == 0;
}

/* ---- which addresses ---- */

static bool usable(const struct ifaddrs *i)
{
    struct sockaddr_in6 in6;
    if (i->ifa_addr == NULL || (i->ifa_flags & IFF_UP) == 0 || (i->ifa_flags & IFF_RUNNING) == 0)
        return false;
    if (i->ifa_addr->sa_family == AF_INET)
        return true;
    if (i->ifa_addr->sa_family != AF_INET6)
        return false;
    memcpy(&in6, i->ifa_addr, sizeof in6);
    return !IN6_IS_ADDR_LINKLOCAL(&in6.sin6_addr); /* needs a scope, which other hosts do not know */
}

static void copy_address(sp_sock_address *out, const struct sockaddr *from)
{
    memset(out, 0, sizeof *out);
    out->bytes = from->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    memcpy(&out->storage, from, out->bytes);
}

/* List the usable IP addresses of one interface, or of all (name NULL): IPv4 before IPv6, loopback last. */
static spccl_status find_ips(const char *name, sp_tcp_address *out)
{
    static const struct {
        int family;
        bool loopback;
    } passes[] = {{AF_INET, false}, {AF_INET6, false}, {AF_INET, true}, {AF_INET6, true}};
    struct ifaddrs *all;
    out->n_ips = 0;
    if (getifaddrs(&all) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "tcp: listing this host's addresses");
    for (size_t pass = 0; pass < sizeof passes / sizeof *passes; pass++)
        for (const struct ifaddrs *i = all; i != NULL; i = i->ifa_next) {
            sp_sock_address a;
            if (!usable(i) || i->ifa_addr->sa_family != passes[pass].family ||
                (name != NULL && strcmp(name, i->ifa_name) != 0) || out->n_ips == SP_TCP_IPS_MAX)
                continue;
            copy_address(&a, i->ifa_addr);
            if (sp_tcp_is_loopback(&a) == passes[pass].loopback)
                out->ips[out->n_ips++] = a;
        }
    freeifaddrs(all);
    return SPCCL_OK;
}

/* The one IP address that SPCCL_TCP_ADDR names, directly or as an interface. */
static spccl_status find_named_ip(const char *text, sp_tcp_address *out)
{
    struct in_addr in;
    struct in6_addr in6;
    if (inet_pton(AF_INET, text, &in) == 1) {
        set_ipv4(&out->ips[0], &in, 0);
    } else if (inet_pton(AF_INET6, text, &in6) == 1) {
        set_ipv6(&out->ips[0], &in6, 0);
    } else {
        SP_TRY(find_ips(text, out));
        if (out->n_ips == 0)
            return SP_FAIL(
                SPCCL_ERR_SETTING,
                "SPCCL_TCP_ADDR=\"%s\": wanted an IPv4 or IPv6 address, or the name of an interface "
                "that is up and has one (`ip addr` lists them)",
                text);
    }
    out->n_ips = 1;
    return SPCCL_OK;
}

/* ---- listening ---- */

static bool bind_and_listen(int fd, const sp_sock_address *at)
{
    return fd >= 0 && bind(fd, (const struct sockaddr *)&at->storage, at->bytes) == 0 &&
           listen(fd, BACKLOG) == 0;
}

static int open_socket(int family)
{
    return socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}

/* Listen on every IP address. One IPv6 socket accepts IPv4 too. Without IPv6 in the kernel, IPv4 alone. */
static bool listen_everywhere(int *fd)
{
    sp_sock_address any;
    int off = 0;
    set_ipv6(&any, &in6addr_any, 0);
    *fd = open_socket(AF_INET6);
    if (*fd >= 0 && setsockopt(*fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0 &&
        bind_and_listen(*fd, &any))
        return true;
    if (*fd >= 0)
        close(*fd);
    set_ipv4(&any, &(struct in_addr){htonl(INADDR_ANY)}, 0);
    *fd = open_socket(AF_INET);
    return bind_and_listen(*fd, &any);
}

/* SPCCL_TCP_ADDR; empty: listen on every IP address. */
static const char *listen_setting(void)
{
    const char *text = sp_env_text(SP_ENV_TCP_ADDR);
    return strcmp(text, "0.0.0.0") == 0 || strcmp(text, "::") == 0 ? "" : text;
}

spccl_status sp_tcp_find_ips(sp_tcp_address *out)
{
    const char *setting = listen_setting();
    return setting[0] == '\0' ? find_ips(NULL, out) : find_named_ip(setting, out);
}

spccl_status sp_tcp_listen(struct sp_tcp *ep, int *listen_fd)
{
    const char *setting = listen_setting();
    sp_sock_address bound = {.bytes = sizeof bound.storage};
    uint8_t raw[16];
    uint16_t port;
    int fd = -1;
    bool listening;
    memcpy(ep->self.host, ep->config.host, sizeof ep->self.host);
    SP_TRY(sp_tcp_find_ips(&ep->self));
    if (ep->self.n_ips == 0)
        return SP_FAIL(SPCCL_ERR_SYSTEM, "rank %d: tcp: this host has no interface that is up",
                       ep->config.rank);
    if (setting[0] == '\0') {
        listening = listen_everywhere(&fd);
    } else {
        fd = open_socket(ep->self.ips[0].storage.ss_family);
        listening = bind_and_listen(fd, &ep->self.ips[0]);
    }
    if (!listening || getsockname(fd, (struct sockaddr *)&bound.storage, &bound.bytes) != 0) {
        spccl_status st = SP_FAIL_ERRNO(errno == EADDRNOTAVAIL ? SPCCL_ERR_SETTING : SPCCL_ERR_SYSTEM,
                                        "rank %d: tcp: listening on %s", ep->config.rank,
                                        setting[0] == '\0' ? "all addresses" : setting);
        if (fd >= 0)
            close(fd);
        return st;
    }
    get_parts(&bound, raw, &port);
    for (int i = 0; i < ep->self.n_ips; i++)
        set_port(&ep->self.ips[i], port);
    *listen_fd = fd;
    return SPCCL_OK;
}

/* ---- addresses as bytes ---- */

spccl_status sp_tcp_write_address(sp_endpoint *opaque, uint8_t *out, size_t *bytes)
{
    const sp_tcp_address *self = &sp_tcp_self(opaque)->self;
    uint16_t port = 0;
    memcpy(out, magic, sizeof magic);
    memcpy(out + 4, self->id, sizeof self->id);
    memcpy(out + 20, self->host, sizeof self->host);
    for (int i = 0; i < self->n_ips; i++) {
        uint8_t *at = out + HEAD_BYTES + (size_t)i * IP_BYTES;
        at[0] = self->ips[i].storage.ss_family == AF_INET ? 4 : 6;
        get_parts(&self->ips[i], at + 1, &port);
    }
    sp_store_le16(out + 64, port);
    sp_store_le16(out + 66, (uint16_t)self->n_ips);
    *bytes = HEAD_BYTES + (size_t)self->n_ips * IP_BYTES;
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
    out->n_ips = sp_load_le16(bytes + 66);
    if (out->n_ips == 0 || out->n_ips > SP_TCP_IPS_MAX ||
        n_bytes != HEAD_BYTES + (size_t)out->n_ips * IP_BYTES)
        return false;
    for (int i = 0; i < out->n_ips; i++) {
        const uint8_t *at = bytes + HEAD_BYTES + (size_t)i * IP_BYTES;
        if (at[0] == 4)
            set_ipv4(&out->ips[i], at + 1, port);
        else if (at[0] == 6)
            set_ipv6(&out->ips[i], at + 1, port);
        else
            return false;
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
    return sp_host_same_kernel(a->host, b->host) && a->n_ips == 1 && b->n_ips == 1 &&
           sp_tcp_is_loopback(&a->ips[0]) && sp_tcp_is_loopback(&b->ips[0]);
}

static bool has_outside(const sp_tcp_address *a, int family)
{
    for (int i = 0; i < a->n_ips; i++)
        if (a->ips[i].storage.ss_family == family && !sp_tcp_is_loopback(&a->ips[i]))
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
