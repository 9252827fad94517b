/* test_link_rate.c - when rates change the order of transports: as a table, and in groups over the test plugin, whose
 * devices have a rate below or above that of an interface of tcp; and between two transports of this file, of which one
 * knows that a pair uses some of its cards only. */
#include "core/base/bits.h"
#include "core/contract/link_rate.h"
#include "core/run/boot_links.h"
#include "spccl.h"
#include "test.h"

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void test_table(void)
{
    static const struct {
        uint32_t mbps[4];
        int n, want;
        const char *what;
    } cases[] = {{{0, 0, 0}, 3, 0, "all unknown"},
                 {{0, 100000}, 2, 0, "the first unknown"},
                 {{10000, 0}, 2, 0, "the second unknown"},
                 {{10000, 100000}, 2, 1, "tcp of 100 Gbit/s, plugin of 10"},
                 {{10000, 20000}, 2, 0, "twice"},
                 {{10000, 20001}, 2, 1, "more than twice"},
                 {{100000, 10000}, 2, 0, "slower"},
                 {{10000, 0, 100000}, 3, 2, "past one that is unknown"},
                 {{10000, 30000, 50000}, 3, 1, "the third is not twice the second"},
                 {{10000, 30000, 70000}, 3, 2, "each more than twice the one before"},
                 {{0, 10000, 40000}, 3, 0, "unknown stays first"},
                 {{3000000000u, 4000000000u}, 2, 0, "no overflow"},
                 {{1, 4000000000u}, 2, 1, "the highest"},
                 {{5}, 1, 0, "one"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int got = sp_rate_choose(cases[i].mbps, cases[i].n, true);
        CHECK(got == cases[i].want, "%s: got %d, wanted %d", cases[i].what, got, cases[i].want);
        CHECK(sp_rate_choose(cases[i].mbps, cases[i].n, false) == 0, "%s: rates must not decide",
              cases[i].what);
    }
    CHECK(sp_rate_of_pair(0, 5) == 0 && sp_rate_of_pair(5, 0) == 0 && sp_rate_of_pair(7, 5) == 5,
          "the rate of a pair");
}

/* ---- a transport that knows the rate of each pair ---- */

static bool fake_can_reach(sp_endpoint *ep, const uint8_t *address, size_t bytes, char *why, size_t why_cap)
{
    (void)ep;
    (void)address;
    (void)bytes;
    snprintf(why, why_cap, "always");
    return true;
}

static spccl_status fake_add_peer(sp_endpoint *ep, int peer, const uint8_t *address, size_t bytes)
{
    (void)ep;
    (void)peer;
    (void)address;
    (void)bytes;
    return SPCCL_OK;
}

static spccl_status fake_connect_step(sp_endpoint *ep)
{
    (void)ep;
    return SPCCL_OK;
}

static size_t fake_message_max(sp_endpoint *ep)
{
    (void)ep;
    return 4096;
}

static void fake_close(sp_endpoint *ep)
{
    (void)ep;
}

/* Of three cards one carries the pair. */
static uint32_t third_of(sp_endpoint *ep, const uint8_t *address, size_t bytes, uint32_t its_mbps)
{
    (void)ep;
    CHECK(bytes == 1 && address[0] == 'A', "%zu bytes of an address", bytes);
    return its_mbps / 3;
}

/* What the peer publishes: `n` transports, each with an address of one byte. */
static void publish(sp_published *p, const sp_transport *const *transports, const uint32_t *mbps, uint32_t n)
{
    size_t at = SP_BOOT_HEAD_BYTES;
    memset(p->blob, 0, sizeof p->blob);
    sp_store_le32(p->blob + 16, n);
    sp_store_le32(p->blob + SP_BOOT_RATES_AT, 1);
    for (uint32_t i = 0; i < n; i++) {
        size_t name_bytes = strlen(transports[i]->name);
        sp_store_le32(p->blob + at, (uint32_t)name_bytes);
        memcpy(p->blob + at + 4, transports[i]->name, name_bytes);
        at += 4 + name_bytes;
        sp_store_le32(p->blob + at, mbps[i]);
        sp_store_le32(p->blob + at + 4, 1);
        p->blob[at + 8] = 'A';
        at += 9;
    }
    p->bytes = at;
}

/* 300 Gbit/s over three cards, or 250 Gbit/s: the pair uses one of the three. */
static void test_pair(void)
{
    static const uint32_t mbps[] = {300000, 250000};
    for (int knows = 0; knows <= 1; knows++) {
        const sp_transport later = {.name = "later",
                                    .can_reach = fake_can_reach,
                                    .add_peer = fake_add_peer,
                                    .connect_step = fake_connect_step,
                                    .message_max = fake_message_max,
                                    .close = fake_close};
        sp_transport cards = later;
        const sp_transport *both[] = {&cards, &later};
        sp_link peers[2] = {{.transport = NULL}};
        sp_published all[2];
        const sp_boot_config config = {.world_size = 2, .rates_decide = true};
        sp_links links = {.world_size = 2,
                          .peers = peers,
                          .n_endpoints = 2,
                          .transports = {&cards, &later},
                          .endpoints = {(sp_endpoint *)&all[0], (sp_endpoint *)&all[1]},
                          .rates_mbps = {mbps[0], mbps[1]},
                          .message_max = 4096};
        cards.name = "cards";
        cards.pair_mbps = knows ? third_of : NULL;
        publish(&all[1], both, mbps, 2);
        CHECK_OK(sp_boot_connect(&links, &config, all));
        CHECK(peers[1].transport == (knows ? &later : &cards) && links.n_endpoints == 1, "knows %d: \"%s\"",
              knows, peers[1].text);
        CHECK(!knows || strcmp(peers[1].text, "later: always, 250.0 Gbit/s; cards has 100.0") == 0, "\"%s\"",
              peers[1].text);
    }
}

/* ---- groups: the interface of tcp is one end of a virtual cable, whose driver says 10 Gbit/s ---- */

static const struct scenario {
    const char *speed;          /* of the plugin's device, in Mbit/s */
    const char *transports[2];  /* of each rank; NULL: the default */
    const char *start, *within; /* of the link's text, at both ranks */
} scenarios[] = {
    {"1000", {NULL}, "tcp: 10.0 Gbit/s", "plugin Test Sockets has 1.0"},
    {"5000", {NULL}, "ncclnet: plugin Test Sockets", "sock0"},
    {"4999", {NULL}, "tcp: 10.0 Gbit/s", "has 5.0"},
    {"40000", {NULL}, "ncclnet: plugin Test Sockets", "sock0"},
    {"0", {NULL}, "ncclnet: plugin Test Sockets", "sock0"},
    {"1000", {"ncclnet,tcp", "ncclnet,tcp"}, "ncclnet: plugin Test Sockets", "sock0"},
    {"1000", {NULL, "ncclnet,tcp"}, "ncclnet: plugin Test Sockets", "sock0"},
    {"1000", {"ncclnet"}, "ncclnet: plugin Test Sockets", "sock0"},
};
#define N_SCENARIOS (sizeof scenarios / sizeof *scenarios)

/* Rank 0 makes the id, as that starts a thread: this process, which forks the ranks, has none. */
struct shared {
    spccl_unique_id id;
    atomic_bool made;
};

static void join(const struct scenario *s, struct shared *shared, int rank)
{
    float in[1000], out[1000];
    const char *text = "";
    spccl_comm *comm = NULL;
    setenv("SPCCL_HOST_ID", rank == 0 ? "a" : "b", 1);
    setenv("TEST_NET_SPEED", s->speed, 1);
    if (s->transports[rank] != NULL)
        setenv("SPCCL_TRANSPORTS", s->transports[rank], 1);
    if (rank == 0) {
        CHECK_OK(spccl_get_unique_id(&shared->id));
        atomic_store(&shared->made, true);
    }
    for (int64_t start_ms = now_ms(); !atomic_load(&shared->made) && now_ms() - start_ms < 30000;)
        sleep_ms(1);
    CHECK(atomic_load(&shared->made), "rank 0 made no id within 30 s");
    CHECK_OK(spccl_comm_init_rank(&shared->id, rank, 2, NULL, &comm));
    if (comm == NULL)
        return;
    CHECK_OK(spccl_comm_describe_link(comm, 1 - rank, &text));
    CHECK(strncmp(text, s->start, strlen(s->start)) == 0 && strstr(text, s->within) != NULL,
          "speed %s, rank %d: \"%s\"", s->speed, rank, text);
    for (int i = 0; i < 1000; i++)
        in[i] = i % 7 == 0 ? (float)(i + rank) : 0.0f;
    CHECK_OK(spccl_all_reduce(comm, in, out, 1000, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    for (int i = 0; i < 1000; i++)
        CHECK(out[i] == (i % 7 == 0 ? (float)(2 * i + 1) : 0.0f), "element %d: %g", i, (double)out[i]);
    CHECK_OK(spccl_comm_destroy(comm));
}

static void run_scenario(const struct scenario *s)
{
    struct shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[2];
    fflush(stdout);
    for (int rank = 0; rank < 2; rank++)
        if ((pids[rank] = fork()) == 0) {
            test_n_failed = 0;
            join(s, shared, rank);
            exit(test_n_failed != 0);
        }
    for (int rank = 0; rank < 2; rank++) {
        int status = -1;
        CHECK(waitpid(pids[rank], &status, 0) == pids[rank] && WIFEXITED(status) && WEXITSTATUS(status) == 0,
              "speed %s: rank %d failed (%x)", s->speed, rank, status);
    }
    munmap(shared, sizeof *shared);
}

/* This process moves to a network of its own. False: it may not. */
static bool enter_network(void)
{
    return (unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0) &&
           system("{ ip link set lo up && ip link add ra type veth peer name rb &&"
                  " ip addr add 10.99.0.1/24 dev ra && ip link set ra up && ip link set rb up; }"
                  " 2>/dev/null && i=0 && until ip link show ra | grep -q 'state UP'; do"
                  " sleep 0.05; i=$((i + 1)); [ $i -lt 600 ] || exit 1; done") == 0;
}

static void test_groups(void)
{
    if (!enter_network()) {
        CHECK(getenv("CI") == NULL, "this process cannot make a network: errno %d", errno);
        printf("groups: skipped, as this process cannot make a network\n");
        return;
    }
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 1);
    setenv("SPCCL_TCP_ADDR", "ra", 1);
    for (size_t i = 0; i < N_SCENARIOS; i++)
        run_scenario(&scenarios[i]);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"table", test_table}, {"pair", test_pair}, {"groups", test_groups}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
