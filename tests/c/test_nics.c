/* test_nics.c - which transport of a process uses a network card. */
#include "test.h"
#include "transport/common/nics.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

static sp_nic card(const char *name, const char *other, const char *pci)
{
    sp_nic nic;
    memset(&nic, 0, sizeof nic);
    snprintf(nic.names[0], SP_NIC_NAME_CAP, "%s", name);
    snprintf(nic.names[1], SP_NIC_NAME_CAP, "%s", other);
    sp_nic_read_pci(pci, nic.pci);
    return nic;
}

static void test_pci(void)
{
    static const char *const cases[][2] = {{"/sys/devices/pci0000:00/0000:00:03.0", "0000:00:03.0"},
                                           {"0000:A1:00.1", "0000:a1:00.1"},
                                           {"/sys/devices/virtual/net/eth0", ""},
                                           {"/sys/devices/pci0000:00", ""},
                                           {"0000:00:03.0-x", ""},
                                           {"", ""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char pci[SP_NIC_PCI_CAP];
        sp_nic_read_pci(cases[i][0], pci);
        CHECK(strcmp(pci, cases[i][1]) == 0, "\"%s\": got \"%s\"", cases[i][0], pci);
    }
}

static void test_same(void)
{
    sp_nic roce = card("mlx5_0", "eth2", "0000:03:00.0");
    const struct {
        sp_nic other;
        bool same;
        const char *what;
    } cases[] = {{card("mlx5_0", "", ""), true, "the device's name"},
                 {card("eth2", "", ""), true, "the interface's name"},
                 {card("rdmap3s0", "", "/sys/devices/pci0000:00/0000:03:00.0"), true, "the PCI address"},
                 {card("mlx5_1", "eth3", "0000:03:00.1"), false, "the other port"},
                 {card("", "", ""), false, "nothing known"},
                 {card("mlx5_", "", ""), false, "a part of the name"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK(sp_nic_is_same(&roce, &cases[i].other) == cases[i].same &&
                  sp_nic_is_same(&cases[i].other, &roce) == cases[i].same,
              "%s", cases[i].what);
}

static void test_take(void)
{
    sp_nic roce = card("mlx5_0", "eth2", "0000:03:00.0"), plugin = card("eth2", "", ""),
           other = card("mlx5_1", "eth3", "");
    const char *holder;
    CHECK(sp_nic_take("ib", &roce, &holder) && sp_nic_take("ib", &roce, &holder), "one transport, twice");
    CHECK(!sp_nic_take("ncclnet", &plugin, &holder) && strcmp(holder, "ib") == 0, "ib has the card");
    CHECK(sp_nic_take("ncclnet", &other, &holder), "another card");
    CHECK(!sp_nic_take("ib", &other, &holder) && strcmp(holder, "ncclnet") == 0, "ncclnet has the card");
    sp_nic_give_back("ib", &roce);
    CHECK(!sp_nic_take("ncclnet", &plugin, &holder), "one of two users is left");
    sp_nic_give_back("ib", &roce);
    CHECK(sp_nic_take("ncclnet", &plugin, &holder), "ib has given it back");
    CHECK(!sp_nic_take("ib", &roce, &holder) && strcmp(holder, "ncclnet") == 0, "now ncclnet has it");
    sp_nic_give_back("ncclnet", &plugin);
    sp_nic_give_back("ncclnet", &other);
    sp_nic_give_back("ncclnet", &other); /* once too often: nothing happens */
    CHECK(sp_nic_take("ib", &roce, &holder) && sp_nic_take("ib", &other, &holder), "all are free");
}

/* A child of fork has taken no card, and its end changes nothing in the parent. */
static void test_fork(void)
{
    sp_nic nic = card("mlx5_7", "", "");
    const char *holder;
    int status = -1;
    pid_t pid;
    CHECK(sp_nic_take("ib", &nic, &holder), "free");
    pid = fork();
    if (pid == 0) {
        sp_nic_give_back("ib", &nic); /* what the parent took: nothing happens */
        _exit(sp_nic_take("ncclnet", &nic, &holder) ? 0 : 1);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "the child: %x", status);
    CHECK(!sp_nic_take("ncclnet", &nic, &holder), "the parent still has it");
}

static void *take_and_give_back(void *stop)
{
    sp_nic nic = card("mlx5_8", "", "");
    const char *holder;
    while (!atomic_load((atomic_bool *)stop))
        if (sp_nic_take("ib", &nic, &holder))
            sp_nic_give_back("ib", &nic);
    return NULL;
}

/* A fork while another thread takes cards: the child can take some. */
static void test_fork_meanwhile(void)
{
    atomic_bool stop = false;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, take_and_give_back, &stop) == 0, "a thread");
    for (int i = 0; i < 300; i++) {
        int status = -1;
        pid_t pid = fork();
        if (pid == 0) {
            sp_nic nic = card("mlx5_9", "", "");
            const char *holder;
            alarm(30); /* ends a child that waits for ever */
            _exit(sp_nic_take("ncclnet", &nic, &holder) ? 0 : 1);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0, "child %d: status %x", i, status);
        if (status != 0)
            break;
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"pci", test_pci},
                                             {"same", test_same},
                                             {"take", test_take},
                                             {"fork", test_fork},
                                             {"fork_meanwhile", test_fork_meanwhile},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
