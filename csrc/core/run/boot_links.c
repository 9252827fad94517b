/* boot_links.c - see boot_links.h. */
#include "core/run/boot_links.h"

#include "core/base/bits.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/base/rank_list.h"
#include "core/contract/link_rate.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* A transport that both ranks offer and that reaches the peer. */
struct candidate {
    int i;                       /* in sp_links.transports */
    sp_published_transport peer; /* position: in the order of the lower rank; mbps: of the pair */
    char why[256];
};

/* The transport that a pair takes if that of its link fails at start-up. ep NULL: there is none. */
struct next {
    const sp_transport *transport;
    sp_endpoint *ep;
    const uint8_t *address;
    size_t address_bytes;
    const sp_transport *failed; /* NULL: the link has kept its transport */
    char why[200];              /* it failed */
    bool waits;                 /* the link's endpoint is itself a next one of other pairs */
};

/* ---- what a peer published ---- */

bool sp_published_find(const sp_published *p, const char *name, sp_published_transport *out)
{
    uint32_t n = sp_load_le32(p->blob + 16);
    size_t at = SP_BOOT_HEAD_BYTES, name_bytes = strlen(name);
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *its_name;
        size_t its_name_bytes, its_bytes;
        if (p->bytes - at < 4 || (its_name_bytes = sp_load_le32(p->blob + at)) > p->bytes - at - 4)
            return false;
        its_name = p->blob + at + 4;
        at += 4 + its_name_bytes;
        if (p->bytes - at < 8 || (its_bytes = sp_load_le32(p->blob + at + 4)) > p->bytes - at - 8)
            return false;
        at += 8;
        if (its_name_bytes == name_bytes && memcmp(its_name, name, name_bytes) == 0) {
            *out = (sp_published_transport){.position = (int)i,
                                            .mbps = sp_load_le32(p->blob + at - 8),
                                            .address = p->blob + at,
                                            .address_bytes = its_bytes};
            return true;
        }
        at += its_bytes;
    }
    return false;
}

/* ---- choosing ---- */

static uint32_t pair_mbps(const sp_links *links, const struct candidate *c)
{
    const sp_transport *t = links->transports[c->i];
    if (t->pair_mbps != NULL)
        return t->pair_mbps(links->endpoints[c->i], c->peer.address, c->peer.address_bytes, c->peer.mbps);
    return sp_rate_of_pair(c->peer.mbps, links->rates_mbps[c->i]);
}

/* Find the transports that both ranks offer and that reach the peer, in the order of the lower rank. `tried` gets why the
 * others do not. Returns their number. */
static int find_candidates(const sp_links *links, int peer, const sp_published *p,
                           const sp_published_transport *control, struct candidate *out, char tried[600])
{
    int n = 0;
    for (int i = 0; i < links->n_endpoints; i++) {
        const sp_transport *t = links->transports[i];
        struct candidate c = {.i = i};
        size_t used = strlen(tried);
        int at = n;
        if (links->endpoints[i] == links->tcp && !links->tcp_too)
            continue;
        if (!sp_published_find(p, t->name, &c.peer)) {
            snprintf(tried + used, 600 - used, "%s%s: the peer does not offer it", used != 0 ? "; " : "",
                     t->name);
            continue;
        }
        if (!sp_links_reach(links, i, &c.peer, control, c.why, sizeof c.why)) {
            snprintf(tried + used, 600 - used, "%s%s: %s", used != 0 ? "; " : "", t->name, c.why);
            continue;
        }
        c.peer.mbps = pair_mbps(links, &c); /* the peer computes the same */
        if (links->rank < peer)
            c.peer.position = i;
        for (; at > 0 && out[at - 1].peer.position > c.peer.position; at--)
            out[at] = out[at - 1];
        out[at] = c;
        n++;
    }
    return n;
}

static int order_of(const sp_transport *t)
{
    int i = 0;
    while (sp_transports[i] != t)
        i++;
    return i;
}

/* The next one after found[best]. The control link is none: it is there. Of two transports that may fail for single pairs
 * the later one of sp_transports is the next one, so no two wait for each other. */
static void find_next(const sp_links *links, int peer, const struct candidate *found, int n, int best,
                      struct next *next)
{
    const sp_transport *its = links->peers[peer].transport;
    for (int k = best + 1; its->failed != NULL && k < n; k++) {
        const sp_transport *t = links->transports[found[k].i];
        if (links->endpoints[found[k].i] == links->tcp && sp_has_control(its, links->peers[peer].ep))
            return;
        if (t->failed != NULL && order_of(t) < order_of(its))
            continue;
        *next = (struct next){.transport = t,
                              .ep = links->endpoints[found[k].i],
                              .address = found[k].peer.address,
                              .address_bytes = found[k].peer.address_bytes};
        return;
    }
}

/* Choose the transport of a pair: the first in the order of the lower rank, unless rates change that order. Both ends
 * know the same facts, so both choose the same one even if their settings differ. */
static spccl_status pick(sp_links *links, const sp_boot_config *c, int peer, const sp_published *p,
                         struct next *next)
{
    struct candidate found[SP_TRANSPORTS_MAX];
    sp_published_transport control;
    uint32_t mbps[SP_TRANSPORTS_MAX];
    char tried[600] = "", faster[64] = "";
    sp_link *link = &links->peers[peer];
    int n, best;
    if (!sp_published_find(p, "tcp", &control) && !sp_published_find(p, "control", &control))
        control = (sp_published_transport){0};
    n = find_candidates(links, peer, p, &control, found, tried);
    if (n == 0)
        return SP_FAIL(SPCCL_ERR_UNREACHABLE,
                       "rank %d: no transport reaches rank %d (%s): see SPCCL_TRANSPORTS and `spccl info`",
                       c->rank, peer, tried);
    for (int i = 0; i < n; i++)
        mbps[i] = found[i].peer.mbps;
    best = sp_rate_choose(mbps, n, c->rates_decide && sp_load_le32(p->blob + SP_BOOT_RATES_AT) == 1);
    if (best != 0)
        snprintf(faster, sizeof faster, ", %.1f Gbit/s; %s has %.1f", mbps[best] / 1e3,
                 links->transports[found[0].i]->name, mbps[0] / 1e3);
    SP_TRY(sp_links_add_peer(links, peer, found[best].i, &found[best].peer, &control));
    snprintf(link->text, sizeof link->text, "%s: %.*s%s", link->transport->name, best != 0 ? 80 : 140,
             found[best].why, faster);
    find_next(links, peer, found, n, best, next);
    return SPCCL_OK;
}

/* ---- connecting ---- */

/* nexts: [world_size], or NULL. */
static bool is_a_next(const sp_links *links, const struct next *nexts, const sp_endpoint *ep)
{
    for (int r = 0; nexts != NULL && r < links->world_size; r++)
        if (nexts[r].ep == ep)
            return true;
    return false;
}

/* Close the endpoints that no link uses, and that no pair may need yet. */
static void drop_unused(sp_links *links, const struct next *nexts)
{
    int n = 0;
    for (int i = 0; i < links->n_endpoints; i++) {
        sp_endpoint *ep = links->endpoints[i];
        bool used = is_a_next(links, nexts, ep);
        for (int r = 0; r < links->world_size; r++) {
            const sp_link *link = &links->peers[r];
            used = used || link->ep == ep || (ep == links->tcp && sp_has_control(link->transport, link->ep));
        }
        if (!used) {
            links->tcp = ep == links->tcp ? NULL : links->tcp;
            links->transports[i]->close(ep);
            continue;
        }
        links->transports[n] = links->transports[i];
        links->endpoints[n++] = links->endpoints[i];
    }
    links->n_endpoints = n;
}

/* Continue to connect all endpoints but those that are a next one: they may get more peers. */
static spccl_status connect_step(sp_links *links, const struct next *nexts)
{
    spccl_status all = SPCCL_OK;
    for (int i = 0; i < links->n_endpoints; i++) {
        spccl_status st = is_a_next(links, nexts, links->endpoints[i])
                              ? SPCCL_OK
                              : links->transports[i]->connect_step(links->endpoints[i]);
        if (st != SPCCL_OK && st != SPCCL_AGAIN)
            return st;
        all = st == SPCCL_OK ? all : st;
    }
    return all;
}

/* Give the pairs whose transport has failed to the next one. The peers do the same: both ends of a pair know that it
 * failed. *any: some pair had a next one; endpoints that were one may connect now. */
static spccl_status take_next(sp_links *links, struct next *nexts, bool *any)
{
    *any = false;
    for (int peer = 0; peer < links->world_size; peer++)
        nexts[peer].waits = is_a_next(links, nexts, links->peers[peer].ep);
    for (int peer = 0; peer < links->world_size; peer++) {
        sp_link *link = &links->peers[peer];
        struct next *next = &nexts[peer];
        sp_pair_failure f;
        if (next->ep == NULL || next->waits)
            continue;
        *any = true;
        if (link->transport->failed(link->ep, peer, &f)) {
            next->failed = link->transport;
            snprintf(next->why, sizeof next->why, "%s", f.why);
            link->transport = next->transport;
            link->ep = next->ep;
            snprintf(link->text, sizeof link->text, "%s", link->transport->name);
            SP_TRY(next->transport->add_peer(next->ep, peer, next->address, next->address_bytes));
        }
        next->ep = NULL;
    }
    return SPCCL_OK;
}

/* The pairs of a transport that has failed for them are carried by their control links. */
static spccl_status take_control_links(sp_links *links, const sp_transport *t)
{
    const sp_transport *tcp = sp_transport_find("tcp");
    struct {
        sp_rank_list ranks;
        const char *why;           /* of the first */
    } failed[2] = {{.why = NULL}}; /* [1]: expected */
    for (int peer = 0; peer < links->world_size; peer++) {
        sp_link *link = &links->peers[peer];
        sp_pair_failure f;
        if (link->transport != t || !t->failed(link->ep, peer, &f))
            continue;
        failed[f.expected].why = failed[f.expected].ranks.n == 0 ? f.why : failed[f.expected].why;
        sp_rank_list_add(&failed[f.expected].ranks, peer);
        if (!links->tcp_too)
            continue;
        link->transport = tcp;
        link->ep = links->tcp;
        tcp->set_control(link->ep, peer, false);
        snprintf(link->text, sizeof link->text, "%s%s%s%s", f.what != NULL ? "tcp, as " : "",
                 f.what != NULL ? f.what : "", f.what != NULL ? " failed: " : "", f.why);
    }
    for (int i = 0; i < 2; i++) {
        if (failed[i].ranks.n == 0)
            continue;
        if (!links->tcp_too)
            return SP_FAIL(SPCCL_ERR_UNREACHABLE,
                           "rank %d: no connection over %s with rank %s, and tcp is not among the "
                           "transports: %s",
                           links->rank, t->name, failed[i].ranks.text, failed[i].why);
        sp_log(i == 1 ? SP_LOG_INFO : SP_LOG_WARN, links->rank,
               "%s: tcp is used in place of %s with rank %s: %s", t->name, t->name, failed[i].ranks.text,
               failed[i].why);
    }
    return SPCCL_OK;
}

/* All endpoints are connected. */
static spccl_status end_connecting(sp_links *links)
{
    for (int i = 0; i < links->n_endpoints; i++)
        if (links->transports[i]->failed != NULL)
            SP_TRY(take_control_links(links, links->transports[i]));
    links->notes_only = links->tcp != NULL;
    for (int r = 0; r < links->world_size; r++)
        links->notes_only = links->notes_only && links->peers[r].ep != links->tcp;
    return SPCCL_OK;
}

spccl_status sp_links_connect_step(sp_links *links)
{
    SP_TRY(connect_step(links, NULL));
    return end_connecting(links);
}

/* One warning for all pairs that took the same next transport. */
static void log_next(const sp_links *links, const struct next *nexts)
{
    for (int i = 0; i < links->n_endpoints; i++) {
        const struct next *first = NULL;
        sp_rank_list ranks = {0};
        for (int r = 0; r < links->world_size; r++)
            if (nexts[r].failed != NULL && links->peers[r].ep == links->endpoints[i]) {
                first = first == NULL ? &nexts[r] : first;
                sp_rank_list_add(&ranks, r);
            }
        if (first != NULL)
            sp_log(SP_LOG_WARN, links->rank, "%s: %s is tried in place of %s with rank %s: %s",
                   first->failed->name, first->transport->name, first->failed->name, ranks.text, first->why);
    }
}

static void write_text(sp_link *link, int peer, const struct next *next)
{
    size_t used;
    if (link->transport != NULL && link->transport->describe != NULL)
        link->transport->describe(link->ep, peer, link->text, sizeof link->text);
    used = strlen(link->text);
    if (next->failed != NULL)
        snprintf(link->text + used, sizeof link->text - used, "; %s failed: %s", next->failed->name,
                 next->why);
}

static spccl_status connect_links(sp_links *links, const sp_boot_config *c, const sp_published *all,
                                  struct next *nexts)
{
    for (int peer = 0; peer < links->world_size; peer++)
        if (peer != links->rank)
            SP_TRY(pick(links, c, peer, &all[peer], &nexts[peer]));
    for (bool any = true; any;) {
        /* Also one that failed for all its peers: its cards are free for the next one. */
        spccl_status st;
        drop_unused(links, nexts);
        while ((st = connect_step(links, nexts)) == SPCCL_AGAIN)
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL); /* start-up only */
        SP_TRY(st);
        SP_TRY(take_next(links, nexts, &any));
    }
    log_next(links, nexts);
    SP_TRY(end_connecting(links));
    for (int r = 0; r < links->world_size; r++)
        write_text(&links->peers[r], r, &nexts[r]);
    for (int i = 0; i < links->n_endpoints; i++)
        links->message_max =
            sp_min_size(links->message_max, links->transports[i]->message_max(links->endpoints[i]));
    return SPCCL_OK;
}

spccl_status sp_boot_connect(sp_links *links, const sp_boot_config *c, const sp_published *all)
{
    struct next *nexts = sp_calloc((size_t)links->world_size, sizeof *nexts);
    spccl_status st;
    if (nexts == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "transports of %d ranks", links->world_size);
    st = connect_links(links, c, all, nexts);
    sp_free(nexts);
    return st;
}
