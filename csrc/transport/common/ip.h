/* ip.h - the IP addresses of this host that a setting allows, and a socket that listens on them. */
#ifndef SP_IP_H
#define SP_IP_H

#include "transport/common/sock.h"

#include <stdint.h>

#define SP_IPS_MAX 16 /* addresses of one list */

/* IP addresses with one port. IPv4 comes before IPv6, loopback last. */
typedef struct sp_ips {
    int n;
    sp_sock_address at[SP_IPS_MAX];
} sp_ips;

/* Make an address of an IP address in network order: 4 bytes of AF_INET, 16 of AF_INET6. */
void sp_ip_set(sp_sock_address *out, int family, const void *ip, uint16_t port);
/* Get the IP address in network order, with zeros behind the 4 bytes of AF_INET, and the port. */
void sp_ip_get(const sp_sock_address *a, uint8_t out[16], uint16_t *port);
bool sp_ip_is_loopback(const sp_sock_address *a);
/* The interface of this host that has the IP address, IF_NAMESIZE bytes. False: none has. */
bool sp_ip_interface(const sp_sock_address *ip, char *name);

/* List the IP addresses that a setting, an address or an interface, allows. Empty, 0.0.0.0 and ::: all addresses of all
 * interfaces that are up, without link-local ones. `out` may stay empty.
 *   name, text   of the setting: "SPCCL_TCP_ADDR", "eth0"
 * Errors: SETTING (neither an address nor an interface), SYSTEM. */
spccl_status sp_ip_find(const char *name, const char *text, sp_ips *out);
/* Listen on the addresses that the setting allows. `out` gets them with the port that the system chose.
 *   who   for error texts: "rank 3: tcp"
 * Errors: SETTING (also: an address that is not this host's), SYSTEM (also: no interface is up). */
spccl_status sp_ip_listen(const char *who, const char *name, const char *text, sp_ips *out, int *listen_fd);

#endif
