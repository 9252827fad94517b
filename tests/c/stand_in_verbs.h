/* stand_in_verbs.h - network cards in software, in place of libibverbs and of its files in sysfs, for tests of transport
 * ib. The program is linked with --wrap for sp_ib_library_get, fopen and opendir. Each call to a card returns what the
 * card's struct says. Some calls are counted or recorded, below. Nothing travels. */
#ifndef SP_TEST_STAND_IN_VERBS_H
#define SP_TEST_STAND_IN_VERBS_H

#include "test.h"
#include "transport/net/ib/ib_library.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define CARDS_CAP 4
#define CARD_GIDS 4

struct card {
    const char *name;
    enum ibv_transport_type transport;
    int n_ports;
    struct {
        enum ibv_port_state state;
        bool infiniband;
        const char *net; /* the interface of all its GIDs */
        struct {
            const char *type, *address; /* type NULL: the entry is empty */
        } gids[CARD_GIDS];
    } ports[2];
    int no_pd, no_cq, no_qp, no_mr; /* not 0: the call fails with this errno */
    int no_rtr;                     /* likewise: ibv_modify_qp to RTR */
    int no_read;                    /* likewise: ibv_post_send of a read */
    uint32_t inline_most;           /* a queue pair for more inline bytes is refused */
    uint32_t inline_given;          /* max_inline_data of each other queue pair */
};

#define IPV4(host)                                                                                           \
    {                                                                                                        \
        "RoCE v2", "::ffff:10.0.0." host                                                                     \
    }

/* A card that works, with one port. */
static inline struct card good_card(const char *name)
{
    return (struct card){.name = name,
                         .transport = IBV_TRANSPORT_IB,
                         .n_ports = 1,
                         .ports = {{IBV_PORT_ACTIVE, false, "eth7", {IPV4("1")}}},
                         .inline_most = 1000,
                         .inline_given = 128};
}

/* The cards of this machine, and what each of them needs to look like one of libibverbs. */
static struct card cards[CARDS_CAP];
static int n_cards;
static struct ibv_device card_devices[CARDS_CAP];
static _Atomic int n_objects;         /* that were opened and not closed */
static _Atomic int n_rtr;             /* calls of ibv_modify_qp to RTR */
static _Atomic uint32_t inline_asked; /* max_inline_data of the last queue pair, in the call that made it */
static bool records_path;             /* set it only while no rank runs: the next two are for one thread */
static struct ibv_qp_attr last_path, last_rts; /* of the last ibv_modify_qp to RTR, and to RTS */
/* What the next ibv_poll_cq gives, once. */
static struct ibv_wc next_completion;
static atomic_bool has_completion;

/* While no rank runs. */
static inline void use_cards(int n, const struct card *list)
{
    for (int i = 0; i < n; i++) {
        cards[i] = list[i];
        card_devices[i].transport_type = list[i].transport;
        snprintf(card_devices[i].name, sizeof card_devices[i].name, "%s", list[i].name);
    }
    n_cards = n;
    unsetenv("SPCCL_IB_DEVICE");
}

static inline const struct card *card_of(const struct ibv_context *context)
{
    return &cards[context->device - card_devices];
}

static inline int fails_with(int error)
{
    errno = error;
    return error;
}

/* ---- sysfs ---- */

#define VERBS_CLASS "/sys/class/infiniband"
FILE *__real_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode)
{
    char name[64] = "", attr[16] = "";
    int port = 0, index = 0;
    if (strncmp(path, VERBS_CLASS, strlen(VERBS_CLASS)) != 0)
        return __real_fopen(path, mode);
    if (sscanf(path, VERBS_CLASS "/%63[^/]/ports/%d/gid_attrs/%15[^/]/%d", name, &port, attr, &index) == 4)
        for (int i = 0; i < n_cards; i++)
            if (strcmp(cards[i].name, name) == 0 && index < CARD_GIDS &&
                cards[i].ports[port - 1].gids[index].type != NULL) {
                const char *text = strcmp(attr, "types") == 0 ? cards[i].ports[port - 1].gids[index].type
                                                              : cards[i].ports[port - 1].net;
                return fmemopen((void *)(uintptr_t)text, strlen(text), "r");
            }
    errno = ENOENT;
    return NULL;
}

DIR *__real_opendir(const char *path);
DIR *__wrap_opendir(const char *path);
DIR *__wrap_opendir(const char *path)
{
    return __real_opendir(strcmp(path, VERBS_CLASS) == 0 && n_cards != 0 ? "/proc/self" : path);
}

/* ---- devices ---- */

static inline struct ibv_device **list_cards(int *n)
{
    struct ibv_device **list = calloc(CARDS_CAP + 1, sizeof *list);
    for (int i = 0; i < n_cards; i++)
        list[i] = &card_devices[i];
    *n = n_cards;
    n_objects++;
    return list;
}

static inline void free_cards(struct ibv_device **list)
{
    free(list);
    n_objects--;
}

static inline const char *card_name(struct ibv_device *device)
{
    return device->name;
}

static int stand_in_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);

static inline int stand_in_post_receive(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    (void)qp;
    (void)wr;
    (void)bad;
    return 0;
}

static inline int stand_in_poll(struct ibv_cq *cq, int n, struct ibv_wc *out)
{
    (void)cq;
    if (n < 1 || !atomic_exchange(&has_completion, false))
        return 0;
    *out = next_completion;
    return 1;
}

static inline int stand_in_notify(struct ibv_cq *cq, int solicited)
{
    (void)cq;
    (void)solicited;
    return 0;
}

static inline int no_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **ctx)
{
    (void)channel;
    (void)cq;
    (void)ctx;
    return -1;
}

static inline int no_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    (void)context;
    (void)event;
    return -1;
}

static inline struct ibv_context *open_card(struct ibv_device *device)
{
    struct ibv_context *context = calloc(1, sizeof *context);
    context->device = device;
    context->async_fd = eventfd(0, EFD_CLOEXEC);
    context->ops.post_send = stand_in_post_send;
    context->ops.post_recv = stand_in_post_receive;
    context->ops.poll_cq = stand_in_poll;
    context->ops.req_notify_cq = stand_in_notify;
    n_objects++;
    return context;
}

static inline int close_card(struct ibv_context *context)
{
    close(context->async_fd);
    free(context);
    n_objects--;
    return 0;
}

static inline int query_card(struct ibv_context *context, struct ibv_device_attr *out)
{
    *out = (struct ibv_device_attr){.phys_port_cnt = (uint8_t)card_of(context)->n_ports, .max_cqe = 1 << 16};
    return 0;
}

static inline int query_card_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out)
{
    out->state = card_of(context)->ports[port - 1].state;
    out->link_layer =
        card_of(context)->ports[port - 1].infiniband ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
    out->gid_tbl_len = CARD_GIDS;
    out->active_mtu = IBV_MTU_4096;
    out->active_speed = 32;
    out->active_width = 2; /* 4 lanes of 25 Gbit/s */
    return 0;
}

static inline int query_card_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *out)
{
    const char *address = card_of(context)->ports[port - 1].gids[index].address;
    memset(out, 0, sizeof *out);
    return address == NULL || inet_pton(AF_INET6, address, out->raw) == 1 ? 0 : EINVAL;
}

/* ---- objects ---- */

static inline struct ibv_pd *alloc_card_pd(struct ibv_context *context)
{
    struct ibv_pd *pd;
    if (card_of(context)->no_pd != 0 && fails_with(card_of(context)->no_pd))
        return NULL;
    pd = calloc(1, sizeof *pd);
    pd->context = context;
    n_objects++;
    return pd;
}

static inline int free_pd(struct ibv_pd *pd)
{
    free(pd);
    n_objects--;
    return 0;
}

struct registration {
    struct ibv_mr mr;
    int access; /* that ibv_reg_mr was asked for */
};

static inline struct ibv_mr *register_memory(struct ibv_pd *pd, void *data, size_t bytes, int access)
{
    struct registration *r;
    if (card_of(pd->context)->no_mr != 0 && fails_with(card_of(pd->context)->no_mr))
        return NULL;
    r = calloc(1, sizeof *r);
    r->mr = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = data, .length = bytes};
    r->access = access;
    n_objects++;
    return &r->mr;
}

/* The access that memory was registered with. */
static inline int access_asked(const void *mr)
{
    return ((const struct registration *)mr)->access;
}

static inline int free_mr(struct ibv_mr *mr)
{
    free(mr); /* the first member of its registration */
    n_objects--;
    return 0;
}

static inline struct ibv_comp_channel *create_channel(struct ibv_context *context)
{
    struct ibv_comp_channel *channel = calloc(1, sizeof *channel);
    *channel = (struct ibv_comp_channel){.context = context, .fd = eventfd(0, EFD_CLOEXEC)};
    n_objects++;
    return channel;
}

static inline int free_channel(struct ibv_comp_channel *channel)
{
    close(channel->fd);
    free(channel);
    n_objects--;
    return 0;
}

static inline struct ibv_cq *create_card_cq(struct ibv_context *context, int n, void *ctx,
                                            struct ibv_comp_channel *channel, int vector)
{
    struct ibv_cq *cq;
    (void)ctx;
    (void)vector;
    if (card_of(context)->no_cq != 0 && fails_with(card_of(context)->no_cq))
        return NULL;
    cq = calloc(1, sizeof *cq);
    cq->context = context;
    cq->channel = channel;
    cq->cqe = n;
    n_objects++;
    return cq;
}

static inline int free_cq(struct ibv_cq *cq)
{
    free(cq);
    n_objects--;
    return 0;
}

static inline struct ibv_qp *create_card_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    const struct card *c = card_of(pd->context);
    struct ibv_qp *qp;
    if (c->no_qp != 0 && fails_with(c->no_qp))
        return NULL;
    if (attr->cap.max_inline_data > c->inline_most && fails_with(EINVAL))
        return NULL;
    inline_asked = attr->cap.max_inline_data;
    attr->cap.max_inline_data = c->inline_given;
    qp = calloc(1, sizeof *qp);
    qp->context = pd->context;
    qp->qp_num = 0x11;
    n_objects++;
    return qp;
}

static inline int modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    (void)mask;
    n_rtr += attr->qp_state == IBV_QPS_RTR;
    if (records_path && attr->qp_state == IBV_QPS_RTR)
        last_path = *attr;
    if (records_path && attr->qp_state == IBV_QPS_RTS)
        last_rts = *attr;
    if (attr->qp_state == IBV_QPS_RTR)
        return card_of(qp->context)->no_rtr;
    return 0;
}

static inline int free_qp(struct ibv_qp *qp)
{
    free(qp);
    n_objects--;
    return 0;
}

/* The last write that was posted. A write with more inline bytes than the queue pair has is refused, as drivers do. */
static struct {
    unsigned flags;
    uint32_t bytes;
} last_write;

static int stand_in_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    last_write.flags = wr->send_flags;
    last_write.bytes = wr->num_sge != 0 ? wr->sg_list[0].length : 0;
    *bad = wr;
    if (wr->opcode == IBV_WR_RDMA_READ)
        return card_of(qp->context)->no_read;
    return (wr->send_flags & IBV_SEND_INLINE) != 0 && last_write.bytes > card_of(qp->context)->inline_given
               ? EINVAL
               : 0;
}

static inline const char *status_text(enum ibv_wc_status status)
{
    return status == IBV_WC_REM_ACCESS_ERR ? "remote access error" : "another error";
}

static const sp_ib_library stand_in_library = {.get_device_list = list_cards,
                                               .free_device_list = free_cards,
                                               .get_device_name = card_name,
                                               .open_device = open_card,
                                               .close_device = close_card,
                                               .query_device = query_card,
                                               .query_port = query_card_port,
                                               .query_gid = query_card_gid,
                                               .alloc_pd = alloc_card_pd,
                                               .dealloc_pd = free_pd,
                                               .reg_mr = register_memory,
                                               .dereg_mr = free_mr,
                                               .create_comp_channel = create_channel,
                                               .destroy_comp_channel = free_channel,
                                               .create_cq = create_card_cq,
                                               .destroy_cq = free_cq,
                                               .create_qp = create_card_qp,
                                               .modify_qp = modify_qp,
                                               .destroy_qp = free_qp,
                                               .get_cq_event = no_cq_event,
                                               .get_async_event = no_async_event,
                                               .wc_status_str = status_text};

const sp_ib_library *__wrap_sp_ib_library_get(const char **why);
const sp_ib_library *__wrap_sp_ib_library_get(const char **why)
{
    *why = "";
    return &stand_in_library;
}

#endif
