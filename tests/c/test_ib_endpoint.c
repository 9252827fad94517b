/* test_ib_endpoint.c - what transport ib does when cards misbehave, on cards of stand_in_verbs.h: paths that cannot be
 * connected, completions that come too late, flushes that fail. */
#include "core/base/clock.h"
#include "core/base/status.h"
#include "ranks.h"
#include "stand_in_verbs.h"
#include "transport/common/transports.h"
#include "transport/net/ib/ib.h"

/* ---- the path to a peer ---- */

static void check_path(const struct card *c, const sp_ib_end *theirs, const struct ibv_qp_attr *want)
{
    sp_ib_choice choice;
    sp_ib_context *context = NULL;
    sp_ib_link *link = NULL;
    sp_ib_end mine;
    const struct ibv_ah_attr *got = &last_path.ah_attr;
    use_cards(1, c);
    sp_ib_choose(0, "", &choice);
    CHECK(choice.n == 1, "%s", choice.why);
    CHECK_OK(sp_ib_context_open(&choice.devices[0], 16, &context));
    CHECK_OK(sp_ib_link_open(context, 8, 8, &link, &mine));
    records_path = true;
    CHECK_OK(sp_ib_link_connect(link, &mine, theirs));
    records_path = false;
    CHECK(last_path.path_mtu == want->path_mtu && last_path.dest_qp_num == 77 && last_path.rq_psn == 99,
          "MTU %d, queue pair %u, packet %u", (int)last_path.path_mtu, last_path.dest_qp_num,
          last_path.rq_psn);
    CHECK(got->is_global == want->ah_attr.is_global && got->dlid == want->ah_attr.dlid &&
              got->port_num == 1 && got->grh.sgid_index == want->ah_attr.grh.sgid_index,
          "global %d, LID %d, port %d, GID %d", got->is_global, got->dlid, got->port_num,
          got->grh.sgid_index);
    CHECK(!got->is_global || memcmp(got->grh.dgid.raw, theirs->gid, SP_IB_GID_BYTES) == 0, "another GID");
    CHECK(last_rts.sq_psn == mine.packet, "packet %u, the peer was told %u", last_rts.sq_psn, mine.packet);
    sp_ib_link_close(link);
    sp_ib_context_close(context);
    CHECK(n_objects == 0, "%d objects are open", n_objects);
}

/* RoCE needs the GID; InfiniBand only between subnets, which the first 8 bytes of a GID name. The smaller MTU counts. */
static void test_path(void)
{
    struct card c = good_card("mlx5_0");
    sp_ib_end theirs = {.lid = 12, .mtu_bytes = 1024, .queue_pair = 77, .packet = 99};
    struct ibv_qp_attr want = {.path_mtu = IBV_MTU_1024, .ah_attr = {.is_global = 1, .dlid = 12}};
    c.ports[0].gids[2] = c.ports[0].gids[0];
    c.ports[0].gids[0].type = "IB/RoCE v1";
    want.ah_attr.grh.sgid_index = 2;
    CHECK(inet_pton(AF_INET6, "::ffff:10.0.0.2", theirs.gid) == 1, "GID");
    check_path(&c, &theirs, &want);
    theirs.mtu_bytes = 8192; /* above this rank's 4096 */
    want.path_mtu = IBV_MTU_4096;
    check_path(&c, &theirs, &want);
    c.ports[0].infiniband = true;
    c.ports[0].gids[0].address = "fec0:0:0:1::7";
    want.ah_attr.grh.sgid_index = 0;
    CHECK(inet_pton(AF_INET6, "fec0:0:0:2::8", theirs.gid) == 1, "GID");
    check_path(&c, &theirs, &want);
    CHECK(inet_pton(AF_INET6, "fec0:0:0:1::8", theirs.gid) == 1, "GID");
    want.ah_attr.is_global = 0;
    check_path(&c, &theirs, &want);
}

/* ---- tcp in place of ib ---- */

#define N_RANKS 2

static void check_sum(struct rank_ctx *c)
{
    const char *text = "";
    float x[100];
    size_t wrong = 0;
    CHECK_OK(spccl_comm_describe_link(c->comm, 1 - c->rank, &text));
    CHECK(strncmp(text, "tcp", 3) == 0, "rank %d: \"%s\"", c->rank, text);
    for (int i = 0; i < 100; i++)
        x[i] = (float)(c->rank + i);
    CHECK_OK(spccl_all_reduce(c->comm, x, x, 100, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    for (int i = 0; i < 100; i++)
        wrong += x[i] != (float)(1 + 2 * i);
    CHECK(wrong == 0, "rank %d: %zu sums are wrong", c->rank, wrong);
}

/* A card that fails after it was chosen. tcp carries the pair, and nothing stays open. Each of the two ranks tries to
 * connect one of its 4 queue pairs: the others have the same path. */
static void check_falls_back(const char *what, const struct card *c, int want_rtr)
{
    struct rank_ctx ctx[N_RANKS];
    spccl_config config = SPCCL_CONFIG_INIT;
    use_cards(1, c);
    n_rtr = 0;
    test_ranks_per_host = 1;
    config.timeout_ms = 120000;
    config.transports = "ib,tcp";
    setenv("SPCCL_DEBUG_IB_QPS", "4", 1);
    setenv("SPCCL_LOG", "off", 1);
    run_ranks(N_RANKS, &config, check_sum, NULL, ctx);
    unsetenv("SPCCL_DEBUG_IB_QPS");
    for (int r = 0; r < N_RANKS; r++)
        CHECK(ctx[r].created == SPCCL_OK, "%s: rank %d: %s", what, r, ctx[r].error);
    CHECK(n_rtr == want_rtr, "%s: %d queue pairs were connected, wanted %d", what, n_rtr, want_rtr);
    CHECK(n_objects == 0, "%s: %d objects are open", what, n_objects);
}

static void test_falls_back(void)
{
    struct card c = good_card("mlx5_0");
    c.no_rtr = ETIMEDOUT;
    check_falls_back("no path", &c, 2);
    c = good_card("mlx5_0");
    c.no_mr = ENOMEM;
    check_falls_back("no memory", &c, 0);
}

static void check_not_called(struct rank_ctx *c)
{
    CHECK(false, "rank %d has a group", c->rank);
}

/* Hosts whose only card makes no RC queue pair: the next transport of the list takes the pair. If there is none, the error
 * says what the card lacks, as `spccl info` does. */
static void test_next_transport(void)
{
    static const char *const why =
        "no usable device: efa0 port 1: it cannot make an RC queue pair: ibv_create_qp: Operation not "
        "supported (errno 95)";
    struct card c = good_card("efa0");
    struct rank_ctx ctx[N_RANKS];
    spccl_config config = SPCCL_CONFIG_INIT;
    spccl_info_entry e = {.struct_bytes = sizeof e};
    c.no_qp = EOPNOTSUPP;
    use_cards(1, &c);
    test_ranks_per_host = 1;
    config.timeout_ms = 120000;
    config.transports = "ib,tcp";
    run_ranks(N_RANKS, &config, check_sum, NULL, ctx);
    for (int r = 0; r < N_RANKS; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
    config.transports = "ib";
    run_ranks(N_RANKS, &config, check_not_called, NULL, ctx);
    for (int r = 0; r < N_RANKS; r++)
        CHECK(ctx[r].created == SPCCL_ERR_UNREACHABLE && strstr(ctx[r].error, why) != NULL, "rank %d: %s", r,
              ctx[r].error);
    for (size_t i = 0; spccl_info(i, &e) == SPCCL_OK && strcmp(e.name, "ib") != 0; i++) {
    }
    CHECK(strcmp(e.name, "ib") == 0 && strcmp(e.value, "in, no device") == 0 && strcmp(e.why, why) == 0,
          "%s: \"%s\": \"%s\"", e.name, e.value, e.why);
    CHECK(n_objects == 0, "%d objects are open", n_objects);
}

/* ---- an endpoint with one peer on the first of two devices ---- */

struct scene {
    struct sp_ib ep;
    struct sp_ib_peer peers[2];
    sp_segments_peer base[2];
    sp_region *region;
    uint8_t handle[SP_REGION_HANDLE_BYTES];
};

static sp_endpoint *endpoint(struct scene *s)
{
    return (sp_endpoint *)&s->ep;
}

static void open_scene(struct scene *s, const struct card *first)
{
    static uint8_t memory[4096];
    const struct card list[2] = {*first, good_card("mlx5_1")};
    const sp_region_config c = {
        .address = memory, .bytes = sizeof memory, .dmabuf = -1, .peers_write = true, .flush = true};
    struct sp_ib_peer *p = &s->peers[1];
    struct sp_ib_rx *rx = &p->rx[0];
    sp_ib_choice choice;
    memset(s, 0, sizeof *s);
    use_cards(2, list);
    setenv("SPCCL_DEBUG_IB_RAILS", "2", 1);
    sp_ib_choose(0, "", &choice);
    unsetenv("SPCCL_DEBUG_IB_RAILS");
    CHECK(choice.n == 2, "%d devices: %s", choice.n, choice.why);
    s->ep.n_devices = choice.n;
    s->ep.base = (sp_segments){.peers = s->base, .pid = getpid()};
    s->ep.base.config =
        (sp_endpoint_config){.world_size = 2, .n_queues = 1, .queue_bytes = 1 << 16, .n_puts = 4};
    s->ep.peers = s->peers;
    for (int i = 0; i < 2; i++) {
        s->peers[i].base = &s->base[i];
        s->peers[i].tx[0].ring = &s->base[i].tx[0];
        s->peers[i].rx[0].ring = &s->base[i].rx[0];
    }
    for (int d = 0; d < 2; d++) {
        s->ep.devices[d] = choice.devices[d];
        CHECK_OK(sp_ib_context_open(&choice.devices[d], 16, &s->ep.contexts[d]));
    }
    p->base->carried = true;
    p->stage = SP_IB_STAGE_DONE;
    p->n_qps = 1; /* on device 0; device 1 was left out at start-up */
    CHECK_OK(sp_ib_link_open(s->ep.contexts[0], 64, 64, &p->qps[0].link, &p->mine.ends[0]));
    CHECK_OK(sp_segment_ring_open(p->tx[0].ring, 1 << 16, 0, false));
    CHECK_OK(sp_segment_ring_open(rx->ring, 1 << 16, 0, true));
    sp_record_write(rx->ring->memory.data, 0, 0, 16); /* a message is here */
    rx->ring->bytes[0] = (uint32_t)sp_record_bytes(16);
    atomic_store(&rx->ring->done, 1);
    CHECK_OK(sp_ib_puts.open_region(endpoint(s), &c, &s->region, s->handle));
}

static void close_scene(struct scene *s)
{
    sp_ib_puts.close_region(endpoint(s), s->region);
    sp_ib_close_qps(&s->peers[1]);
    sp_segment_ring_close(s->peers[1].tx[0].ring);
    sp_segment_ring_close(s->peers[1].rx[0].ring);
    for (int d = 0; d < 2; d++)
        sp_ib_context_close(s->ep.contexts[d]);
    CHECK(n_objects == 0, "%d objects are open", n_objects);
}

/* Peers may write where their messages arrive and into regions for puts, and nowhere else. */
static void test_access(void)
{
    const int own = IBV_ACCESS_LOCAL_WRITE, peers = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    const struct card c = good_card("mlx5_0");
    struct scene s;
    struct sp_ib_peer *p = &s.peers[0];
    open_scene(&s, &c);
    p->n_qps = 1;
    sp_ib_open_peer(&s.ep, 0);
    CHECK(p->mine.usable == 1, "%s", p->base->reason);
    CHECK(access_asked(p->tx[0].memory[0].mr) == 0, "send ring: access %x",
          access_asked(p->tx[0].memory[0].mr));
    CHECK(access_asked(p->rx[0].memory[0].mr) == peers, "receive ring: access %x",
          access_asked(p->rx[0].memory[0].mr));
    CHECK(access_asked(s.ep.flush.memory[0].mr) == own, "word of a flush: access %x",
          access_asked(s.ep.flush.memory[0].mr));
    CHECK(access_asked(((const struct sp_ib_region *)s.region)->memory[0].mr) ==
              (peers | IBV_ACCESS_REMOTE_READ),
          "region: access %x", access_asked(((const struct sp_ib_region *)s.region)->memory[0].mr));
    sp_ib_close_qps(p);
    sp_segment_ring_close(p->tx[0].ring);
    sp_segment_ring_close(p->rx[0].ring);
    close_scene(&s);
}

/* The read of a flush has ended. */
static void complete_read(struct scene *s, enum ibv_wc_status status)
{
    next_completion = (struct ibv_wc){.wr_id = (uint64_t)SP_IB_FLUSH_PEER << 32, .status = status};
    has_completion = true;
    sp_ib_poll(&s->ep.base);
}

/* Only the device that carries the pair registers memory and reads it. */
static void test_flush(void)
{
    const struct card c = good_card("mlx5_0");
    struct scene s;
    const struct sp_ib_region *r;
    open_scene(&s, &c);
    r = (const struct sp_ib_region *)s.region;
    CHECK(r->memory[0].mr != NULL && s.ep.flush.links[0] != NULL, "device 0 has no region, or no flush");
    CHECK(r->memory[1].mr == NULL && s.ep.flush.links[1] == NULL, "device 1 carries nothing");
    CHECK(sp_ib_puts.flush(endpoint(&s), 1, 0) == SPCCL_AGAIN && s.ep.flush.reading == 1, "reading %x",
          s.ep.flush.reading);
    complete_read(&s, IBV_WC_SUCCESS);
    CHECK_OK(sp_ib_puts.flush(endpoint(&s), 1, 0));
    close_scene(&s);
}

static void check_flush_failed(struct scene *s, const char *text)
{
    spccl_status st = sp_ib_puts.flush(endpoint(s), 1, 0);
    CHECK(st == SPCCL_ERR_PEER && strstr(spccl_last_error(), text) != NULL &&
              strstr(spccl_last_error(), "device mlx5_0 port 1") != NULL &&
              strstr(spccl_last_error(), "a flush of GPU memory failed") != NULL,
          "wanted %s: %d: %s", text, (int)st, spccl_last_error());
}

/* A read that cannot be posted, or that ends with an error: flush says so. Kind 1: to a rank over another device too. */
static void test_flush_fails(void)
{
    for (int kind = 0; kind < 2; kind++) {
        struct card c = good_card("mlx5_0");
        struct scene s;
        c.no_read = ENOMEM;
        open_scene(&s, &c);
        s.peers[1].qps[0].device = kind;
        CHECK(sp_ib_puts.flush(endpoint(&s), 1, 0) == SPCCL_AGAIN, "it began");
        check_flush_failed(&s, "Cannot allocate memory");
        close_scene(&s);
        c.no_read = 0;
        open_scene(&s, &c);
        s.peers[1].qps[0].device = kind;
        CHECK(sp_ib_puts.flush(endpoint(&s), 1, 0) == SPCCL_AGAIN, "it began");
        complete_read(&s, IBV_WC_REM_ACCESS_ERR);
        check_flush_failed(&s, "remote access error");
        close_scene(&s);
    }
}

/* Completions of a queue pair that was closed, as another transport carries the pair: they are ignored. */
static void test_late_completion(void)
{
    static const uint64_t receive = UINT64_C(1) << 63;
    const struct card c = good_card("mlx5_0");
    struct scene s;
    open_scene(&s, &c);
    s.base[1].carried = false;
    sp_ib_close_qps(&s.peers[1]);
    for (int kind = 0; kind < 2; kind++) {
        next_completion = (struct ibv_wc){.wr_id = (kind == 0 ? receive : 0) | sp_ib_id(&s.peers[1], 1, 0) |
                                                   (kind == 0 ? 0 : 1),
                                          .opcode = kind == 0 ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RDMA_WRITE,
                                          .wc_flags = kind == 0 ? IBV_WC_WITH_IMM : 0,
                                          .imm_data = htonl(sp_ib_imm(SP_IB_PROBE, 0, SP_IB_PROBE_NUMBER))};
        has_completion = true;
        sp_ib_poll(&s.ep.base);
        CHECK(!has_completion && s.base[1].failure[0] == '\0' && s.peers[1].qps[0].n_completed == 0 &&
                  !s.peers[1].qps[0].probe_here,
              "a closed queue pair counts: %s", s.base[1].failure);
    }
    close_scene(&s);
}

/* A bad write that is seen after the end of the peer's tcp link: status and text speak of the write. */
static void test_bad_write_after_end(void)
{
    static const uint64_t receive = UINT64_C(1) << 63;
    const struct card c = good_card("mlx5_0");
    struct scene s;
    struct sp_ib_peer *p = &s.peers[1];
    void *space = NULL;
    spccl_status st;
    open_scene(&s, &c);
    p->base->gone = true; /* as sp_segments_hear_end sets it */
    snprintf(p->base->gone_text, sizeof p->base->gone_text, "is gone");
    p->base->ended_ns = sp_now_ns();
    next_completion = (struct ibv_wc){.wr_id = receive | sp_ib_id(p, 1, 0),
                                      .opcode = IBV_WC_RECV_RDMA_WITH_IMM,
                                      .wc_flags = IBV_WC_WITH_IMM,
                                      .imm_data = 0xffffffff};
    has_completion = true;
    sp_ib_poll(&s.ep.base);
    st = sp_transport_ib.reserve(endpoint(&s), 1, 0, 16, &space);
    CHECK(st == SPCCL_ERR_FORMAT &&
              strstr(spccl_last_error(), "sent something that is not a message") != NULL &&
              strstr(spccl_last_error(), "device mlx5_0 port 1") != NULL,
          "%d: %s", (int)st, spccl_last_error());
    close_scene(&s);
}

/* A put for which the queue pair has no place: n_puts leaves room, so this is a mistake of the caller's. */
static void test_no_place(void)
{
    static uint8_t memory[4096];
    const struct card c = good_card("mlx5_0");
    const sp_region_config source = {.address = memory, .bytes = sizeof memory, .dmabuf = -1};
    struct scene s;
    sp_region *from = NULL;
    uint8_t unused[SP_REGION_HANDLE_BYTES];
    open_scene(&s, &c);
    CHECK_OK(sp_ib_puts.open_region(endpoint(&s), &source, &from, unused));
    CHECK(sp_segment_ring_reserve(s.peers[1].tx[0].ring, 16) != NULL, "no space");
    s.peers[1].qps[0].n_writes = (uint32_t)sp_ib_n_writes(&s.ep);
    CHECK(sp_ib_puts.put(endpoint(&s), 1, 0, &(sp_put){.from = from, .to = s.handle, .bytes = 64}) ==
                  SPCCL_ERR_BUG &&
              strstr(spccl_last_error(), "writes are under way, of at most") != NULL,
          "%s", spccl_last_error());
    sp_ib_puts.close_region(endpoint(&s), from);
    close_scene(&s);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"path", test_path},
                                             {"falls_back", test_falls_back},
                                             {"next_transport", test_next_transport},
                                             {"access", test_access},
                                             {"flush", test_flush},
                                             {"flush_fails", test_flush_fails},
                                             {"late_completion", test_late_completion},
                                             {"bad_write_after_end", test_bad_write_after_end},
                                             {"no_place", test_no_place},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
