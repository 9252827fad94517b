/* link_rate.h - when the rates of two transports change the order in which a pair of ranks tries them.
 *
 * A rate is what a rank published: Mbit/s of its network cards, 0 if unknown. The rate of a pair is the smaller one of its
 * two ranks, or what the transport says of this pair (pair_mbps in transport.h). A transport that is later in the order is
 * taken if both rates are known and its rate is more than twice that of the one before. Two times is not enough: a bond of
 * two ports has twice the rate of one port, and RDMA over one port costs less CPU time than TCP over both. */
#ifndef SP_LINK_RATE_H
#define SP_LINK_RATE_H

#include <stdbool.h>
#include <stdint.h>

#define SP_RATE_FACTOR 2u

/* 0 if one of the two is unknown. */
static inline uint32_t sp_rate_of_pair(uint32_t mine_mbps, uint32_t theirs_mbps)
{
    return mine_mbps < theirs_mbps ? mine_mbps : theirs_mbps;
}

static inline bool sp_rate_wins(uint32_t later_mbps, uint32_t earlier_mbps)
{
    return earlier_mbps != 0 && later_mbps > (uint64_t)earlier_mbps * SP_RATE_FACTOR;
}

/* Choose among the transports that reach a peer: pair_mbps[i] is the rate of number i in the order. */
static inline int sp_rate_choose(const uint32_t *pair_mbps, int n, bool rates_decide)
{
    int best = 0;
    for (int i = 1; i < n && rates_decide; i++)
        if (sp_rate_wins(pair_mbps[i], pair_mbps[best]))
            best = i;
    return best;
}

#endif
