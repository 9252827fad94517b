/* test_ib_verbs.c - what transport ib asks of cards, on cards of stand_in_verbs.h: which ports it uses, why it leaves out the
 * others, which writes are inline, and memory that may not be locked. */
#include "core/base/status.h"
#include "stand_in_verbs.h"
#include "transport/net/ib/ib_verbs.h"

#include <sys/resource.h>

/* ---- which ports are used ---- */

/* The first card has one port; it must be left out with this text, and the second card is used. */
static void check_left_out(const char *what, const struct card *c, const char *text)
{
    const struct card list[2] = {*c, good_card("mlx5_1")};
    sp_ib_choice choice;
    char names[100];
    use_cards(2, list);
    snprintf(names, sizeof names, "%s,mlx5_1", c->name);
    setenv("SPCCL_IB_DEVICE", names, 1); /* so that the choice tells what is left out */
    sp_ib_choose(0, "", &choice);
    CHECK(choice.n == 1 && strcmp(choice.devices[0].name, "mlx5_1") == 0, "%s: %d devices: %s", what,
          choice.n, choice.why);
    CHECK(strcmp(choice.refused, text) == 0, "%s: got \"%s\", wanted \"%s\"", what, choice.refused, text);
    use_cards(1, list);
    sp_ib_choose(0, "", &choice);
    CHECK(choice.n == 0 && strncmp(choice.why, "no usable device: ", 18) == 0 &&
              strcmp(choice.why + 18, text) == 0,
          "%s, alone: %d devices: \"%s\"", what, choice.n, choice.why);
    CHECK(n_objects == 0, "%s: %d objects are open", what, n_objects);
}

static void test_no_gid(void)
{
    struct card c = good_card("mlx5_0");
    memset(c.ports[0].gids, 0, sizeof c.ports[0].gids);
    check_left_out("no entry", &c, "mlx5_0 port 1: no GID of type RoCE v2");
    c.ports[0].gids[1].type = "RoCE v2";
    check_left_out("zero GID", &c, "mlx5_0 port 1: no GID of type RoCE v2");
    c.ports[0].gids[2].type = "IB/RoCE v1";
    c.ports[0].gids[2].address = "::ffff:10.0.0.1";
    check_left_out("RoCE v1", &c,
                   "mlx5_0 port 1: no GID of type RoCE v2; GID 2, of interface eth7, is of type IB/RoCE v1");
    c.ports[0].infiniband = true;
    c.ports[0].gids[2].address = NULL;
    check_left_out("InfiniBand", &c, "mlx5_0 port 1: no GID");
}

/* The GID that a port uses, and its index. */
static void test_gid(void)
{
    struct card c = good_card("mlx5_0");
    sp_ib_choice choice;
    char details[160];
    c.ports[0].gids[0].type = "IB/RoCE v1";
    c.ports[0].gids[1].type = "RoCE v2";
    c.ports[0].gids[1].address = "fe80::1";
    c.ports[0].gids[3].type = "RoCE v2";
    c.ports[0].gids[3].address = "::ffff:10.0.0.9";
    use_cards(1, &c);
    sp_ib_choose(0, "", &choice);
    CHECK(choice.n == 1 && choice.devices[0].gid_index == 3 && choice.devices[0].ethernet,
          "%d devices, GID %d", choice.n, choice.devices[0].gid_index);
    sp_ib_device_details(&choice.devices[0], details, sizeof details);
    CHECK(strcmp(details, "RoCE v2, 100.0 Gbit/s, MTU 4096, GID 10.0.0.9") == 0, "%s", details);
    c.ports[0].infiniband = true;
    c.ports[0].gids[0].type = NULL; /* types matter for RoCE only */
    c.ports[0].gids[0].address = "fec0::7";
    use_cards(1, &c);
    sp_ib_choose(0, "", &choice);
    CHECK(choice.n == 1 && choice.devices[0].gid_index == 0 && !choice.devices[0].ethernet,
          "%d devices, GID %d", choice.n, choice.devices[0].gid_index);
    sp_ib_device_details(&choice.devices[0], details, sizeof details);
    CHECK(strcmp(details, "InfiniBand, 100.0 Gbit/s, MTU 4096, GID fec0::7") == 0, "%s", details);
}

static void test_no_queue_pair(void)
{
    const struct card good = good_card("efa0");
    struct card c = good;
    c.no_qp = EOPNOTSUPP;
    check_left_out("queue pair", &c,
                   "efa0 port 1: it cannot make an RC queue pair: ibv_create_qp: Operation not supported "
                   "(errno 95)");
    c = good;
    c.no_cq = ENOMEM;
    check_left_out("completion queue", &c,
                   "efa0 port 1: it cannot make an RC queue pair: ibv_create_cq: Cannot allocate memory "
                   "(errno 12)");
    c = good;
    c.no_pd = EPERM;
    check_left_out("protection domain", &c,
                   "efa0 port 1: it cannot make an RC queue pair: ibv_alloc_pd: Operation not permitted "
                   "(errno 1)");
    c = good;
    c.transport = IBV_TRANSPORT_IWARP;
    check_left_out("iWARP", &c, "efa0 port 1: neither InfiniBand nor RoCE: ncclnet may carry it");
    c.transport = IBV_TRANSPORT_UNSPECIFIED; /* EFA */
    check_left_out("EFA", &c, "efa0 port 1: neither InfiniBand nor RoCE: ncclnet may carry it");
}

static void test_not_active(void)
{
    static const enum ibv_port_state states[] = {IBV_PORT_NOP, IBV_PORT_DOWN, IBV_PORT_INIT, IBV_PORT_ARMED,
                                                 IBV_PORT_ACTIVE_DEFER};
    struct card c = good_card("mlx5_0");
    sp_ib_choice choice;
    for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
        c.ports[0].state = states[i];
        check_left_out("one port", &c, "mlx5_0 port 1: not active");
    }
    c.n_ports = 2; /* the second one works */
    c.ports[1] = good_card("").ports[0];
    use_cards(1, &c);
    sp_ib_choose(0, "", &choice);
    CHECK(choice.n == 1 && choice.devices[0].port == 2, "%d devices, port %d", choice.n,
          choice.devices[0].port);
    c.ports[1].state = IBV_PORT_DOWN;
    check_left_out("two ports", &c, "mlx5_0 port 1: not active; mlx5_0 port 2: not active");
}

/* ---- inline writes ---- */

/* Bytes travel inline up to what the queue pair has, and none above. The card refuses an inline write that is longer. */
static void check_inline(const struct card *c, uint32_t want)
{
    static const uint32_t sizes[] = {0, 1, 16, 63, 64, 65, 127, 128, 129, 171, 172, 173, 4096};
    static uint8_t data[4096];
    sp_ib_choice choice;
    sp_ib_context *context = NULL;
    sp_ib_link *link = NULL;
    sp_ib_end mine;
    use_cards(1, c);
    sp_ib_choose(0, "", &choice);
    CHECK(choice.n == 1, "%s", choice.why);
    CHECK_OK(sp_ib_context_open(&choice.devices[0], 16, &context));
    CHECK_OK(sp_ib_link_open(context, 8, 8, &link, &mine));
    CHECK(inline_asked == (c->inline_most >= 128 ? 128 : 0), "%u inline bytes were asked for", inline_asked);
    for (size_t i = 0; i < 2 * sizeof sizes / sizeof *sizes; i++) {
        sp_ib_write w = {.from = data, .bytes = sizes[i / 2], .is_put = i % 2 == 1};
        bool wanted = w.bytes != 0 && w.bytes <= want && !w.is_put;
        CHECK_OK(sp_ib_link_write(link, &w));
        CHECK(last_write.bytes == w.bytes && ((last_write.flags & IBV_SEND_INLINE) != 0) == wanted,
              "%u of %u bytes%s: %u were posted, inline: %d", w.bytes, want, w.is_put ? ", a put" : "",
              last_write.bytes, !wanted);
    }
    sp_ib_link_close(link);
    sp_ib_context_close(context);
    CHECK(n_objects == 0, "%d objects are open", n_objects);
}

/* Drivers give what was asked for, or round it up, or give less; some refuse. */
static void test_inline(void)
{
    static const struct {
        uint32_t most, given, want;
    } cases[] = {{1000, 128, 128}, {1000, 172, 172}, {1000, 64, 64}, {1000, 0, 0}, {127, 0, 0}, {0, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct card c = good_card("mlx5_0");
        c.inline_most = cases[i].most;
        c.inline_given = cases[i].given;
        check_inline(&c, cases[i].want);
    }
}

/* ---- memory that may not be locked ---- */

/* How much memory this process may lock, in place of its own limit. */
static rlim_t may_lock_bytes = RLIM_INFINITY;
int __wrap_getrlimit(int resource, struct rlimit *out);
int __wrap_getrlimit(int resource, struct rlimit *out)
{
    CHECK(resource == RLIMIT_MEMLOCK, "limit %d", resource);
    *out = (struct rlimit){.rlim_cur = may_lock_bytes, .rlim_max = RLIM_INFINITY};
    return 0;
}

/* The error names card, bytes and errno, and the limit and what to do where the limit may be the cause. */
static void check_no_memory(int error, rlim_t limit_bytes, const char *want)
{
    static uint8_t data[256 << 10];
    struct card c = good_card("mlx5_0");
    sp_ib_choice choice;
    sp_ib_context *context = NULL;
    sp_ib_memory memory = {.mr = NULL};
    sp_region_config region = {.address = data, .bytes = sizeof data, .dmabuf = -1};
    char text[400];
    c.no_mr = error;
    may_lock_bytes = limit_bytes;
    use_cards(1, &c);
    sp_ib_choose(0, "", &choice);
    CHECK_OK(sp_ib_context_open(&choice.devices[0], 16, &context));
    snprintf(text, sizeof text, "device mlx5_0 port 1: ibv_reg_mr of 256 KiB%s", want);
    CHECK(sp_ib_memory_open(context, data, sizeof data, SP_IB_PEERS_WRITE, &memory) == SPCCL_ERR_SYSTEM &&
              memory.mr == NULL && strcmp(spccl_last_error(), text) == 0,
          "got \"%s\", wanted \"%s\"", spccl_last_error(), text);
    snprintf(text, sizeof text, "device mlx5_0 port 1: ibv_reg_mr of 256 KiB of GPU memory%s", want);
    CHECK(sp_ib_region_open(context, &region, &memory) == SPCCL_ERR_SYSTEM && memory.mr == NULL &&
              strcmp(spccl_last_error(), text) == 0,
          "got \"%s\", wanted \"%s\"", spccl_last_error(), text);
    sp_ib_context_close(context);
    CHECK(n_objects == 0, "%d objects are open", n_objects);
}

static void test_locked_memory(void)
{
    check_no_memory(
        ENOMEM, 64 << 10,
        "; this process may lock 64 KiB of memory, raise it with ulimit -l: Cannot allocate memory "
        "(errno 12)");
    check_no_memory(
        ENOMEM, 0,
        "; this process may lock 0 KiB of memory, raise it with ulimit -l: Cannot allocate memory "
        "(errno 12)");
    check_no_memory(
        EPERM, 0,
        "; this process may lock 0 KiB of memory, raise it with ulimit -l: Operation not permitted "
        "(errno 1)");
    check_no_memory(EPERM, 64 << 10, ": Operation not permitted (errno 1)");
    check_no_memory(EFAULT, 64 << 10, ": Bad address (errno 14)");
    check_no_memory(ENOMEM, RLIM_INFINITY, ": Cannot allocate memory (errno 12)");
}

/* A driver that locks memory for its queues fails before any memory of ours is registered. */
static void test_locked_queues(void)
{
    struct card c = good_card("mlx5_0");
    c.no_cq = EPERM;
    may_lock_bytes = 0;
    check_left_out(
        "limit 0", &c,
        "mlx5_0 port 1: it cannot make an RC queue pair: ibv_create_cq; this process may lock 0 KiB of "
        "memory, raise it with ulimit -l: Operation not permitted (errno 1)");
    c.no_cq = 0;
    c.no_qp = ENOMEM;
    may_lock_bytes = 64 << 10;
    check_left_out(
        "limit of 64 KiB", &c,
        "mlx5_0 port 1: it cannot make an RC queue pair: ibv_create_qp; this process may lock 64 KiB of "
        "memory, raise it with ulimit -l: Cannot allocate memory (errno 12)");
    may_lock_bytes = RLIM_INFINITY;
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"no_gid", test_no_gid},
                                             {"gid", test_gid},
                                             {"no_queue_pair", test_no_queue_pair},
                                             {"not_active", test_not_active},
                                             {"inline", test_inline},
                                             {"locked_memory", test_locked_memory},
                                             {"locked_queues", test_locked_queues},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
