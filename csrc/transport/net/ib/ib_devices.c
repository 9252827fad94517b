/* ib_devices.c - which device and port a rank uses, and which of its GIDs. See ib_verbs.h. */
#include "core/base/env.h"
#include "core/base/pci.h"
#include "transport/net/ib/ib_library.h"
#include "transport/net/ib/ib_wire.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CLASS_FOLDER "/sys/class/infiniband"

/* What was found, and why the rest is not usable: "rxe1 port 1: not active; ...". */
struct found {
    sp_ib_device devices[SP_IB_DEVICES_MAX];
    int n;
    char refused[500];
};

static void refuse(struct found *f, const char *name, int port, const char *why)
{
    size_t used = strlen(f->refused);
    snprintf(f->refused + used, sizeof f->refused - used, "%s%.40s port %d: %s", used == 0 ? "" : "; ", name,
             port, why);
}

void sp_ib_device_text(const sp_ib_device *device, char *out, size_t cap)
{
    snprintf(out, cap, "device %s port %d", device->name, device->port);
}

void sp_ib_device_details(const sp_ib_device *device, char *out, size_t cap)
{
    char gid[INET6_ADDRSTRLEN] = "?";
    if (sp_ib_network(device) == SP_IB_ROCE_IPV4)
        (void)inet_ntop(AF_INET, device->gid + 12, gid, sizeof gid);
    else
        (void)inet_ntop(AF_INET6, device->gid, gid, sizeof gid);
    snprintf(out, cap, "%s, %.1f Gbit/s, MTU %u, GID %s", device->ethernet ? "RoCE v2" : "InfiniBand",
             device->speed_mbps / 1000.0, device->mtu_bytes, gid);
}

/* ---- GIDs ---- */

/* What sysfs says of a GID: of "types" "RoCE v2" or "IB/RoCE v1", of "ndevs" the interface. False: the entry is empty. */
static bool read_gid_attr(const sp_ib_device *device, const char *attr, int index, char *out, size_t cap)
{
    char path[200];
    FILE *f;
    bool fine;
    snprintf(path, sizeof path, CLASS_FOLDER "/%s/ports/%d/gid_attrs/%s/%d", device->name, device->port, attr,
             index);
    f = fopen(path, "re");
    if (f == NULL)
        return false;
    fine = fgets(out, (int)cap, f) != NULL; /* an empty entry fails with EINVAL */
    fclose(f);
    out[fine ? strcspn(out, "\n") : 0] = '\0';
    return fine;
}

/* Why no GID of a table serves. The first entry of another type is an example. */
static void no_gid_text(const sp_ib_device *device, const sp_ib_gid *table, int n, char *out, size_t cap)
{
    char net[32];
    int first = 0;
    snprintf(out, cap, "no GID%s", device->ethernet ? " of type RoCE v2" : "");
    while (first < n && (table[first].type[0] == '\0' || strcmp(table[first].type, "RoCE v2") == 0))
        first++;
    if (device->ethernet && first < n && read_gid_attr(device, "ndevs", first, net, sizeof net))
        snprintf(out, cap, "no GID of type RoCE v2; GID %d, of interface %s, is of type %s", first, net,
                 table[first].type);
}

/* Choose the GID of a port. False: `why` says why there is none. */
static bool choose_gid(const sp_ib_library *lib, struct ibv_context *context, int n_gids,
                       sp_ib_device *device, char *why, size_t why_cap)
{
    sp_ib_gid table[SP_IB_GIDS_MAX];
    int n = n_gids < SP_IB_GIDS_MAX ? n_gids : SP_IB_GIDS_MAX, chosen;
    memset(table, 0, sizeof table);
    for (int i = 0; i < n; i++) {
        union ibv_gid gid;
        if ((!device->ethernet || read_gid_attr(device, "types", i, table[i].type, sizeof table[i].type)) &&
            lib->query_gid(context, device->port, i, &gid) == 0)
            memcpy(table[i].bytes, gid.raw, SP_IB_GID_BYTES);
    }
    chosen = sp_ib_choose_gid(device->ethernet, table, n);
    if (chosen < 0) {
        no_gid_text(device, table, n, why, why_cap);
        return false;
    }
    memcpy(device->gid, table[chosen].bytes, sizeof device->gid);
    device->gid_index = (uint8_t)chosen;
    return true;
}

/* ---- ports ---- */

static int speed_mbps(const struct ibv_port_attr *a)
{
    static const struct {
        int code, mbps;
    } lanes[] = {{1, 2500},   {2, 5000},   {4, 10000},  {8, 10000},
                 {16, 14000}, {32, 25000}, {64, 50000}, {128, 100000}};
    static const int widths[][2] = {{1, 1}, {2, 4}, {4, 8}, {8, 12}, {16, 2}};
    int mbps = 0, width = 0;
    for (size_t i = 0; i < sizeof lanes / sizeof *lanes; i++)
        mbps = lanes[i].code == a->active_speed ? lanes[i].mbps : mbps;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        width = widths[i][0] == a->active_width ? widths[i][1] : width;
    return mbps * width;
}

/* Whether the device makes an RC queue pair. EFA and others do not. False: `why` says which call failed. */
static bool makes_queue_pairs(const sp_ib_library *lib, struct ibv_context *context, char *why,
                              size_t why_cap)
{
    const char *call = "ibv_alloc_pd";
    struct ibv_pd *pd = lib->alloc_pd(context);
    struct ibv_cq *cq = NULL;
    struct ibv_qp *qp = NULL;
    bool made;
    if (pd != NULL) {
        call = "ibv_create_cq";
        cq = lib->create_cq(context, 2, NULL, NULL, 0);
    }
    if (cq != NULL) {
        struct ibv_qp_init_attr attr = {.send_cq = cq,
                                        .recv_cq = cq,
                                        .qp_type = IBV_QPT_RC,
                                        .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1}};
        call = "ibv_create_qp";
        qp = lib->create_qp(pd, &attr);
    }
    made = qp != NULL;
    if (!made) {
        char limit[120];
        int error = errno; /* drivers lock memory for what they make */
        snprintf(why, why_cap, "it cannot make an RC queue pair: %s%s: %s (errno %d)", call,
                 sp_ib_lock_text(error, limit, sizeof limit), strerror(error), error);
    }
    if (qp != NULL)
        (void)lib->destroy_qp(qp);
    if (cq != NULL)
        (void)lib->destroy_cq(cq);
    if (pd != NULL)
        (void)lib->dealloc_pd(pd);
    return made;
}

static void check_port(const sp_ib_library *lib, struct ibv_context *context, const char *name, int port,
                       struct found *f)
{
    struct ibv_port_attr a;
    char why[280];
    sp_ib_device *device = &f->devices[f->n];
    memset(&a, 0, sizeof a);
    if (lib->query_port(context, (uint8_t)port, &a) != 0) {
        refuse(f, name, port, "its state cannot be read");
        return;
    }
    if (a.state != IBV_PORT_ACTIVE) {
        refuse(f, name, port, "not active");
        return;
    }
    if (f->n == SP_IB_DEVICES_MAX) {
        snprintf(why, sizeof why, "%d usable ports come before it: name the ports to use in SPCCL_IB_DEVICE",
                 SP_IB_DEVICES_MAX);
        refuse(f, name, port, why);
        return;
    }
    *device = (sp_ib_device){.port = (uint8_t)port,
                             .ethernet = a.link_layer == IBV_LINK_LAYER_ETHERNET,
                             .lid = a.lid,
                             .mtu_bytes = a.active_mtu >= 1 && a.active_mtu <= 5 ? 128u << a.active_mtu : 256,
                             .speed_mbps = speed_mbps(&a)};
    snprintf(device->name, sizeof device->name, "%s", name);
    if (!choose_gid(lib, context, a.gid_tbl_len, device, why, sizeof why) ||
        !makes_queue_pairs(lib, context, why, sizeof why))
        refuse(f, name, port, why);
    else
        f->n++;
}

/* True if SPCCL_IB_DEVICE, a list of NAME and NAME:PORT, allows the port; port 0: any port of the device. */
static bool is_wanted(const char *wanted, const char *name, int port)
{
    char text[SP_IB_NAME_CAP + 16];
    size_t name_bytes = strlen(name);
    if (wanted[0] == '\0')
        return true;
    snprintf(text, sizeof text, "%s:%d", name, port);
    for (const char *at = wanted; *at != '\0'; at += strcspn(at, ","), at += *at == ',') {
        size_t n = strcspn(at, ",");
        if (n == name_bytes && strncmp(at, name, n) == 0)
            return true;
        if (port == 0 ? n > name_bytes && strncmp(at, name, name_bytes) == 0 && at[name_bytes] == ':'
                      : n == strlen(text) && strncmp(at, text, n) == 0)
            return true;
    }
    return false;
}

static void check_device(const sp_ib_library *lib, struct ibv_device *device, const char *wanted,
                         struct found *f)
{
    const char *name = lib->get_device_name(device);
    struct ibv_device_attr attr;
    struct ibv_context *context;
    if (!is_wanted(wanted, name, 0))
        return;
    if (device->transport_type != IBV_TRANSPORT_IB) {
        refuse(f, name, 1, "neither InfiniBand nor RoCE: ncclnet may carry it");
        return;
    }
    context = lib->open_device(device);
    if (context == NULL) {
        refuse(f, name, 1, "it cannot be opened (permission for /dev/infiniband?)");
        return;
    }
    if (lib->query_device(context, &attr) != 0)
        refuse(f, name, 1, "it does not answer");
    else
        for (int port = 1; port <= attr.phys_port_cnt; port++)
            if (is_wanted(wanted, name, port))
                check_port(lib, context, name, port, f);
    (void)lib->close_device(context);
}

/* True if the kernel has a verbs device. Without one the library is not opened. */
static bool has_devices(void)
{
    DIR *d = opendir(CLASS_FOLDER);
    struct dirent *e = NULL;
    while (d != NULL && (e = readdir(d)) != NULL && e->d_name[0] == '.') {
    }
    if (d != NULL)
        closedir(d);
    return e != NULL;
}

static bool find_all(struct found *f, char *why, size_t why_cap)
{
    const char *wanted = sp_env_text(SP_ENV_IB_DEVICE), *no_library;
    const sp_ib_library *lib;
    struct ibv_device **list;
    int n = 0;
    if (strcmp(wanted, "none") == 0) {
        snprintf(why, why_cap, "SPCCL_IB_DEVICE=none");
        return false;
    }
    if (!has_devices()) {
        snprintf(why, why_cap, "no device: " CLASS_FOLDER " is empty");
        return false;
    }
    lib = sp_ib_library_get(&no_library);
    if (lib == NULL) {
        snprintf(why, why_cap, "%s", no_library);
        return false;
    }
    list = lib->get_device_list(&n);
    for (int i = 0; list != NULL && i < n; i++)
        check_device(lib, list[i], wanted, f);
    if (list != NULL)
        lib->free_device_list(list);
    if (f->n == 0)
        snprintf(why, why_cap, "no usable device%s%s: %s", wanted[0] != '\0' ? " SPCCL_IB_DEVICE=" : "",
                 wanted,
                 f->refused[0] != '\0' ? f->refused : "libibverbs lists none (Debian: ibverbs-providers)");
    return f->n != 0;
}

/* The folder of a device in sysfs; "" for a device in software. */
static void find_folder(const char *name, char *out, size_t cap)
{
    char link[200], *path;
    snprintf(link, sizeof link, CLASS_FOLDER "/%.63s/device", name);
    path = realpath(link, NULL);
    snprintf(out, cap, "%s", path != NULL ? path : "");
    free(path);
}

/* out[i]: how far device i is from the GPU. Without a GPU: 0 if the device is on this thread's NUMA node or its node is
 * unknown, else 1. */
static void find_distances(const char *gpu, const sp_ib_device *devices, int n, int *out)
{
    unsigned cpu = 0, here = 0;
    (void)getcpu(&cpu, &here);
    for (int i = 0; i < n; i++) {
        char folder[256];
        int node;
        find_folder(devices[i].name, folder, sizeof folder);
        node = sp_pci_numa_node(folder);
        out[i] = gpu[0] != '\0' ? sp_pci_distance(gpu, folder) : node < 0 || node == (int)here ? 0 : 1;
    }
}

void sp_ib_choose(int rank, const char *gpu, sp_ib_choice *out)
{
    struct found f = {.n = 0};
    sp_ib_device fastest[SP_IB_DEVICES_MAX];
    int64_t rails = SP_IB_RAILS_MAX;
    int best = 0, n = 0, distances[SP_IB_DEVICES_MAX], kept[SP_IB_DEVICES_MAX];
    bool named = sp_env_text(SP_ENV_IB_DEVICE)[0] != '\0';
    *out = (sp_ib_choice){.n = 0};
    if (!find_all(&f, out->why, sizeof out->why))
        return;
    if (sp_env_number(SP_ENV_IB_RAILS, &rails) != SPCCL_OK) {
        snprintf(out->why, sizeof out->why, "%.*s", (int)sizeof out->why - 1, spccl_last_error());
        return;
    }
    snprintf(out->refused, sizeof out->refused, "%s", named ? f.refused : "");
    for (int i = 0; i < f.n; i++)
        best = f.devices[i].speed_mbps > best ? f.devices[i].speed_mbps : best;
    for (int i = 0; i < f.n; i++)
        if (f.devices[i].speed_mbps == best)
            fastest[n++] = f.devices[i];
    find_distances(gpu, fastest, n, distances);
    out->n = sp_ib_keep(rank, distances, n, (int)rails, kept);
    for (int i = 0; i < out->n; i++) {
        out->devices[i] = fastest[kept[i]];
        out->devices[i].near = gpu[0] == '\0' || distances[kept[i]] == distances[kept[0]];
    }
    snprintf(out->why, sizeof out->why, "%s%s", named ? "SPCCL_IB_DEVICE" : "the fastest",
             gpu[0] != '\0' && distances[kept[0]] < SP_PCI_FAR ? ", those close to the GPU first"
             : n > rails && !named                             ? ", by rank"
                                                               : "");
}

/* ---- spccl info ---- */

static char why_text[1000];
static const char *value_text;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The usable devices, each once. */
static sp_net_device net_devices[SP_IB_DEVICES_MAX];
static size_t n_net_devices;

/* Does the driver of a device register memory of another device? It is asked for memory that is not there: a driver
 * that can do it refuses the descriptor. */
static void try_dmabuf(const sp_ib_library *lib, struct ibv_context *context, sp_net_device *out)
{
    struct ibv_pd *pd = lib->alloc_pd(context);
    int error = pd == NULL ? errno : 0;
    if (pd != NULL) {
        struct ibv_mr *mr = lib->reg_dmabuf_mr(pd, 0, 4096, 0, -1, IBV_ACCESS_LOCAL_WRITE);
        error = errno;
        if (mr != NULL)
            (void)lib->dereg_mr(mr);
        (void)lib->dealloc_pd(pd);
    }
    out->dmabuf = error == EBADF;
    if (!out->dmabuf)
        snprintf(out->why, sizeof out->why, "its driver registers no dmabuf (%s)", strerror(error));
}

static void add_net_device(const sp_ib_library *lib, struct ibv_device *device)
{
    sp_net_device *out = &net_devices[n_net_devices++];
    struct ibv_context *context = lib->open_device(device);
    *out = (sp_net_device){.pointers = true};
    snprintf(out->name, sizeof out->name, "%s", lib->get_device_name(device));
    find_folder(out->name, out->pci_path, sizeof out->pci_path);
    if (lib->reg_dmabuf_mr == NULL)
        snprintf(out->why, sizeof out->why, "libibverbs is older than 1.12");
    else if (context == NULL)
        snprintf(out->why, sizeof out->why, "it cannot be opened");
    else
        try_dmabuf(lib, context, out);
    if (context != NULL)
        (void)lib->close_device(context);
}

static bool is_among(const struct found *f, const char *name)
{
    for (int i = 0; i < f->n; i++)
        if (strcmp(f->devices[i].name, name) == 0)
            return true;
    return false;
}

static void find_net_devices(void)
{
    struct found f = {.n = 0};
    char why[400];
    const char *no_library;
    const sp_ib_library *lib;
    struct ibv_device **list;
    int n = 0;
    if (!find_all(&f, why, sizeof why))
        return;
    lib = sp_ib_library_get(&no_library);
    list = lib->get_device_list(&n);
    for (int i = 0; list != NULL && i < n && n_net_devices < SP_IB_DEVICES_MAX; i++)
        if (is_among(&f, lib->get_device_name(list[i])))
            add_net_device(lib, list[i]);
    if (list != NULL)
        lib->free_device_list(list);
}

bool sp_ib_net_device(size_t i, sp_net_device *out)
{
    static pthread_once_t found = PTHREAD_ONCE_INIT;
    pthread_once(&found, find_net_devices);
    if (i < n_net_devices)
        *out = net_devices[i];
    return i < n_net_devices;
}

static void list_devices(void)
{
    struct found f = {.n = 0};
    size_t used = 0;
    value_text = "in, no device";
    if (!find_all(&f, why_text, sizeof why_text))
        return;
    value_text = "in, devices usable";
    for (int i = 0; i < f.n && used < sizeof why_text - 1; i++) {
        char details[160];
        sp_ib_device_details(&f.devices[i], details, sizeof details);
        used += (size_t)snprintf(why_text + used, sizeof why_text - used, "%sdevice %s port %d (%s)",
                                 i == 0 ? "" : ", ", f.devices[i].name, f.devices[i].port, details);
    }
}

void sp_ib_inform(const char **value, const char **why)
{
    pthread_once(&once, list_devices);
    *value = value_text;
    *why = why_text;
}
