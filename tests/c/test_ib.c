/* test_ib.c - devices and peers that misbehave, over transport ib. tools/softroce.py runs it. The second argument is the
 * network interface of a device: cases link and silent take it down, and let it lose all packets. */
#include "captured_log.h"
#include "endpoints.h"
#include "transport/net/ib/ib.h"

#include <errno.h>
#include <sys/resource.h>

static const struct environment processes = {"ib", true};

/* ---- errors name device, port and peer ---- */

static void check_names_device(const struct member *m, int device_number, spccl_status wanted,
                               spccl_status got, const char *what)
{
    const char *text = spccl_last_error();
    char device[100], rank[24];
    sp_ib_device_text(&sp_ib_self(m->ep)->devices[device_number], device, sizeof device);
    snprintf(rank, sizeof rank, "rank %d ", 1 - m->rank);
    CHECK(got == wanted, "rank %d: got %d, wanted %d: %s", m->rank, (int)got, (int)wanted, text);
    CHECK(strstr(text, device) != NULL && strstr(text, rank) != NULL && strstr(text, what) != NULL,
          "\"%s\" does not name \"%s\", \"%s\" and \"%s\"", text, device, rank, what);
}

/* Send until the peer counts as gone. */
static spccl_status send_until_gone(struct member *m)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    spccl_status st = SPCCL_OK;
    while ((st == SPCCL_OK || st == SPCCL_AGAIN) && !sp_deadline_passed(deadline_ns)) {
        st = try_send(m, 1 - m->rank, 0, 5000, 1);
        (void)progress(m);
    }
    return st;
}

/* Rank 1: sleep until rank 0 counts as gone. */
static spccl_status await_end(struct member *m)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    const void *unused;
    size_t bytes;
    spccl_status st;
    while ((st = m->t->peek(m->ep, 0, 0, &unused, &bytes)) == SPCCL_AGAIN &&
           !sp_deadline_passed(deadline_ns)) {
        (void)progress(m);
        atomic_store(&m->shared->step, sp_ib_self(m->ep)->base.peers[0].failed_status == SPCCL_ERR_FORMAT);
        CHECK(sleep_armed(m), "nothing woke rank 1");
    }
    return st;
}

/* Rank 0 writes with a key that the peer did not give. */
static void wrong_key(struct member *m)
{
    if (!join_group(m))
        return;
    if (m->rank == 0) {
        sp_ib_self(m->ep)->peers[1].theirs.rings[0].rkey[0] ^= 0x5500;
        check_names_device(m, 0, SPCCL_ERR_PEER, send_until_gone(m), "remote access error");
    } else {
        spccl_status st = await_end(m);
        CHECK(st == SPCCL_ERR_PEER, "%d: %s", (int)st, spccl_last_error());
    }
    barrier(m, 1);
    leave_group(m);
}

static void test_wrong_key(void)
{
    struct member m = make_group(&processes, 2, wrong_key);
    run_group(&processes, &m);
}

/* Rank 0 writes something that no rank writes; `kind` says what. Rank 1 names it, also if rank 0 leaves soon after. */
enum { BAD_WRITES = 5, BAD_WRITE_LEAVES = BAD_WRITES };

static void bad_write(struct member *m)
{
    static const uint32_t bad[] = {0xffffffff, 0x70000000, 0x5, 0x40000007, 0x80000001, 0xffffffff};
    if (!join_group(m))
        return;
    if (m->rank == 0) {
        struct sp_ib_peer *p = &sp_ib_self(m->ep)->peers[1];
        sp_ib_write w = {
            .imm = bad[m->kind], .to = p->theirs.rings[0].address, .rkey = p->theirs.rings[0].rkey[0]};
        CHECK_OK(sp_ib_link_write(p->qps[0].link, &w));
        if (m->kind == BAD_WRITE_LEAVES) {
            await_atomic(&m->shared->step, 1);
            leave_group(m);
        }
    } else {
        check_names_device(m, 0, SPCCL_ERR_FORMAT, await_end(m), "wanted");
    }
    barrier(m, 1);
    if (m->ep != NULL)
        leave_group(m);
}

static void test_bad_writes(void)
{
    for (int kind = 0; kind <= BAD_WRITE_LEAVES; kind++) {
        struct member m = make_group(&processes, 2, bad_write);
        m.kind = kind;
        run_group(&processes, &m);
    }
}

/* Credits that come while rank 0 does nothing are taken by its arm. It then sends, so that something wakes it. */
static void credit(struct member *m)
{
    enum { N = 2 * SP_SEGMENTS, BYTES = 4096 - SP_RECORD_HEAD_BYTES };
    struct pollfd p;
    spccl_status st = SPCCL_AGAIN;
    if (!join_group(m))
        return;
    if (m->rank == 0) {
        for (uint64_t i = 0; i < N; i++)
            send_now(m, 1, 0, BYTES, i);
        CHECK(!is_flushed(m, 1), "rank 1 gave credit for more than its ring holds");
    }
    barrier(m, 1);
    if (m->rank == 1) {
        for (uint64_t i = 0; i < SP_SEGMENTS; i++)
            CHECK_OK(take_now(m, 0, 0, BYTES, i));
        atomic_store(&m->shared->step, 1);
    } else {
        await_atomic(&m->shared->step, 1);
        usleep(200000); /* the credits arrive at the device */
        for (int i = 0; i < 10 && st == SPCCL_AGAIN; i++)
            st = m->t->arm(m->ep);
        p = (struct pollfd){.fd = m->t->wait_fd(m->ep), .events = POLLIN};
        CHECK(st == SPCCL_OK && (is_flushed(m, 1) || poll(&p, 1, PATIENCE_MS / 3) == 1),
              "nothing was sent, so nothing wakes rank 0");
        if (st == SPCCL_OK)
            m->t->disarm(m->ep);
        flush_now(m, 1);
    }
    for (uint64_t i = SP_SEGMENTS; m->rank == 1 && i < N; i++)
        CHECK_OK(take_now(m, 0, 0, BYTES, i));
    barrier(m, 2);
    leave_group(m);
}

static void test_credit(void)
{
    struct member m = make_group(&processes, 2, credit);
    run_group(&processes, &m);
}

/* ---- start-up ---- */

/* There must be one warning with all the words, or none if there are no words. */
static void check_log(const char *const words[4])
{
    char text[4096];
    size_t n;
    end_log(text, sizeof text);
    n = strlen(text);
    CHECK(words[0] == NULL ? n == 0 : n > 0 && strchr(text, '\n') == text + n - 1,
          "wanted %d lines, got \"%s\"", words[0] != NULL, text);
    for (int i = 0; i < 4 && words[i] != NULL; i++)
        CHECK(strstr(text, words[i]) != NULL, "\"%s\" is not in: %s", words[i], text);
}

/* A device that SPCCL_IB_DEVICE names and that is not there: no rank can reach another, and the reason names it. */
static void no_device(struct member *m)
{
    char why[200];
    setenv("SPCCL_IB_DEVICE", "no_such_device", 1);
    setenv("SPCCL_LOG", "off", 1);
    if (!open_member(m))
        return;
    await_atomic(&m->shared->n_published, m->n);
    CHECK(!m->t->can_reach(m->ep, m->shared->address[1 - m->rank].bytes,
                           m->shared->address[1 - m->rank].n_bytes, why, sizeof why) &&
              strstr(why, "no_such_device") != NULL,
          "%s", why);
    leave_group(m);
}

/* Rank 1 may lock memory for one ring only. Both ranks say why they have no connection. */
static void no_memory(struct member *m)
{
    struct rlimit limit = {.rlim_cur = 1 << 16, .rlim_max = 1 << 16};
    spccl_status st;
    if (m->rank == 1) {
        CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0, "setrlimit: errno %d", errno);
        CHECK(geteuid() != 0 || setresuid(65534, 65534, 65534) == 0, "setresuid: errno %d", errno);
    }
    if (!open_member(m))
        return;
    st = connect_member(m);
    CHECK(st == SPCCL_ERR_UNREACHABLE && strstr(spccl_last_error(), "ulimit -l") != NULL &&
              strstr(spccl_last_error(), "may lock 64 KiB") != NULL,
          "rank %d: %d: %s", m->rank, (int)st, spccl_last_error());
    barrier(m, 1);
    leave_group(m);
}

/* A device that cannot be opened: tcp carries the pair, or an error says why. */
static void no_open(struct member *m)
{
    spccl_status st;
    if (!open_member(m))
        return;
    if (m->rank == 1)
        sp_ib_self(m->ep)->devices[0].name[0] = 'X';
    st = connect_member(m);
    CHECK(st == SPCCL_ERR_UNREACHABLE && strstr(spccl_last_error(), "tcp is not among") != NULL &&
              strstr(spccl_last_error(), "device Xxe1") != NULL,
          "rank %d: %d: %s", m->rank, (int)st, spccl_last_error());
    barrier(m, 1);
    leave_group(m);
}

/* Rank 1's device cannot be opened: both ranks use tcp, and say so once. */
static void by_tcp(struct member *m)
{
    static const char *const words[2][4] = {{"tcp is used in place of ib with rank 1", "device Xxe"},
                                            {"tcp is used in place of ib with rank 0", "device Xxe"}};
    char text[400];
    if (!open_member(m))
        return;
    if (m->rank == 1)
        sp_ib_self(m->ep)->devices[0].name[0] = 'X';
    begin_log();
    CHECK_OK(connect_member(m));
    check_log(words[m->rank]);
    describe_peer(m, 1 - m->rank, text, sizeof text);
    CHECK(strstr(text, "tcp, as ib failed") != NULL, "%s", text);
    send_now(m, 1 - m->rank, 1, 3000, 5);
    CHECK_OK(take_now(m, 1 - m->rank, 1, 3000, 5));
    flush_now(m, 1 - m->rank);
    barrier(m, 1);
    leave_group(m);
}

static void test_start(void)
{
    static void (*const members[])(struct member *) = {no_device, no_memory, no_open, by_tcp};
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        struct member m = make_group(&processes, 2, members[i]);
        m.tcp_too = members[i] == by_tcp;
        run_group(&processes, &m);
    }
}

/* ---- a link that goes down ---- */

static const char *interface;

/* Run a command about the interface: "ip link set %s down". */
static void run_command(const char *before, const char *after)
{
    char command[240];
    snprintf(command, sizeof command, "%s %s %s", before, interface, after);
    CHECK(system(command) == 0, "%s: errno %d", command, errno);
}

/* The network carries nothing from one of the devices, as behind a firewall: the probes show it. Kind 0 is a group without
 * that, so that the kernel knows the peers' addresses. */
static void silent(struct member *m)
{
    spccl_status st;
    if (!open_member(m))
        return;
    st = connect_member(m);
    CHECK(st == (m->kind == 0 ? SPCCL_OK : SPCCL_ERR_UNREACHABLE), "kind %d: %d: %s", m->kind, (int)st,
          spccl_last_error());
    CHECK(m->kind == 0 || (strstr(spccl_last_error(), "device rxe") != NULL &&
                           strstr(spccl_last_error(), "a write failed") != NULL),
          "%s", spccl_last_error());
    barrier(m, 1);
    leave_group(m);
}

static void test_silent(void)
{
    struct member m = make_group(&processes, 2, silent);
    if (interface == NULL)
        return;
    run_group(&processes, &m);
    m = make_group(&processes, 2, silent);
    m.kind = 1;
    run_command("tc qdisc replace dev", "root netem loss 100%");
    run_group(&processes, &m);
    run_command("tc qdisc del dev", "root");
}

static void link_down(struct member *m)
{
    if (!join_group(m))
        return;
    send_now(m, 1 - m->rank, 0, 100, 1);
    CHECK_OK(take_now(m, 1 - m->rank, 0, 100, 1));
    flush_now(m, 1 - m->rank);
    barrier(m, 1);
    if (m->rank == 0)
        run_command("ip link set", "down");
    barrier(m, 2);
    check_names_device(m, 0, SPCCL_ERR_PEER, send_until_gone(m), "a write failed");
    barrier(m, 3);
    if (m->rank == 0)
        run_command("ip link set", "up"); /* rxe's destroy_qp waits 10 s for packets that cannot leave */
    barrier(m, 4);
    leave_group(m);
}

static void test_link(void)
{
    struct member m = make_group(&processes, 2, link_down);
    if (interface == NULL)
        return;
    setenv("SPCCL_LOG", "off", 1);
    run_group(&processes, &m);
}

/* ---- rails: rank 0 has rxe0, rxe2 and rxe4, rank 1 has rxe1, rxe3 and rxe5. tests.sh makes them ---- */

/* ONE_RAIL: rxe2 and rxe3 have no active port. FEWER: rank 1 uses rxe1 alone. NOT_OPENED: rank 1 cannot open rxe3.
 * SILENT: the network between rxe2 and rxe3 carries nothing. TAKEN: transport ncclnet of rank 1's process uses vd, the
 * interface of rxe3. LOST: rank 0's probe on the first rail is lost without an error. */
enum { TWO_RAILS, ONE_RAIL, FEWER, NOT_OPENED, SILENT, TAKEN, LOST, THREE_RAILS, N_KINDS };

static bool loses_probe; /* the next one on the first rail */

bool __real_sp_ib_send_probe(struct sp_ib *ep, int peer, uint32_t qp);
bool __wrap_sp_ib_send_probe(struct sp_ib *ep, int peer, uint32_t qp);
bool __wrap_sp_ib_send_probe(struct sp_ib *ep, int peer, uint32_t qp)
{
    if (!loses_probe || qp != 0)
        return __real_sp_ib_send_probe(ep, peer, qp);
    loses_probe = false;
    ep->peers[peer].qps[qp].probe_sent = true;
    return true;
}

static bool join_rails(struct member *m)
{
    static const char *const lists[2][2] = {{"rxe0,rxe2", "rxe0,rxe2,rxe4"}, {"rxe1,rxe3", "rxe1,rxe3,rxe5"}};
    static const char *const words[N_KINDS][2][4] = {
        [ONE_RAIL] = {{"SPCCL_IB_DEVICE: not used: rxe2 port 1: not active"},
                      {"SPCCL_IB_DEVICE: not used: rxe3 port 1: not active"}},
        [FEWER] = {{"not all of this rank's 2 devices", "rank 1: it has fewer usable devices"}, {NULL}},
        [TAKEN] = {{"not all of this rank's 2 devices", "to rank 1", "device rxe3",
                    "transport ncclnet of this process uses this card"},
                   {"not all of this rank's 2 devices", "to rank 0", "device rxe3",
                    "transport ncclnet of this process uses this card"}},
        [NOT_OPENED] = {{"not all of this rank's 2 devices", "to rank 1", "device Xxe3"},
                        {"not all of this rank's 2 devices", "to rank 0", "device Xxe3"}},
        [LOST] = {{"not all of this rank's 2 devices", "to rank 1", "nothing came from rank"},
                  {"not all of this rank's 2 devices", "to rank 0", "nothing came from rank"}},
        [SILENT] = {{"not all of this rank's 2 devices", "to rank 1", "device rxe"},
                    {"not all of this rank's 2 devices", "to rank 0", "device rxe"}}};
    const char *holder;
    sp_nic card;
    bool joined;
    memset(&card, 0, sizeof card);
    snprintf(card.names[0], sizeof card.names[0], "vd");
    if (m->kind == TAKEN && m->rank == 1)
        CHECK(sp_nic_take("ncclnet", &card, &holder), "%s has vd", holder);
    setenv("SPCCL_IB_DEVICE",
           m->kind == FEWER && m->rank == 1 ? "rxe1" : lists[m->rank][m->kind == THREE_RAILS], 1);
    setenv("SPCCL_DEBUG_IB_RAILS", "4", 1);
    if (m->kind == TWO_RAILS || m->kind == THREE_RAILS)
        return join_group(m);
    loses_probe = m->kind == LOST && m->rank == 0;
    begin_log();
    joined = open_member(m);
    if (joined && m->kind == NOT_OPENED && m->rank == 1)
        sp_ib_self(m->ep)->devices[1].name[0] = 'X';
    joined = joined && connect_member(m) == SPCCL_OK;
    check_log(words[m->kind][m->rank]);
    CHECK(joined, "kind %d: %s", m->kind, spccl_last_error());
    return joined;
}

static uint64_t sent_bytes(const char *net)
{
    char path[100];
    unsigned long long n = 0;
    FILE *f;
    snprintf(path, sizeof path, "/sys/class/net/%s/statistics/tx_bytes", net);
    f = fopen(path, "re");
    CHECK(f != NULL && fscanf(f, "%llu", &n) == 1, "%s: errno %d", path, errno);
    if (f != NULL)
        fclose(f);
    return n;
}

/* Both directions at once; in the end each link has carried half of what rank 0 sent. */
static void share(struct member *m)
{
    enum { N = 1500, BYTES = 7000 };
    static const char *const nets[3] = {"va", "vc", "ve"};
    uint64_t n_sent = 0, n_taken = 0, before[3], after[3], sum;
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    char text[600];
    if (!join_rails(m))
        return;
    describe_peer(m, 1 - m->rank, text, sizeof text);
    CHECK((strstr(text, m->rank == 0 ? "rxe0" : "rxe1") != NULL) == (m->kind != LOST) &&
              (strstr(text, m->rank == 0 ? "rxe2" : "rxe3") != NULL) ==
                  (m->kind == TWO_RAILS || m->kind == THREE_RAILS || m->kind == LOST) &&
              (strstr(text, m->rank == 0 ? "rxe4" : "rxe5") != NULL) == (m->kind == THREE_RAILS),
          "kind %d: \"%s\"", m->kind, text);
    barrier(m, 1);
    for (int i = 0; i < 3; i++)
        before[i] = sent_bytes(nets[i]);
    barrier(m, 2);
    while ((n_sent < N || n_taken < N) && !sp_deadline_passed(deadline_ns)) {
        n_sent += n_sent < N && try_send(m, 1 - m->rank, 0, BYTES, n_sent) == SPCCL_OK;
        n_taken += n_taken < N && try_take(m, 1 - m->rank, 0, BYTES, n_taken) == SPCCL_OK;
        CHECK_OK(progress(m));
    }
    CHECK(n_sent == N && n_taken == N, "rank %d: %llu sent, %llu taken", m->rank, (unsigned long long)n_sent,
          (unsigned long long)n_taken);
    flush_now(m, 1 - m->rank);
    barrier(m, 3);
    for (int i = 0; i < 3; i++)
        after[i] = sent_bytes(nets[i]) - before[i];
    sum = after[0] + after[1] + after[2];
    if (m->rank == 0)
        printf("rails: %llu, %llu and %llu bytes\n", (unsigned long long)after[0],
               (unsigned long long)after[1], (unsigned long long)after[2]);
    if (m->kind == TWO_RAILS)
        CHECK(sum > (uint64_t)N * BYTES && after[0] * 20 > 9 * sum && after[1] * 20 > 9 * sum,
              "rails: %llu and %llu bytes", (unsigned long long)after[0], (unsigned long long)after[1]);
    if (m->kind == THREE_RAILS) /* 6, 5 and 5 of the 16 places of a ring */
        for (int i = 0; i < 3; i++)
            CHECK(after[i] * 4 > sum && after[i] * 5 < 2 * sum, "rail %d: %llu of %llu bytes", i,
                  (unsigned long long)after[i], (unsigned long long)sum);
    barrier(m, 4);
    leave_group(m);
}

/* The interface vc goes down after start-up. Rank 0 names the device that failed, rxe2, which is its second. */
static void rail_down(struct member *m)
{
    if (!join_rails(m))
        return;
    send_now(m, 1 - m->rank, 0, 100, 1);
    CHECK_OK(take_now(m, 1 - m->rank, 0, 100, 1));
    flush_now(m, 1 - m->rank);
    barrier(m, 1);
    if (m->rank == 0)
        run_command("ip link set", "down");
    barrier(m, 2);
    check_names_device(m, 1, SPCCL_ERR_PEER, send_until_gone(m), "a write failed");
    barrier(m, 3);
    if (m->rank == 0)
        run_command("ip link set", "up");
    barrier(m, 4);
    leave_group(m);
}

static void test_rails(void)
{
    struct member m = make_group(&processes, 2, share);
    if (interface == NULL || strcmp(interface, "vc") != 0)
        return;
    run_group(&processes, &m);
    setenv("SPCCL_LOG", "off", 1);
    m = make_group(&processes, 2, rail_down);
    run_group(&processes, &m);
    for (int kind = ONE_RAIL; kind <= THREE_RAILS; kind++) {
        if (kind == ONE_RAIL) /* the kernel tells rxe3 later that its link is down */
            run_command("ip link set", "down; timeout 30 sh -c 'until grep -q DOWN "
                                       "/sys/class/infiniband/rxe3/ports/1/state; do sleep 0.02; done'");
        if (kind == SILENT)
            run_command("tc qdisc replace dev", "root netem loss 100%");
        m = make_group(&processes, 2, share);
        m.kind = kind;
        if (kind == LOST) /* both wait for half of the time */
            m.config.deadline_ns = sp_deadline_in_ms(20000);
        run_group(&processes, &m);
        if (kind == ONE_RAIL)
            run_command("ip link set", "up");
        if (kind == SILENT)
            run_command("tc qdisc del dev", "root");
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"wrong_key", test_wrong_key}, {"bad_writes", test_bad_writes},
                                             {"credit", test_credit},       {"start", test_start},
                                             {"silent", test_silent},       {"link", test_link},
                                             {"rails", test_rails},         {NULL, NULL}};
    sp_ib_choice choice;
    sp_ib_choose(0, "", &choice);
    if (choice.n == 0) {
        printf("skipped: %s\n", choice.why);
        return 77;
    }
    interface = argc > 2 ? argv[2] : NULL;
    return test_main(cases, argc, argv);
}
