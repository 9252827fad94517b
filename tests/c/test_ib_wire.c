/* test_ib_wire.c - what ranks tell each other over transport ib: connect info, addresses, and the 32 bits of a write. */
#include "core/contract/transport.h"
#include "test.h"
#include "transport/common/transports.h"
#include "transport/net/ib/ib.h"

#include <arpa/inet.h>

static sp_ib_connect_info some_connect_info(void)
{
    sp_ib_connect_info o = {.usable = 3,
                            .n_queues = 2,
                            .segment_bytes = 65536,
                            .n_qps = 2,
                            .rings = {{.address = UINT64_C(0x1122334455667788), .rkey = {1, 0xaabbccdd}}}};
    for (int q = 0; q < 2; q++) {
        o.ends[q] =
            (sp_ib_end){.ethernet = true, .lid = 7, .mtu_bytes = 4096, .queue_pair = 0x123456, .packet = 9};
        memset(o.ends[q].gid, 0x5a, sizeof o.ends[q].gid);
    }
    return o;
}

static void test_connect_info(void)
{
    sp_ib_connect_info in = some_connect_info(), out;
    uint8_t bytes[SP_IB_CONNECT_INFO_BYTES];
    sp_ib_write_connect_info(&in, bytes);
    CHECK(sp_ib_read_connect_info(bytes, sizeof bytes, &out), "refused");
    CHECK(out.usable == 3 && out.n_queues == 2 && out.segment_bytes == 65536 && out.ends[1].ethernet &&
              out.ends[1].lid == 7 && out.ends[1].mtu_bytes == 4096 && out.ends[1].queue_pair == 0x123456 &&
              out.ends[1].packet == 9 && out.rings[0].address == UINT64_C(0x1122334455667788) &&
              out.n_qps == 2 && out.rings[0].rkey[1] == 0xaabbccdd &&
              memcmp(out.ends[1].gid, in.ends[1].gid, sizeof out.ends[1].gid) == 0,
          "another connect info");
    in = (sp_ib_connect_info){.n_qps = 16, .n_queues = 1, .why = "no\nmemory"};
    sp_ib_write_connect_info(&in, bytes);
    CHECK(sp_ib_read_connect_info(bytes, sizeof bytes, &out) && out.usable == 0 && out.n_qps == 16 &&
              strcmp(out.why, "no?memory") == 0,
          "\"%s\"", out.why);
}

/* Each change makes a connect info that must be refused. */
static void test_bad_connect_info(void)
{
    static const struct {
        size_t at;
        uint8_t value;
        const char *what;
    } bad[] = {{0, 'x', "magic"},
               {4, 17, "17 queue pairs"},
               {6, 0, "no queue"},
               {6, 5, "five queues"},
               {12, 7, "three of two"},
               {16, 2, "network"},
               {53, 0, "MTU 0 of number 1"},
               {27, 1, "queue pair of 25 bits"},
               {31, 1, "packet of 25 bits"}};
    sp_ib_connect_info in = some_connect_info(), out;
    uint8_t bytes[SP_IB_CONNECT_INFO_BYTES];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        sp_ib_write_connect_info(&in, bytes);
        bytes[bad[i].at] = bad[i].value;
        CHECK(!sp_ib_read_connect_info(bytes, sizeof bytes, &out), "%s: accepted", bad[i].what);
    }
    sp_ib_write_connect_info(&in, bytes);
    CHECK(!sp_ib_read_connect_info(bytes, sizeof bytes - 1, &out), "too short: accepted");
    memset(bytes + SP_IB_CONNECT_INFO_BYTES - SP_NET_TEXT_CAP, 'a', SP_NET_TEXT_CAP);
    CHECK(!sp_ib_read_connect_info(bytes, sizeof bytes, &out), "a text without end: accepted");
}

static bool read_result(const uint8_t *bytes, size_t n, sp_segments_result *out)
{
    return sp_segments_read_result(bytes, n, SP_IB_RESULT_MAGIC, (1u << SP_IB_QPS_MAX) - 1, out);
}

static void test_result(void)
{
    sp_segments_result in = {.value = 0x8001, .why = "a\tb"}, out;
    uint8_t bytes[SP_SEGMENTS_RESULT_BYTES];
    sp_segments_write_result(&in, SP_IB_RESULT_MAGIC, bytes);
    CHECK(read_result(bytes, sizeof bytes, &out) && out.value == 0x8001 && strcmp(out.why, "a?b") == 0,
          "%x \"%s\"", out.value, out.why);
    CHECK(!read_result(bytes, sizeof bytes - 1, &out), "too short: accepted");
    bytes[6] = 1;
    CHECK(!read_result(bytes, sizeof bytes, &out), "queue pair 16: accepted");
    bytes[6] = 0;
    memset(bytes + 8, 'a', SP_NET_TEXT_CAP);
    CHECK(!read_result(bytes, sizeof bytes, &out), "a text without end: accepted");
}

static void test_address(void)
{
    uint8_t bytes[SP_ADDRESS_BYTES_MAX] = {0};
    sp_ib_address in = {.n = 2, .n_qps = 3}, out;
    size_t head;
    in.ports[0].network = SP_IB_INFINIBAND;
    in.ports[1].network = SP_IB_ROCE_IPV6;
    memset(in.ports[1].gid, 0x5a, SP_IB_GID_BYTES);
    head = sp_ib_write_address(&in, bytes);
    CHECK(sp_ib_read_address(bytes, head, &out) && out.n == 2 && out.n_qps == 3 &&
              memcmp(&out.ports, &in.ports, sizeof in.ports) == 0,
          "refused");
    CHECK(!sp_ib_read_address(bytes, head - 1, &out) && !sp_ib_read_address(bytes, head + 1, &out),
          "the size");
    bytes[6] = SP_IB_NO_DEVICE;
    CHECK(!sp_ib_read_address(bytes, head, &out), "a port without network");
    bytes[6] = SP_IB_ROCE_IPV6 + 1;
    CHECK(!sp_ib_read_address(bytes, head, &out), "an unknown network");
    bytes[6] = SP_IB_INFINIBAND;
    bytes[5] = 0;
    CHECK(!sp_ib_read_address(bytes, head, &out), "no queue pair");
    bytes[5] = 9;
    CHECK(!sp_ib_read_address(bytes, head, &out), "18 queue pairs");
    bytes[5] = 1;
    bytes[4] = SP_IB_RAILS_MAX + 1;
    CHECK(!sp_ib_read_address(bytes, 6 + 17 * (SP_IB_RAILS_MAX + 1), &out), "five ports");
    bytes[4] = 0;
    CHECK(!sp_ib_read_address(bytes, 6, &out), "no device");
}

/* ---- GIDs ---- */

/* A GID in a test: its type by number, and an address as in a text. */
struct entry {
    enum { EMPTY, V1, V2 } type;
    const char *address; /* NULL: zero bytes */
};
#define LOCAL "fe80::1"
#define GLOBAL "2001:db8::1"

static int fill_table(const struct entry *entries, sp_ib_gid table[8])
{
    static const char *const types[] = {[EMPTY] = "", [V1] = "IB/RoCE v1", [V2] = "RoCE v2"};
    memset(table, 0, 8 * sizeof *table);
    for (int i = 0; i < 8; i++) {
        snprintf(table[i].type, sizeof table[i].type, "%s", types[entries[i].type]);
        CHECK(entries[i].address == NULL || inet_pton(AF_INET6, entries[i].address, table[i].bytes) == 1,
              "%s", entries[i].address);
    }
    return sp_ib_choose_gid(true, table, 8);
}

static void test_gids(void)
{
    static const struct {
        const char *what;
        int want; /* of RoCE */
        int want_infiniband;
        struct entry entries[8];
    } cases[] = {
        {"empty", -1, -1, {{EMPTY, NULL}}},
        {"zero", -1, -1, {{V2, NULL}, {V1, NULL}}},
        {"only v1", -1, 0, {{V1, LOCAL}, {V1, "::ffff:10.0.0.1"}}},
        {"v2 after v1", 1, 0, {{V1, "::ffff:10.0.0.1"}, {V2, "::ffff:10.0.0.1"}}},
        {"v2 link-local, v1 IPv4", 2, 0, {{V1, LOCAL}, {V1, "::ffff:10.0.0.1"}, {V2, LOCAL}}},
        {"as mlx5", 3, 0, {{V1, LOCAL}, {V2, LOCAL}, {V1, "::ffff:10.0.0.1"}, {V2, "::ffff:10.0.0.1"}}},
        {"IPv4 before global IPv6", 1, 0, {{V2, GLOBAL}, {V2, "::ffff:10.0.0.1"}, {V2, LOCAL}}},
        {"global IPv6 before link-local", 1, 0, {{V2, LOCAL}, {V2, GLOBAL}, {V2, "febf::1"}}},
        {"fec0 is not link-local", 1, 0, {{V2, LOCAL}, {V2, "fec0::1"}}},
        {"link-local alone", 4, 4, {{V2, NULL}, {V2, NULL}, {EMPTY, NULL}, {V1, NULL}, {V2, LOCAL}}},
        {"the first of two", 1, 0, {{V2, LOCAL}, {V2, "::ffff:10.0.0.1"}, {V2, "::ffff:10.0.1.1"}}},
        {"zero before IPv4", 2, 1, {{V2, NULL}, {V1, LOCAL}, {V2, "::ffff:10.0.0.1"}}},
        {"not IPv4-mapped", 1, 0, {{V2, "::fffe:10.0.0.1"}, {V2, "::ffff:10.0.0.1"}}},
        {"the last", 7, 0, {{V1, LOCAL}, [7] = {V2, LOCAL}}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_ib_gid table[8];
        int got = fill_table(cases[i].entries, table), got_infiniband = sp_ib_choose_gid(false, table, 8);
        CHECK(got == cases[i].want, "%s: got GID %d, wanted %d", cases[i].what, got, cases[i].want);
        CHECK(got_infiniband == cases[i].want_infiniband, "%s: InfiniBand: got GID %d, wanted %d",
              cases[i].what, got_infiniband, cases[i].want_infiniband);
        CHECK(sp_ib_choose_gid(true, table, 0) == -1, "%s: a table without entries", cases[i].what);
    }
}

/* Two hosts with a card in each of two subnets. The tables of the cards differ, and the second host counts its cards in the
 * other order: each rail joins cards of one subnet. */
static void test_two_subnets(void)
{
    static const struct entry cards[2][2][8] = {
        {{{V1, LOCAL}, {V2, LOCAL}, {V1, "::ffff:10.0.0.1"}, {V2, "::ffff:10.0.0.1"}},
         {{V2, "::ffff:10.0.1.1"}, {V2, GLOBAL}}},
        {{{V1, "::ffff:10.0.0.2"}, {V2, LOCAL}, {V2, "::ffff:10.0.1.2"}},
         {{V1, "::ffff:10.0.1.2"}, {V2, GLOBAL}, {V2, "::ffff:10.0.0.2"}}}};
    sp_ib_address hosts[2] = {{.n = 2, .n_qps = 1}, {.n = 2, .n_qps = 1}};
    sp_ib_pairing p;
    for (int host = 0; host < 2; host++)
        for (int card = 0; card < 2; card++) {
            sp_ib_gid table[8];
            sp_ib_device device = {.ethernet = true};
            int chosen = fill_table(cards[host][card], table);
            CHECK(chosen >= 0, "host %d, card %d: no GID", host, card);
            memcpy(device.gid, table[chosen >= 0 ? chosen : 0].bytes, sizeof device.gid);
            hosts[host].ports[card].network = sp_ib_network(&device);
            memcpy(hosts[host].ports[card].gid, device.gid, sizeof device.gid);
        }
    sp_ib_pair(&hosts[0], &hosts[1], &p);
    CHECK(p.n == 2 && p.low[0] == 0 && p.high[0] == 1 && p.low[1] == 1 && p.high[1] == 0,
          "%u rails: %u-%u, %u-%u", p.n, p.low[0], p.high[0], p.low[1], p.high[1]);
    hosts[1].n = 1; /* its card in the subnet of card 1 */
    sp_ib_pair(&hosts[0], &hosts[1], &p);
    CHECK(p.n == 1 && p.low[0] == 1 && p.high[0] == 0, "%u rails: %u-%u", p.n, p.low[0], p.high[0]);
}

/* Ports of a rank: of each character one. a, b, c: RoCE in subnet 10.0.0, 10.0.1, 10.0.2; I: InfiniBand. A, B, C: as a,
 * b, c, but near. */
static sp_ib_address ports_of(const char *text, uint8_t host)
{
    sp_ib_address a = {.n = (uint32_t)strlen(text), .n_qps = host};
    for (uint32_t i = 0; i < a.n; i++) {
        uint8_t *gid = a.ports[i].gid;
        a.ports[i].network = text[i] == 'I' ? SP_IB_INFINIBAND : SP_IB_ROCE_IPV4;
        gid[text[i] == 'I' ? 0 : 10] = 0xff;
        a.ports[i].near = text[i] >= 'A' && text[i] <= 'C';
        gid[14] = text[i] == 'I' ? 0 : (uint8_t)((text[i] - 'a') & 31);
        gid[15] = (uint8_t)(host * 16 + i);
    }
    return a;
}

static void test_pairs(void)
{
    static const struct {
        const char *low, *high, *want; /* want: pairs of port numbers */
    } cases[] = {{"a", "a", "00"},
                 {"a", "b", "00"},
                 {"ab", "ab", "0011"},
                 {"ab", "ba", "0110"},
                 {"ab", "b", "10"},
                 {"a", "I", ""},
                 {"aI", "I", "10"},
                 {"aa", "aaaa", "0011"},
                 {"abc", "abc", "001122"},
                 {"ab", "bc", "10"},
                 {"aaaa", "aaaa", "00112233"},
                 {"a", "bc", "00"},
                 {"IaIa", "Ia", "0011"},
                 {"Aa", "aA", "01"},
                 {"Aab", "Aab", "00"},
                 {"AAb", "AAb", "0011"},
                 {"A", "B", "00"},
                 {"Ab", "Ba", "0110"},
                 {"Ab", "Bc", "10"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_ib_address low = ports_of(cases[i].low, 1), high = ports_of(cases[i].high, 2);
        sp_ib_pairing p;
        char got[2 * SP_IB_RAILS_MAX + 1] = "";
        sp_ib_pair(&low, &high, &p);
        for (uint32_t r = 0; r < p.n; r++)
            snprintf(got + 2 * r, 3, "%d%d", p.low[r] % 10, p.high[r] % 10);
        CHECK(p.n_qps == 1, "%u queue pairs: one rank wants 1, the other 2", p.n_qps);
        CHECK(strcmp(got, cases[i].want) == 0, "%s and %s: got \"%s\", wanted \"%s\"", cases[i].low,
              cases[i].high, got, cases[i].want);
    }
}

/* The rate of a pair counts the ports that its rails join. Each port of the one rank has 100 Mbit/s. */
static void test_rates(void)
{
    static const struct {
        const char *mine, *theirs;
        uint32_t its_mbps, want;
    } cases[] = {{"a", "a", 100, 100},
                 {"ab", "ab", 200, 200},
                 {"ab", "bc", 200, 100}, /* each has a port in a subnet of its own */
                 {"abc", "a", 400, 100}, /* the sums' smaller one is 300 */
                 {"abcb", "bbaa", 160, 120},
                 {"Aab", "Aab", 300, 100}, /* one port is near at both */
                 {"aa", "aa", 0, 0},
                 {"a", "I", 100, 0},
                 {"aaaa", "aaaa", UINT32_MAX, 400}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sp_ib ep = {.n_devices = (int)strlen(cases[i].mine), .address = ports_of(cases[i].mine, 1)};
        sp_ib_address theirs = ports_of(cases[i].theirs, 2);
        uint8_t bytes[SP_ADDRESS_BYTES_MAX] = {0};
        size_t head = sp_ib_write_address(&theirs, bytes);
        uint32_t got, back;
        for (int d = 0; d < ep.n_devices; d++)
            ep.devices[d].speed_mbps = 100;
        got = sp_transport_ib.pair_mbps((sp_endpoint *)&ep, bytes, head, cases[i].its_mbps);
        back = sp_ib_rails_mbps(&theirs, cases[i].its_mbps, &ep.address, 100 * ep.address.n);
        CHECK(got == cases[i].want && back == got, "%s and %s: got %u, the peer %u, wanted %u", cases[i].mine,
              cases[i].theirs, got, back, cases[i].want);
        CHECK(sp_transport_ib.pair_mbps((sp_endpoint *)&ep, bytes, 5, 100) == 0, "no address");
    }
}

static void test_keep(void)
{
    static const struct {
        int rank, n, n_rails, distances[4];
        const char *want; /* indexes */
    } cases[] = {
        {0, 4, 2, {1, 0, 0, 1}, "12"},  {1, 4, 2, {1, 0, 0, 1}, "21"},   {0, 4, 3, {1, 0, 0, 1}, "120"},
        {1, 4, 3, {1, 0, 0, 1}, "213"}, {5, 4, 4, {1, 0, 0, 1}, "1203"}, {1, 3, 4, {3, 3, 3}, "012"},
        {2, 3, 1, {3, 3, 3}, "2"},      {7, 4, 1, {2, 3, 0, 1}, "2"},    {0, 1, 4, {2}, "0"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int kept[SP_IB_DEVICES_MAX], n;
        char got[16] = "";
        n = sp_ib_keep(cases[i].rank, cases[i].distances, cases[i].n, cases[i].n_rails, kept);
        for (int k = 0; k < n; k++)
            got[k] = (char)('0' + kept[k]);
        CHECK(strcmp(got, cases[i].want) == 0, "case %zu: got \"%s\", wanted \"%s\"", i, got, cases[i].want);
    }
}

/* Each place of a ring belongs to one queue pair; each queue pair carries its places in order, again and again. */
static void test_parts(void)
{
    for (uint32_t n = 1; n <= SP_IB_QPS_MAX; n++) {
        uint64_t next[SP_IB_QPS_MAX];
        uint32_t most = 0, least = SP_SEGMENTS;
        for (uint32_t q = 0; q < n; q++) {
            uint32_t places = (uint32_t)(sp_ib_qp_first(n, q + 1) - sp_ib_qp_first(n, q));
            next[q] = sp_ib_qp_first(n, q);
            most = places > most ? places : most;
            least = places < least ? places : least;
        }
        CHECK(sp_ib_qp_first(n, 0) == 0 && sp_ib_qp_first(n, n) == SP_SEGMENTS && least >= 1 &&
                  most - least <= 1,
              "%u queue pairs: %u to %u places", n, least, most);
        for (uint64_t k = 0; k < 100; k++) {
            uint32_t q = sp_ib_qp_of(n, k);
            CHECK(q < n && next[q] == k, "%u queue pairs: segment %d: queue pair %u expects %d", n, (int)k, q,
                  (int)next[q < n ? q : 0]);
            next[q] = sp_ib_qp_next(n, k);
        }
    }
}

/* Numbers have 28 bits: the tests are near their wrap-around too. */
static sp_ib_expected near(uint64_t next)
{
    sp_ib_expected want = {.n_queues = 2, .segment_bytes = 4096};
    want.queues[1].next = next;
    want.queues[1].announced = next + 3;
    want.queues[1].credit = next;
    want.queues[1].n_posted = next - 2;
    return want;
}

static void test_writes(void)
{
    static const uint64_t starts[] = {5, (1u << 28) - 1, (UINT64_C(3) << 28) - 14, UINT64_C(1) << 40};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        uint64_t k = starts[i];
        sp_ib_expected want = near(k);
        sp_ib_arrival a;
#define READ(kind, queue, number, bytes)                                                                     \
    sp_ib_read_imm(&want, sp_ib_imm((kind), (queue), (number)), (bytes), &a)
        CHECK(READ(SP_IB_DATA, 1, k, 4096) == SPCCL_OK && a.kind == SP_IB_DATA && a.queue == 1, "segment %zu",
              i);
        CHECK(READ(SP_IB_DATA, 1, k, 16) == SPCCL_OK, "a short segment");
        CHECK(READ(SP_IB_DATA, 1, k + 1, 16) == SPCCL_ERR_FORMAT, "a segment later");
        CHECK(READ(SP_IB_DATA, 1, k - 1, 16) == SPCCL_ERR_FORMAT, "a segment again");
        CHECK(READ(SP_IB_DATA, 2, k, 16) == SPCCL_ERR_FORMAT, "queue 2");
        CHECK(READ(SP_IB_DATA, 1, k, 0) == SPCCL_ERR_FORMAT, "no bytes");
        CHECK(READ(SP_IB_DATA, 1, k, 24) == SPCCL_ERR_FORMAT, "24 bytes");
        CHECK(READ(SP_IB_DATA, 1, k, 4112) == SPCCL_ERR_FORMAT, "more than a segment");
        CHECK(READ(SP_IB_CREDIT, 1, k + 14, 0) == SPCCL_OK && a.credit == k + 14, "a credit");
        CHECK(READ(SP_IB_CREDIT, 1, k + 15, 0) == SPCCL_ERR_FORMAT, "more than the ring holds");
        CHECK(READ(SP_IB_CREDIT, 1, k, 0) == SPCCL_ERR_FORMAT, "the same credit");
        CHECK(READ(SP_IB_CREDIT, 1, k - 1, 0) == SPCCL_ERR_FORMAT, "less credit");
        CHECK(READ(SP_IB_CREDIT, 1, k + 4, 16) == SPCCL_ERR_FORMAT, "a credit with bytes");
        CHECK(READ(SP_IB_PROBE, 0, SP_IB_PROBE_NUMBER, 16) == SPCCL_ERR_FORMAT, "a probe after start-up");
        want.probe = true;
        CHECK(READ(SP_IB_PROBE, 0, SP_IB_PROBE_NUMBER, 16) == SPCCL_OK && a.kind == SP_IB_PROBE, "a probe");
        CHECK(READ(SP_IB_PROBE, 0, 1, 16) == SPCCL_ERR_FORMAT, "another probe");
        want.queues[1].announced = k;
        CHECK(READ(SP_IB_DATA, 1, k, 16) == SPCCL_ERR_FORMAT, "a segment without credit");
        CHECK(sp_ib_read_imm(&want, 0xffffffff, 16, &a) == SPCCL_ERR_FORMAT, "kind 3");
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"connect_info", test_connect_info},
                                             {"bad_connect_info", test_bad_connect_info},
                                             {"result", test_result},
                                             {"parts", test_parts},
                                             {"address", test_address},
                                             {"gids", test_gids},
                                             {"two_subnets", test_two_subnets},
                                             {"pairs", test_pairs},
                                             {"rates", test_rates},
                                             {"keep", test_keep},
                                             {"writes", test_writes},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
