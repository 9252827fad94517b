/* ib_address.c - what an endpoint of transport ib publishes, whom it reaches and over which rails. See ib.h. */
#include "transport/net/ib/ib.h"

#include <stdio.h>
#include <string.h>

/* Of all devices together. */
uint32_t sp_ib_rate_mbps(sp_endpoint *opaque)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    uint32_t mbps = 0;
    for (int i = 0; i < ep->n_devices; i++)
        mbps += (uint32_t)ep->devices[i].speed_mbps;
    return mbps;
}

/* Of the devices that the rails of the pair join. */
uint32_t sp_ib_pair_mbps(sp_endpoint *opaque, const uint8_t *address, size_t bytes, uint32_t its_mbps)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    sp_ib_address theirs;
    if (ep->n_devices == 0 || !sp_ib_read_address(address, bytes, &theirs))
        return 0;
    return sp_ib_rails_mbps(&ep->address, sp_ib_rate_mbps(opaque), &theirs, its_mbps);
}

size_t sp_ib_write_own(const sp_segments *base, uint8_t *out)
{
    return sp_ib_write_address(&((const struct sp_ib *)base)->address, out);
}

/* "device rxe0 port 1 + device rxe2 port 1, 4 queue pairs" */
static void rails_text(const struct sp_ib *ep, const struct sp_ib_peer *p, char *out, size_t cap)
{
    size_t used = 0;
    uint32_t n_devices = 0;
    for (uint32_t i = 0; i < p->n_qps && used < cap; i++) {
        char device[SP_IB_NAME_CAP + 24];
        if (i != 0 && p->qps[i].device == p->qps[i - 1].device)
            continue;
        sp_ib_device_text(&ep->devices[p->qps[i].device], device, sizeof device);
        used += (size_t)snprintf(out + used, cap - used, "%s%s", i == 0 ? "" : " + ", device);
        n_devices++;
    }
    if (p->n_qps > n_devices && used < cap)
        snprintf(out + used, cap - used, ", %u queue pairs", p->n_qps);
}

bool sp_ib_reach(const sp_segments *base, const uint8_t *address, size_t bytes, char *why, size_t why_cap)
{
    static const char *const names[] = {"none", "InfiniBand", "RoCE with IPv4", "RoCE with IPv6"};
    const struct sp_ib *ep = (const struct sp_ib *)base;
    sp_ib_address theirs;
    sp_ib_pairing pairing;
    if (ep->n_devices == 0) {
        snprintf(why, why_cap, "%s", ep->device_why);
    } else if (!sp_ib_read_address(address, bytes, &theirs)) {
        snprintf(why, why_cap, "the peer has no usable device");
    } else {
        sp_ib_pair(&ep->address, &theirs, &pairing);
        if (pairing.n != 0) {
            sp_ib_device_text(&ep->devices[pairing.low[0]], why, why_cap);
            return true;
        }
        snprintf(why, why_cap, "other networks: %s here, %s there", names[sp_ib_network(&ep->devices[0])],
                 names[theirs.ports[0].network]);
    }
    return false;
}

void sp_ib_add_peer(sp_segments *base, int peer, const uint8_t *address, size_t bytes)
{
    struct sp_ib *ep = sp_ib_of(base);
    struct sp_ib_peer *p = &ep->peers[peer];
    bool is_low = base->config.rank < peer;
    sp_ib_address theirs;
    sp_ib_pairing pairing;
    (void)sp_ib_read_address(address, bytes, &theirs);
    sp_ib_pair(is_low ? &ep->address : &theirs, is_low ? &theirs : &ep->address, &pairing);
    p->n_qps = pairing.n * pairing.n_qps;
    p->n_ports = theirs.n;
    for (uint32_t i = 0; i < p->n_qps; i++) {
        uint32_t rail = i / pairing.n_qps;
        p->qps[i].device = is_low ? pairing.low[rail] : pairing.high[rail];
        p->qps[i].their_device = is_low ? pairing.high[rail] : pairing.low[rail];
    }
}

void sp_ib_describe(sp_segments *base, int peer, char *out, size_t cap)
{
    struct sp_ib *ep = sp_ib_of(base);
    const struct sp_ib_peer *p = &ep->peers[peer];
    char devices[SP_IB_RAILS_MAX * (SP_IB_NAME_CAP + 28) + 20] = "", details[160];
    rails_text(ep, p, devices, sizeof devices);
    sp_ib_device_details(&ep->devices[p->qps[0].device], details, sizeof details);
    snprintf(out, cap, "ib: %s, %s (%s)", devices, details, ep->device_why);
}
