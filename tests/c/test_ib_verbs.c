/* test_ib_verbs.c - what transport ib asks of cards, on cards of stand_in_verbs.h: which ports it uses, and why it leaves out
 * the others. */
#include "stand_in_verbs.h"
#include "transport/net/ib_verbs.h"

#define IPV4(host)                                                                                           \
    {                                                                                                        \
        "RoCE v2", "::ffff:10.0.0." host                                                                     \
    }

/* A card that works, with one port. */
static struct card good_card(const char *name)
{
    return (struct card){.name = name,
                         .transport = IBV_TRANSPORT_IB,
                         .n_ports = 1,
                         .ports = {{IBV_PORT_ACTIVE, false, "eth7", {IPV4("1")}}},
                         .inline_most = 1000,
                         .inline_given = 128};
}

static void use_cards(int n, const struct card *list)
{
    memcpy(cards, list, (size_t)n * sizeof *list);
    n_cards = n;
    unsetenv("SPCCL_IB_DEVICE");
}

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

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"no_gid", test_no_gid}, {"gid", test_gid}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
