/* tcp_rate.c - the rate of the network interface that transport tcp uses, and what `spccl info` says of it. See tcp.h. */
#include "core/base/env.h"
#include "transport/net/tcp/tcp.h"

#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>

/* The rate that the driver gives, as in /sys/class/net/NAME/speed. That file is not there in a network namespace whose
 * /sys is another's, so the driver is asked. 0: unknown, as of loopback and of most virtual cards. */
static uint32_t rate_of_interface(const char *name)
{
    struct ethtool_cmd command = {.cmd = ETHTOOL_GSET};
    struct ifreq request;
    uint32_t mbps = 0;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    memset(&request, 0, sizeof request);
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    request.ifr_data = (char *)&command;
    if (fd >= 0 && ioctl(fd, SIOCETHTOOL, &request) == 0)
        mbps = (uint32_t)command.speed_hi << 16 | command.speed;
    sp_sock_close(&fd);
    /* 16 or 32 bits of ones: the driver does not know */
    return mbps == (uint32_t)SPEED_UNKNOWN || mbps == UINT16_MAX ? 0 : mbps;
}

/* Peers try the addresses in order, so the interface of the first one counts. */
uint32_t sp_tcp_rate_mbps(sp_endpoint *opaque)
{
    const struct sp_tcp *ep = sp_tcp_self(opaque);
    char name[IF_NAMESIZE];
    if (ep->self.ips.n == 0 || sp_ip_is_loopback(&ep->self.ips.at[0]) ||
        !sp_ip_interface(&ep->self.ips.at[0], name))
        return 0;
    return rate_of_interface(name);
}

/* ---- spccl info ---- */

static char why_text[160];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void write_rate_text(void)
{
    sp_ips ips;
    char name[IF_NAMESIZE], rate[40] = "rate unknown";
    uint32_t mbps = 0;
    int used;
    used =
        snprintf(why_text, sizeof why_text, "any other pair of ranks; SPCCL_TCP_ADDR chooses the interface");
    if (sp_ip_find("SPCCL_TCP_ADDR", sp_env_text(SP_ENV_TCP_ADDR), &ips) != SPCCL_OK || ips.n == 0 ||
        !sp_ip_interface(&ips.at[0], name))
        return;
    mbps = sp_ip_is_loopback(&ips.at[0]) ? 0 : rate_of_interface(name);
    if (mbps != 0)
        snprintf(rate, sizeof rate, "%.1f Gbit/s", mbps / 1e3);
    snprintf(why_text + used, sizeof why_text - (size_t)used, "; %s: %s", name, rate);
}

void sp_tcp_inform(const char **value, const char **why)
{
    pthread_once(&once, write_rate_text);
    *value = "in";
    *why = why_text;
}
