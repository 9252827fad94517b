/* test_transport.c - the contract of transport.h: the same cases on every transport, with ranks as threads
 * and as processes. test_transport_faults.c has ranks that die, and unproven connections. */
#include "endpoints.h"
#include "transport/local/spsc.h"

/* ---- messages of random sizes on all queues, both ways, between all ranks ---- */

#define N_MESSAGES share_of(400 / SLOWDOWN, 40)

static uint64_t message_seed(const struct member *m, int from, int to, int queue, int i)
{
    return mix(m->seed + (uint64_t)from * 1000003 + (uint64_t)to * 7919 + (uint64_t)queue * 104729 +
               (uint64_t)i * 1299709);
}

static size_t message_size(const struct member *m, uint64_t seed)
{
    size_t max = m->t->message_max(m->ep), n = (size_t)(mix(seed) % 100);
    if (n < 40)
        return 1 + (size_t)(seed % 100);
    if (n < 90)
        return 1 + (size_t)(seed % (max / 4));
    if (n < 95)
        return max - (size_t)(seed % 40);
    return 4096 - 40 + (size_t)(seed % 80);
}

struct counts {
    int sent[MEMBERS_CAP][SP_QUEUES_MAX], taken[MEMBERS_CAP][SP_QUEUES_MAX];
};

/* Try to send to and take from every queue once. True if a message moved. */
static bool exchange_once(struct member *m, struct counts *c, int *left)
{
    bool moved = false;
    for (int peer = 0; peer < m->n; peer++)
        for (int queue = 0; queue < m->config.n_queues && peer != m->rank; queue++) {
            int *sent = &c->sent[peer][queue], *taken = &c->taken[peer][queue];
            uint64_t out = message_seed(m, m->rank, peer, queue, *sent);
            uint64_t in = message_seed(m, peer, m->rank, queue, *taken);
            if (*sent < N_MESSAGES && try_send(m, peer, queue, message_size(m, out), out) == SPCCL_OK) {
                moved = true;
                ++*sent;
                --*left;
            }
            if (*taken < N_MESSAGES && try_take(m, peer, queue, message_size(m, in), in) == SPCCL_OK) {
                moved = true;
                ++*taken;
                --*left;
            }
        }
    return moved;
}

static void exchange(struct member *m)
{
    struct counts c = {0};
    int left = 2 * N_MESSAGES * m->config.n_queues * (m->n - 1);
    bool sleepy = (m->seed >> m->rank) % 2 == 1, fine = true;
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS * SLOWDOWN);
    if (!join_group(m))
        return;
    CHECK(m->t->message_max(m->ep) >= m->config.queue_bytes / 4, "message_max");
    while (left > 0 && fine && !sp_deadline_passed(deadline_ns)) {
        bool moved = exchange_once(m, &c, &left);
        CHECK_OK(progress(m));
        if (!moved && sleepy)
            fine = sleep_armed(m);
        else if (!moved)
            sched_yield();
    }
    CHECK(left == 0, "%s: rank %d of %d: %d messages left%s", m->t->name, m->rank, m->n, left,
          fine ? "" : ", asleep");
    CHECK(m->t->memory_bytes(m->ep) > 0, "no memory is counted");
    for (int peer = 0; peer < m->n; peer++)
        if (peer != m->rank)
            flush_now(m, peer);
    leave_group(m); /* at once: what was sent must still arrive */
}

static void test_exchange(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++)
        for (int n = 2; n <= 5; n++) {
            struct member m = make_group(&environments[g], n, exchange);
            m.config.n_queues = 1 + (int)(test_rand() % SP_QUEUES_MAX);
            m.config.queue_bytes = (size_t)1 << (16 + test_rand() % 3);
            m.config.n_sockets = (uint32_t[]){0, 1, 3, 16}[n % 4];
            run_group(&environments[g], &m);
        }
}

/* ---- edge sizes, reservations ---- */

static void reservations(struct member *m)
{
    void *space = NULL;
    const void *p;
    size_t bytes, max;
    if (!join_group(m))
        return;
    max = m->t->message_max(m->ep);
    if (m->rank == 0) {
        CHECK(m->t->reserve(m->ep, 1, 0, 0, &space) == SPCCL_ERR_BUG, "0 bytes");
        CHECK(m->t->reserve(m->ep, 1, 0, max + 1, &space) == SPCCL_ERR_BUG, "more than message_max");
        CHECK(m->t->commit(m->ep, 1, 0, 0) == SPCCL_ERR_BUG, "commit without reserve");
        CHECK(m->t->release(m->ep, 1, 0) == SPCCL_ERR_BUG, "release without peek");
        CHECK(m->t->peek(m->ep, 1, 0, &p, &bytes) == SPCCL_AGAIN, "a message that nobody sent");
    }
    /* Reserve the largest size first, then the exact size. The ring wraps at many positions. */
    for (int i = 0; i < 300 / SLOWDOWN; i++) {
        size_t n = i % 7 == 0 ? max : 1 + (size_t)(mix(m->seed + (uint64_t)i) % max);
        if (m->rank == 0) {
            while (m->t->reserve(m->ep, 1, 0, max, &space) == SPCCL_AGAIN)
                CHECK_OK(progress(m));
            if (i % 3 == 0)
                CHECK_OK(progress(m)); /* does not change the reservation */
            CHECK_OK(m->t->reserve(m->ep, 1, 0, n, &space));
            fill_message(space, n, (uint64_t)i);
            if (i % 3 == 1)
                CHECK_OK(progress(m));
            CHECK_OK(m->t->commit(m->ep, 1, 0, 0));
        } else {
            CHECK_OK(take_now(m, 0, 0, n, (uint64_t)i));
        }
    }
    if (m->rank == 0)
        flush_now(m, 1);
    barrier(m, 1);
    leave_group(m);
}

static void test_reservations(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++) {
        struct member m = make_group(&environments[g], 2, reservations);
        run_group(&environments[g], &m);
    }
}

/* A peeked message stays valid while later messages arrive. */
static void peeked(struct member *m)
{
    const void *first, *again;
    size_t bytes;
    if (!join_group(m))
        return;
    if (m->rank == 0) {
        for (uint64_t i = 0; i < 40; i++)
            send_now(m, 1, 0, 1000, i);
        flush_now(m, 1);
        barrier(m, 1);
    } else {
        while (m->t->peek(m->ep, 0, 0, &first, &bytes) == SPCCL_AGAIN)
            CHECK_OK(progress(m));
        barrier(m, 1);
        for (int i = 0; i < 100; i++)
            CHECK_OK(progress(m));
        CHECK_OK(m->t->peek(m->ep, 0, 0, &again, &bytes));
        CHECK(first == again && bytes == 1000 && is_message(first, bytes, 0), "the message moved");
        for (uint64_t i = 0; i < 40; i++)
            CHECK_OK(take_now(m, 0, 0, 1000, i));
    }
    barrier(m, 2);
    leave_group(m);
}

static void test_peeked(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++) {
        struct member m = make_group(&environments[g], 2, peeked);
        m.config.n_queues = 1;
        m.config.n_sockets = 1 + (uint32_t)(g % 3);
        run_group(&environments[g], &m);
    }
}

/* ---- a full queue does not delay another ---- */

/* Send until the queue has taken no message for 100 ms and 1000 tries: on a busy machine this rank may be
 * stopped for 100 ms. Returns the number of messages sent. */
static int fill_queue(struct member *m, int peer, int queue)
{
    int n = 0, n_refused = 0;
    int64_t full_since_ns = sp_now_ns();
    while (n_refused < 1000 || sp_now_ns() - full_since_ns < 100 * INT64_C(1000000)) {
        n_refused++;
        if (try_send(m, peer, queue, 5000, (uint64_t)n) == SPCCL_OK) {
            n++;
            n_refused = 0;
            full_since_ns = sp_now_ns();
        }
        CHECK_OK(progress(m));
    }
    return n;
}

static void full_queue(struct member *m)
{
    int n_messages = 0;
    if (!join_group(m))
        return;
    if (m->rank == 0) {
        n_messages = fill_queue(m, 1, 0);
        CHECK(n_messages >= 8, "%s: a queue took only %d messages", m->t->name, n_messages);
        CHECK(m->t->flushed(m->ep, 1, 0, 1), "%s: the first message waits for later ones", m->t->name);
        CHECK(strcmp(m->t->name, "tcp") != 0 || !is_flushed(m, 1), "%s: a full queue is flushed", m->t->name);
        atomic_store(&m->shared->step, n_messages);
        for (uint64_t i = 0; i < 300; i++) {
            send_now(m, 1, 1, 3000, i);
            CHECK_OK(take_now(m, 1, 1, 3000, i));
        }
        CHECK(m->t->flushed(m->ep, 1, 1, 300), "%s: queue 1 waits for queue 0", m->t->name);
        flush_now(m, 1);
    } else {
        for (uint64_t i = 0; i < 300; i++) {
            CHECK_OK(take_now(m, 0, 1, 3000, i));
            send_now(m, 0, 1, 3000, i);
        }
        flush_now(m, 0);
        n_messages = atomic_load(&m->shared->step);
        for (int i = 0; i < n_messages; i++)
            CHECK_OK(take_now(m, 0, 0, 5000, (uint64_t)i));
    }
    barrier(m, 1);
    leave_group(m);
}

static void test_full_queue(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++) {
        struct member m = make_group(&environments[g], 2, full_queue);
        m.config.n_sockets = 2;
        run_group(&environments[g], &m);
    }
}

/* ---- sleeping ---- */

#define N_ROUNDS ((uint64_t)share_of(50000 / (SLOWDOWN * SLOWDOWN), 500))

/* Wait for a message; sleep while there is none. */
static bool take_asleep(struct member *m, int peer, int queue, uint64_t seed)
{
    spccl_status st;
    while ((st = try_take(m, peer, queue, 64, seed)) == SPCCL_AGAIN) {
        CHECK_OK(progress(m));
        if ((st = try_take(m, peer, queue, 64, seed)) != SPCCL_AGAIN)
            break;
        if (!sleep_armed(m))
            return false;
    }
    return st == SPCCL_OK;
}

static void ping_pong(struct member *m)
{
    bool fine = true;
    if (!join_group(m))
        return;
    for (uint64_t i = 0; i < N_ROUNDS && fine; i++) {
        int queue = (int)(mix(i) % 2);
        if (m->rank == 0)
            send_now(m, 1, queue, 64, i);
        fine = take_asleep(m, 1 - m->rank, queue, i);
        if (m->rank == 1 && fine)
            send_now(m, 0, queue, 64, i);
        CHECK(fine, "%s: rank %d: a wake-up got lost in round %llu", m->t->name, m->rank,
              (unsigned long long)i);
    }
    flush_now(m, 1 - m->rank);
    leave_group(m);
}

static void test_ping_pong(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++) {
        struct member m = make_group(&environments[g], 2, ping_pong);
        m.config.n_sockets = 1 + (uint32_t)(g % 2);
        run_group(&environments[g], &m);
    }
}

/* arm reports each change once. A message that stays in its queue and space that nobody waits for do not end
 * a sleep. A message that a peek has already returned is still reported once. */
static void quiet(struct member *m)
{
    struct pollfd p;
    int n_reported = 0;
    if (!join_group(m))
        return;
    if (m->rank == 0) {
        send_now(m, 1, 0, 100, 1);
        flush_now(m, 1);
        barrier(m, 1);
    } else {
        const void *message;
        size_t bytes;
        barrier(m, 1);
        while (m->t->peek(m->ep, 0, 0, &message, &bytes) == SPCCL_AGAIN)
            CHECK_OK(progress(m));
        for (int i = 0; i < 10; i++) {
            CHECK_OK(progress(m));
            if (m->t->arm(m->ep) != SPCCL_OK) {
                n_reported++;
                continue;
            }
            p = (struct pollfd){.fd = m->t->wait_fd(m->ep), .events = POLLIN};
            CHECK(poll(&p, 1, 20) == 0 || i < 3, "%s: woken for nothing, time %d", m->t->name, i);
            m->t->disarm(m->ep);
        }
        CHECK(n_reported == 1, "%s: the message was reported %d times", m->t->name, n_reported);
        CHECK_OK(take_now(m, 0, 0, 100, 1));
    }
    barrier(m, 2);
    leave_group(m);
}

static void test_quiet(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++) {
        struct member m = make_group(&environments[g], 2, quiet);
        run_group(&environments[g], &m);
    }
}

/* A sender that finds no space sleeps until there is some. */
static void wait_for_space(struct member *m)
{
    enum { N = 2000 / SLOWDOWN };
    bool fine = true;
    if (!join_group(m))
        return;
    for (uint64_t i = 0; i < N && fine; i++)
        if (m->rank == 0) {
            while (fine && try_send(m, 1, 0, 9000, i) == SPCCL_AGAIN) {
                CHECK_OK(progress(m));
                if (try_send(m, 1, 0, 9000, i) == SPCCL_OK)
                    break;
                fine = sleep_armed(m);
            }
            CHECK(fine, "%s: no wake-up for space came at message %llu", m->t->name, (unsigned long long)i);
        } else {
            if (i % 256 == 0)
                usleep(2000);
            CHECK_OK(take_now(m, 0, 0, 9000, i));
        }
    if (m->rank == 0)
        flush_now(m, 1);
    leave_group(m);
}

static void test_space(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++) {
        struct member m = make_group(&environments[g], 2, wait_for_space);
        run_group(&environments[g], &m);
    }
}

/* At any position of an empty queue, the producer can send several messages while the consumer does nothing.
 * The producer goes back to the start of the ring only if that leaves space. */
static void test_runs_ahead(void)
{
    enum { CAP = 1 << 20 };
    static const size_t sizes[] = {100, 1000, 16000, CAP / 16 - 16, CAP / 16, CAP / 8, CAP / 4};
    uint8_t *data = aligned_alloc(64, CAP);
    CHECK(data != NULL, "out of memory");
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        sp_spsc_ctl ctl = {0};
        sp_spsc_tx tx = {.ctl = &ctl, .data = data, .cap = CAP};
        sp_spsc_rx rx = {.ctl = &ctl, .data = data, .cap = CAP};
        size_t wanted = CAP / (sizes[i] + 16) - 2 < 7 ? CAP / (sizes[i] + 16) - 1 : 7;
        for (int round = 0; round < 2000; round++) {
            size_t ahead = 0, bytes;
            const void *got;
            void *space;
            for (; ahead < 1 + (size_t)round % 7 && sp_spsc_reserve(&tx, sizes[i], &space) == SPCCL_OK;
                 ahead++)
                CHECK(sp_spsc_commit(&tx) == SPCCL_OK, "commit");
            CHECK(ahead == 1 + (size_t)round % 7 || ahead >= wanted,
                  "%zu messages of %zu bytes ahead; wanted %zu", ahead, sizes[i], wanted);
            while (sp_spsc_peek(&rx, &got, &bytes) == SPCCL_OK)
                CHECK(bytes == sizes[i] && sp_spsc_release(&rx) == SPCCL_OK, "%zu bytes", bytes);
        }
    }
    free(data);
}

/* ---- the list of transports ---- */

static void test_registry(void)
{
    const sp_transport *list[8];
    size_t n = 0;
    CHECK_OK(sp_transport_parse_list("tcp, inproc ,shm", list, 8, &n));
    CHECK(n == 3 && list[0] == sp_transport_find("tcp") && list[2] == sp_transport_find("shm"), "%zu", n);
    CHECK(sp_transport_parse_list("shm,carrier", list, 8, &n) == SPCCL_ERR_SETTING, "an unknown name");
    CHECK(strstr(spccl_last_error(), "carrier") != NULL, "%s", spccl_last_error());
    CHECK(sp_transport_parse_list("shm,shm", list, 8, &n) == SPCCL_ERR_SETTING, "a name twice");
    CHECK(sp_transport_parse_list("", list, 8, &n) == SPCCL_ERR_SETTING, "an empty list");
    CHECK(sp_transport_parse_list("shm tcp", list, 8, &n) == SPCCL_ERR_SETTING, "no comma");
    CHECK(sp_transport_parse_list("shm,tcp", list, 1, &n) == SPCCL_ERR_SETTING, "too many");
    CHECK(sp_transport_find("shm ") == NULL, "names are exact");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"runs_ahead", test_runs_ahead}, {"registry", test_registry},
        {"exchange", test_exchange},     {"reservations", test_reservations},
        {"peeked", test_peeked},         {"full_queue", test_full_queue},
        {"ping_pong", test_ping_pong},   {"quiet", test_quiet},
        {"space", test_space},           {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
