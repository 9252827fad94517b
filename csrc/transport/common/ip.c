/* ip.c - see ip.h. */
#include "transport/common/ip.h"

#include "core/base/status.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

/* The kernel lowers this to somaxconn. Each connection that finds the backlog full is a second late. */
#define BACKLOG 4096

void sp_ip_set(sp_sock_address *out, int family, const void *ip, uint16_t port)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    memset(out, 0, sizeof *out);
    if (family == AF_INET) {
        memcpy(&in.sin_addr, ip, sizeof in.sin_addr);
        memcpy(&out->storage, &in, sizeof in);
        out->bytes = sizeof in;
    } else {
        memcpy(&in6.sin6_addr, ip, sizeof in6.sin6_addr);
        memcpy(&out->storage, &in6, sizeof in6);
        out->bytes = sizeof in6;
    }
}

void sp_ip_get(const sp_sock_address *a, uint8_t out[16], uint16_t *port)
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

bool sp_ip_is_loopback(const sp_sock_address *a)
{
    uint8_t raw[16];
    uint16_t port;
    sp_ip_get(a, raw, &port);
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

bool sp_ip_interface(const sp_sock_address *ip, char *name)
{
    struct ifaddrs *all;
    sp_sock_address a;
    uint8_t wanted[16], raw[16];
    uint16_t port;
    bool found = false;
    sp_ip_get(ip, wanted, &port);
    if (getifaddrs(&all) != 0)
        return false;
    for (const struct ifaddrs *i = all; i != NULL && !found; i = i->ifa_next) {
        if (i->ifa_addr == NULL || i->ifa_addr->sa_family != ip->storage.ss_family)
            continue;
        copy_address(&a, i->ifa_addr);
        sp_ip_get(&a, raw, &port);
        found = memcmp(raw, wanted, sizeof raw) == 0;
        if (found)
            snprintf(name, IF_NAMESIZE, "%s", i->ifa_name);
    }
    freeifaddrs(all);
    return found;
}

/* List the usable IP addresses of one interface, or of all (name NULL): IPv4 before IPv6, loopback last. */
static spccl_status find_ips(const char *name, sp_ips *out)
{
    static const struct {
        int family;
        bool loopback;
    } passes[] = {{AF_INET, false}, {AF_INET6, false}, {AF_INET, true}, {AF_INET6, true}};
    struct ifaddrs *all;
    out->n = 0;
    if (getifaddrs(&all) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "listing this host's addresses");
    for (size_t pass = 0; pass < sizeof passes / sizeof *passes; pass++)
        for (const struct ifaddrs *i = all; i != NULL; i = i->ifa_next) {
            sp_sock_address a;
            if (!usable(i) || i->ifa_addr->sa_family != passes[pass].family ||
                (name != NULL && strcmp(name, i->ifa_name) != 0) || out->n == SP_IPS_MAX)
                continue;
            copy_address(&a, i->ifa_addr);
            if (sp_ip_is_loopback(&a) == passes[pass].loopback)
                out->at[out->n++] = a;
        }
    freeifaddrs(all);
    return SPCCL_OK;
}

static bool is_any(const char *text)
{
    return text[0] == '\0' || strcmp(text, "0.0.0.0") == 0 || strcmp(text, "::") == 0;
}

spccl_status sp_ip_find(const char *name, const char *text, sp_ips *out)
{
    uint8_t ip[16];
    if (is_any(text))
        return find_ips(NULL, out);
    if (inet_pton(AF_INET, text, ip) == 1) {
        sp_ip_set(&out->at[0], AF_INET, ip, 0);
    } else if (inet_pton(AF_INET6, text, ip) == 1) {
        sp_ip_set(&out->at[0], AF_INET6, ip, 0);
    } else {
        SP_TRY(find_ips(text, out));
        if (out->n == 0)
            return SP_FAIL(SPCCL_ERR_SETTING,
                           "%s=\"%s\": wanted an IPv4 or IPv6 address, or the name of an interface that is "
                           "up and has one (`ip addr` lists them)",
                           name, text);
    }
    out->n = 1;
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
    sp_ip_set(&any, AF_INET6, &in6addr_any, 0);
    *fd = open_socket(AF_INET6);
    if (*fd >= 0 && setsockopt(*fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0 &&
        bind_and_listen(*fd, &any))
        return true;
    sp_sock_close(fd);
    sp_ip_set(&any, AF_INET, &(struct in_addr){htonl(INADDR_ANY)}, 0);
    *fd = open_socket(AF_INET);
    return bind_and_listen(*fd, &any);
}

spccl_status sp_ip_listen(const char *who, const char *name, const char *text, sp_ips *out, int *listen_fd)
{
    const bool any = is_any(text);
    sp_sock_address bound = {.bytes = sizeof bound.storage};
    uint8_t raw[16];
    uint16_t port;
    int fd = -1;
    bool listening;
    SP_TRY(sp_ip_find(name, text, out));
    if (out->n == 0)
        return SP_FAIL(SPCCL_ERR_SYSTEM, "%s: this host has no interface that is up", who);
    if (any) {
        listening = listen_everywhere(&fd);
    } else {
        fd = open_socket(out->at[0].storage.ss_family);
        listening = bind_and_listen(fd, &out->at[0]);
    }
    if (!listening || getsockname(fd, (struct sockaddr *)&bound.storage, &bound.bytes) != 0) {
        spccl_status st = SP_FAIL_ERRNO(errno == EADDRNOTAVAIL ? SPCCL_ERR_SETTING : SPCCL_ERR_SYSTEM,
                                        "%s: listening on %s (%s)", who, any ? "all addresses" : text, name);
        sp_sock_close(&fd);
        return st;
    }
    sp_ip_get(&bound, raw, &port);
    for (int i = 0; i < out->n; i++) {
        uint16_t none;
        sp_ip_get(&out->at[i], raw, &none);
        sp_ip_set(&out->at[i], out->at[i].storage.ss_family, raw, port);
    }
    *listen_fd = fd;
    return SPCCL_OK;
}
