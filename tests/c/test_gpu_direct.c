/* test_gpu_direct.c - the decision whether a network device could reach a GPU's memory, as a table; and what
 * `spccl info` says about it. */
#include "core/gpu/gpu_direct.h"
#include "fake_gpu.h"
#include "test.h"

static void test_paths(void)
{
    static const struct {
        const char *a, *b;
        sp_pci_path wanted;
    } cases[] = {
        {"/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0",
         "/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.1", SP_PCI_SWITCHES},
        {"/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:00.0/0000:19:00.0",
         "/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:04.0/0000:1a:00.0", SP_PCI_SWITCHES},
        {"/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0",
         "/sys/devices/pci0000:16/0000:16:03.0/0000:1b:00.0", SP_PCI_HOST_BRIDGE},
        /* one name is the start of the other */
        {"/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0",
         "/sys/devices/pci0000:16/0000:16:02.01/0000:1b:00.0", SP_PCI_HOST_BRIDGE},
        {"/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0",
         "/sys/devices/pci0000:160/0000:16:02.0/0000:17:00.1", SP_PCI_CPUS},
        /* as in most virtual machines */
        {"/sys/devices/pci0000:00/0000:00:04.0", "/sys/devices/pci0000:00/0000:00:05.0", SP_PCI_HOST_BRIDGE},
        {"/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0",
         "/sys/devices/pci0000:97/0000:97:02.0/0000:98:00.0", SP_PCI_CPUS},
        {"/sys/devices/virtual/net/va", "/sys/devices/pci0000:16/0000:16:02.0", SP_PCI_UNKNOWN},
        {"", "", SP_PCI_UNKNOWN},
        {"/sys/devices/pci0000:16", "/sys/devices/pci0000:16", SP_PCI_HOST_BRIDGE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_pci_path got = sp_pci_path_between(cases[i].a, cases[i].b);
        CHECK(got == cases[i].wanted, "%s and %s: %d, wanted %d", cases[i].a, cases[i].b, (int)got,
              (int)cases[i].wanted);
        CHECK(got == sp_pci_path_between(cases[i].b, cases[i].a), "case %zu: not the same both ways", i);
    }
}

static void write_node(const char *folder, int node)
{
    char path[64];
    FILE *f;
    snprintf(path, sizeof path, "%s/numa_node", folder);
    f = fopen(path, "we");
    CHECK(f != NULL && fprintf(f, "%d\n", node) > 0, "%s", path);
    if (f != NULL)
        fclose(f);
}

static void test_distances(void)
{
    static const char gpu[] = "/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0";
    char a[] = "/tmp/spccl-test-XXXXXX", b[] = "/tmp/spccl-test-XXXXXX", command[80];
    CHECK(mkdtemp(a) != NULL && mkdtemp(b) != NULL, "folders");
    CHECK(sp_pci_distance(gpu, "/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.1") == 0, "a switch");
    CHECK(sp_pci_distance(gpu, "/sys/devices/pci0000:16/0000:16:03.0/0000:1b:00.0") == 1, "a host bridge");
    CHECK(sp_pci_distance(gpu, "/sys/devices/pci0000:ff/0000:ff:03.0") == SP_PCI_FAR, "no such folder");
    CHECK(sp_pci_distance(gpu, "") == SP_PCI_FAR && sp_pci_distance("", "") == SP_PCI_FAR, "unknown");
    CHECK(sp_pci_distance(a, b) == SP_PCI_FAR, "no NUMA node");
    write_node(a, 1);
    write_node(b, 1);
    CHECK(sp_pci_numa_node(a) == 1 && sp_pci_distance(a, b) == 2, "one NUMA node");
    write_node(b, 0);
    CHECK(sp_pci_distance(a, b) == SP_PCI_FAR, "other NUMA nodes");
    write_node(a, -1);
    write_node(b, -1);
    CHECK(sp_pci_distance(a, b) == SP_PCI_FAR, "a machine without NUMA nodes");
    snprintf(command, sizeof command, "rm -r %s %s", a, b);
    CHECK(system(command) == 0, "%s", command);
}

/* A device of libibverbs. */
#define IB(has_dmabuf)                                                                                       \
    {                                                                                                        \
        .name = "mlx5_0", .dmabuf = (has_dmabuf), .pointers = true, .why = "its driver registers no dmabuf"  \
    }
#define GPU(has_dmabuf, is_ordered)                                                                          \
    {                                                                                                        \
        .dmabuf = (has_dmabuf), .writes_ordered = (is_ordered)                                               \
    }

static const struct {
    sp_gpu_direct_facts facts;
    sp_gpu_direct_how how;
    bool flush;
    const char *words[2];
} decisions[] = {
    /* libibverbs: dmabuf first, then nvidia_peermem, else pinned memory */
    {{IB(true), GPU(true, true), false, SP_PCI_SWITCHES},
     SP_DIRECT_DMABUF,
     false,
     {"by dmabuf", "without a flush"}},
    {{IB(true), GPU(true, true), true, SP_PCI_SWITCHES}, SP_DIRECT_DMABUF, false, {"by dmabuf", ""}},
    {{IB(true), GPU(true, false), false, SP_PCI_SWITCHES},
     SP_DIRECT_DMABUF,
     true,
     {"by dmabuf", "with a flush"}},
    {{IB(false), GPU(true, true), true, SP_PCI_SWITCHES},
     SP_DIRECT_POINTERS,
     false,
     {"nvidia_peermem", "without a flush"}},
    {{IB(true), GPU(false, false), true, SP_PCI_SWITCHES},
     SP_DIRECT_POINTERS,
     true,
     {"nvidia_peermem", "with a flush"}},
    {{IB(false), GPU(true, true), false, SP_PCI_SWITCHES},
     SP_DIRECT_NO,
     false,
     {"its driver registers no dmabuf", "nvidia_peermem is not loaded"}},
    {{IB(true), GPU(false, true), false, SP_PCI_SWITCHES},
     SP_DIRECT_NO,
     false,
     {"the GPU's driver passes no dmabuf", "nvidia_peermem is not loaded"}},
    /* the way over PCI */
    {{IB(true), GPU(true, true), true, SP_PCI_HOST_BRIDGE}, SP_DIRECT_NO, false, {"a host bridge", ""}},
    {{IB(true), GPU(true, true), true, SP_PCI_CPUS}, SP_DIRECT_NO, false, {"several host bridges", ""}},
    {{IB(true), GPU(true, true), true, SP_PCI_UNKNOWN}, SP_DIRECT_NO, false, {"sysfs does not say", ""}},
    /* what cannot be registered is named before where it is */
    {{IB(false), GPU(true, true), false, SP_PCI_UNKNOWN}, SP_DIRECT_NO, false, {"registers no dmabuf", ""}},
};

static void test_decision(void)
{
    for (size_t i = 0; i < sizeof decisions / sizeof *decisions; i++) {
        sp_gpu_direct got;
        sp_gpu_direct_decide(&decisions[i].facts, &got);
        CHECK(got.how == decisions[i].how && got.flush == decisions[i].flush,
              "case %zu: way %d, flush %d: %s", i, (int)got.how, got.flush, got.why);
        CHECK((strncmp(got.why, "no: ", 4) == 0) == (got.how == SP_DIRECT_NO), "case %zu: %s", i, got.why);
        for (int k = 0; k < 2; k++)
            CHECK(strstr(got.why, decisions[i].words[k]) != NULL, "case %zu: \"%s\" is not in: %s", i,
                  decisions[i].words[k], got.why);
    }
}

/* SPCCL_DEBUG_GPU_DIRECT: off refuses, a way is taken whatever PCI and the modules are, auto decides. */
static void test_setting(void)
{
    static const struct {
        const char *setting;
        sp_gpu_direct_how how;
        bool flush;
        const char *words[2];
    } cases[] = {
        {"off", SP_DIRECT_NO, false, {"no: SPCCL_DEBUG_GPU_DIRECT is off", ""}},
        {"dmabuf", SP_DIRECT_DMABUF, true, {"SPCCL_DEBUG_GPU_DIRECT is dmabuf", "with a flush"}},
        {"pointers", SP_DIRECT_POINTERS, true, {"SPCCL_DEBUG_GPU_DIRECT is pointers", "with a flush"}},
        {"auto", SP_DIRECT_NO, false, {"no: ", "nvidia_peermem is not loaded"}},
    };
    sp_gpu_direct_facts unordered = {IB(false), GPU(false, false), false, SP_PCI_UNKNOWN};
    sp_gpu_direct_facts ordered = {IB(true), GPU(true, true), false, SP_PCI_SWITCHES};
    sp_gpu_direct got;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_gpu_direct_choose(cases[i].setting, &unordered, &got);
        CHECK(got.how == cases[i].how && got.flush == cases[i].flush, "%s: way %d, flush %d: %s",
              cases[i].setting, (int)got.how, got.flush, got.why);
        for (int k = 0; k < 2; k++)
            CHECK(strstr(got.why, cases[i].words[k]) != NULL, "%s: \"%s\" is not in: %s", cases[i].setting,
                  cases[i].words[k], got.why);
        setenv("SPCCL_DEBUG_GPU_DIRECT", cases[i].setting, 1);
        CHECK(sp_gpu_direct_is_on() == (i != 0), "%s: on: %d", cases[i].setting, sp_gpu_direct_is_on());
    }
    unsetenv("SPCCL_DEBUG_GPU_DIRECT");
    CHECK(!sp_gpu_direct_is_on(), "it is on by default");
    sp_gpu_direct_choose("auto", &ordered, &got);
    CHECK(got.how == SP_DIRECT_DMABUF && !got.flush, "way %d, flush %d", (int)got.how, got.flush);
    sp_gpu_direct_choose("off", &ordered, &got);
    CHECK(got.how == SP_DIRECT_NO, "off: way %d", (int)got.how);
    sp_gpu_direct_choose("pointers", &ordered, &got);
    CHECK(got.how == SP_DIRECT_POINTERS && !got.flush, "way %d, flush %d", (int)got.how, got.flush);
}

/* Two devices of a plugin, over which frames pass through pinned memory whatever the plugin can register. */
static void test_info(void)
{
    spccl_info_entry e = {.struct_bytes = sizeof e};
    int n = 0;
    fake.n_gpus = 2;
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 1);
    setenv("TEST_NET_DEVICES", "2", 1);
    for (size_t i = 0; spccl_info(i, &e) == SPCCL_OK; i++) {
        char name[16];
        if (strcmp(e.kind, "GPUDirect") != 0)
            continue;
        snprintf(name, sizeof name, "GPU %d", n++);
        CHECK(strcmp(e.name, name) == 0, "%s, wanted %s", e.name, name);
        CHECK(strncmp(e.value, "not used, possible with 0 of ", 29) == 0, "%s", e.value);
        CHECK(strstr(e.why, "pinned memory") != NULL &&
                  strstr(e.why, "; sock0 (ncclnet): no: over a net plugin") != NULL &&
                  strstr(e.why, "; sock1 (ncclnet): no: over a net plugin") != NULL,
              "%s", e.why);
    }
    CHECK(n == 2, "entries of %d GPUs, wanted 2", n);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"paths", test_paths},       {"distances", test_distances},
                                             {"decision", test_decision}, {"setting", test_setting},
                                             {"info", test_info},         {NULL, NULL}};
    return test_main(cases, argc, argv);
}
