/* ib_verbs.c - an open device, its memory and its queue pairs. See ib_verbs.h. */
#include "transport/net/ib/ib_verbs.h"

#include "core/base/env.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "transport/net/ib/ib_library.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* max_inline_data that is asked for. If the device refuses such a queue pair, 0 is asked for. */
#define INLINE_BYTES 128u
#define HOP_LIMIT 255
#define MIN_RNR_TIMER 12 /* 0.64 ms; receives are always posted, so it does not happen */
#define RETRIES 6        /* of a packet without acknowledgement; 7 would be endless on software RoCE */
#define RNR_RETRY 7
#define POLL_CAP 32

struct sp_ib_context {
    sp_ib_device device;
    const sp_ib_library *lib;
    struct ibv_context *verbs;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    bool notified; /* the next completion makes an event */
};

struct sp_ib_link {
    sp_ib_context *context;
    struct ibv_qp *qp;
    uint32_t inline_bytes; /* max_inline_data of the queue pair: what it has, not what was asked for */
};

/* True if RLIMIT_MEMLOCK may be why a call failed. The kernel says EPERM if the limit is 0, else ENOMEM. */
static bool is_lock_limit(int error, const struct rlimit *limit)
{
    return limit->rlim_cur != RLIM_INFINITY && (error == ENOMEM || (error == EPERM && limit->rlim_cur == 0));
}

const char *sp_ib_lock_text(int error, char *out, size_t cap)
{
    struct rlimit r;
    out[0] = '\0';
    if (getrlimit(RLIMIT_MEMLOCK, &r) == 0 && is_lock_limit(error, &r))
        snprintf(out, cap, "; this process may lock %llu KiB of memory, raise it with ulimit -l",
                 (unsigned long long)r.rlim_cur >> 10);
    return out;
}

/* The text of a call that failed with `error`. */
static spccl_status call_failed(const sp_ib_context *d, const char *call, int error)
{
    char device[SP_IB_NAME_CAP + 24], limit[120];
    sp_ib_device_text(&d->device, device, sizeof device);
    (void)sp_ib_lock_text(error, limit, sizeof limit);
    errno = error;
    return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "%s: %s%s", device, call, limit);
}

/* ---- the device ---- */

static struct ibv_context *open_context(const sp_ib_library *lib, const char *name)
{
    int n = 0;
    struct ibv_device **list = lib->get_device_list(&n);
    struct ibv_context *context = NULL;
    int error;
    errno = list != NULL ? ENODEV : errno; /* it was there when the device was chosen */
    for (int i = 0; list != NULL && i < n; i++)
        if (strcmp(lib->get_device_name(list[i]), name) == 0)
            context = lib->open_device(list[i]);
    error = errno;
    if (list != NULL)
        lib->free_device_list(list);
    errno = error;
    return context;
}

static bool set_nonblocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

static spccl_status open_objects(sp_ib_context *d, int n_completions)
{
    struct ibv_device_attr attr;
    d->verbs = open_context(d->lib, d->device.name);
    if (d->verbs == NULL)
        return call_failed(d, "ibv_open_device", errno);
    if (d->lib->query_device(d->verbs, &attr) != 0)
        return call_failed(d, "ibv_query_device", errno);
    if (n_completions > attr.max_cqe)
        return SP_FAIL(SPCCL_ERR_UNREACHABLE,
                       "device %s: %d completions are needed for this group, and it holds at most %d",
                       d->device.name, n_completions, attr.max_cqe);
    d->pd = d->lib->alloc_pd(d->verbs);
    if (d->pd == NULL)
        return call_failed(d, "ibv_alloc_pd", errno);
    d->channel = d->lib->create_comp_channel(d->verbs);
    if (d->channel == NULL)
        return call_failed(d, "ibv_create_comp_channel", errno);
    d->cq = d->lib->create_cq(d->verbs, n_completions, NULL, d->channel, 0);
    if (d->cq == NULL)
        return call_failed(d, "ibv_create_cq", errno);
    if (!set_nonblocking(d->channel->fd) || !set_nonblocking(d->verbs->async_fd))
        return call_failed(d, "fcntl", errno);
    return SPCCL_OK;
}

spccl_status sp_ib_context_open(const sp_ib_device *device, int n_completions, sp_ib_context **out)
{
    const char *why;
    spccl_status st;
    sp_ib_context *d = sp_calloc(1, sizeof *d);
    if (d == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "device %s: %zu bytes", device->name, sizeof *d);
    d->device = *device;
    d->lib = sp_ib_library_get(&why);
    st = d->lib != NULL ? open_objects(d, n_completions) : SP_FAIL(SPCCL_ERR_UNREACHABLE, "%s", why);
    if (st != SPCCL_OK) {
        sp_ib_context_close(d);
        return st;
    }
    *out = d;
    return SPCCL_OK;
}

void sp_ib_context_close(sp_ib_context *d)
{
    if (d == NULL)
        return;
    if (d->cq != NULL)
        (void)d->lib->destroy_cq(d->cq);
    if (d->channel != NULL)
        (void)d->lib->destroy_comp_channel(d->channel);
    if (d->pd != NULL)
        (void)d->lib->dealloc_pd(d->pd);
    if (d->verbs != NULL)
        (void)d->lib->close_device(d->verbs);
    sp_free(d);
}

void sp_ib_context_close_descriptors(sp_ib_context *d)
{
    if (d->channel != NULL)
        (void)close(d->channel->fd);
    if (d->verbs != NULL) {
        (void)close(d->verbs->async_fd);
        (void)close(d->verbs->cmd_fd);
    }
}

int sp_ib_context_fd(const sp_ib_context *d)
{
    return d->channel->fd;
}

int sp_ib_context_event_fd(const sp_ib_context *d)
{
    return d->verbs->async_fd;
}

void sp_ib_context_log_events(sp_ib_context *d, int rank)
{
    struct ibv_async_event event;
    char device[SP_IB_NAME_CAP + 24];
    sp_ib_device_text(&d->device, device, sizeof device);
    while (d->lib->get_async_event(d->verbs, &event) == 0) {
        bool is_bad = event.event_type == IBV_EVENT_PORT_ERR || event.event_type == IBV_EVENT_DEVICE_FATAL;
        sp_log(is_bad ? SP_LOG_WARN : SP_LOG_INFO, rank, "%s: event: %s", device,
               d->lib->event_type_str(event.event_type));
        d->lib->ack_async_event(&event);
    }
}

void sp_ib_context_forget(sp_ib_context *d)
{
    struct ibv_cq *cq;
    void *ctx;
    while (d->notified && d->lib->get_cq_event(d->channel, &cq, &ctx) == 0) {
        d->lib->ack_cq_events(cq, 1);
        d->notified = false; /* one request makes one event */
    }
}

spccl_status sp_ib_context_notify(sp_ib_context *d)
{
    int error;
    sp_ib_context_forget(d);
    if (d->notified)
        return SPCCL_OK;
    error = ibv_req_notify_cq(d->cq, 0);
    if (error != 0)
        return call_failed(d, "ibv_req_notify_cq", error);
    d->notified = true;
    return SPCCL_OK;
}

int sp_ib_context_poll(sp_ib_context *d, sp_ib_completion *out, int cap)
{
    struct ibv_wc wc[POLL_CAP];
    int n = ibv_poll_cq(d->cq, cap < POLL_CAP ? cap : POLL_CAP, wc);
    for (int i = 0; i < n; i++) {
        bool fine = wc[i].status == IBV_WC_SUCCESS;
        out[i] =
            (sp_ib_completion){.id = wc[i].wr_id, .error = fine ? NULL : d->lib->wc_status_str(wc[i].status)};
        if (fine && wc[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM && (wc[i].wc_flags & IBV_WC_WITH_IMM) != 0) {
            out[i].immediate = true;
            out[i].imm = ntohl(wc[i].imm_data);
            out[i].bytes = wc[i].byte_len;
        }
    }
    return n < 0 ? -1 : n;
}

/* ---- memory ---- */

static int access_of(enum sp_ib_writer writer)
{
    switch (writer) {
    case SP_IB_NO_WRITER:
        return 0;
    case SP_IB_DEVICE_WRITES:
        return IBV_ACCESS_LOCAL_WRITE;
    case SP_IB_PEERS_WRITE:
        return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    }
    return 0;
}

spccl_status sp_ib_memory_open(sp_ib_context *d, void *data, size_t bytes, enum sp_ib_writer writer,
                               sp_ib_memory *out)
{
    struct ibv_mr *mr = d->lib->reg_mr(d->pd, data, bytes, access_of(writer));
    if (mr == NULL) {
        char call[80];
        int error = errno;
        snprintf(call, sizeof call, "ibv_reg_mr of %zu KiB", bytes >> 10);
        return call_failed(d, call, error);
    }
    *out = (sp_ib_memory){.mr = mr, .lkey = mr->lkey, .rkey = mr->rkey};
    return SPCCL_OK;
}

spccl_status sp_ib_region_open(sp_ib_context *d, const sp_region_config *c, sp_ib_memory *out)
{
    int access = !c->peers_write ? 0
                 : c->flush      ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ
                                 : IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    struct ibv_mr *mr = NULL;
    char call[80];
    int error;
    errno = EOPNOTSUPP; /* an old library */
    if (c->dmabuf < 0)
        mr = d->lib->reg_mr(d->pd, c->address, c->bytes, access);
    else if (d->lib->reg_dmabuf_mr != NULL)
        mr = d->lib->reg_dmabuf_mr(d->pd, c->dmabuf_offset, c->bytes, (uintptr_t)c->address, c->dmabuf,
                                   access);
    error = errno;
    if (mr == NULL) {
        snprintf(call, sizeof call, "%s of %zu KiB of GPU memory",
                 c->dmabuf < 0 ? "ibv_reg_mr" : "ibv_reg_dmabuf_mr", c->bytes >> 10);
        return call_failed(d, call, error);
    }
    *out = (sp_ib_memory){.mr = mr, .lkey = mr->lkey, .rkey = mr->rkey};
    return SPCCL_OK;
}

void sp_ib_memory_close(sp_ib_memory *m)
{
    const char *why;
    if (m->mr != NULL)
        (void)sp_ib_library_get(&why)->dereg_mr(m->mr);
    *m = (sp_ib_memory){.mr = NULL};
}

/* ---- links ---- */

static struct ibv_qp *create_qp(const sp_ib_context *d, int n_writes, int n_receives, uint32_t *inline_bytes)
{
    struct ibv_qp *qp = NULL;
    for (uint32_t bytes = INLINE_BYTES;; bytes = 0) {
        struct ibv_qp_init_attr attr = {.send_cq = d->cq,
                                        .recv_cq = d->cq,
                                        .qp_type = IBV_QPT_RC,
                                        .cap = {.max_send_wr = (uint32_t)n_writes,
                                                .max_recv_wr = (uint32_t)n_receives,
                                                .max_send_sge = 1,
                                                .max_recv_sge = 1,
                                                .max_inline_data = bytes}};
        qp = d->lib->create_qp(d->pd, &attr);
        *inline_bytes = attr.cap.max_inline_data;
        if (qp != NULL || bytes == 0)
            return qp;
    }
}

/* access: of the peer */
static spccl_status open_link(sp_ib_context *d, int n_writes, int n_receives, unsigned access,
                              sp_ib_link **out, sp_ib_end *mine)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT, .port_num = d->device.port, .qp_access_flags = access};
    int error;
    sp_ib_link *l = sp_calloc(1, sizeof *l);
    if (l == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "device %s: %zu bytes", d->device.name, sizeof *l);
    l->context = d;
    l->qp = create_qp(d, n_writes, n_receives, &l->inline_bytes);
    if (l->qp == NULL) {
        error = errno;
        sp_ib_link_close(l);
        return call_failed(d, "ibv_create_qp", error);
    }
    error =
        d->lib->modify_qp(l->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (error != 0) {
        sp_ib_link_close(l);
        return call_failed(d, "ibv_modify_qp to INIT", error);
    }
    *mine = (sp_ib_end){.ethernet = d->device.ethernet,
                        .lid = d->device.lid,
                        .mtu_bytes = d->device.mtu_bytes,
                        .queue_pair = l->qp->qp_num,
                        .packet = (l->qp->qp_num * 2654435761u) & 0xffffff};
    memcpy(mine->gid, d->device.gid, sizeof mine->gid);
    *out = l;
    return SPCCL_OK;
}

spccl_status sp_ib_link_open(sp_ib_context *d, int n_writes, int n_receives, sp_ib_link **out,
                             sp_ib_end *mine)
{
    return open_link(d, n_writes, n_receives, IBV_ACCESS_REMOTE_WRITE, out, mine);
}

spccl_status sp_ib_link_open_loop(sp_ib_context *d, sp_ib_link **out)
{
    sp_ib_link *l = NULL;
    sp_ib_end mine;
    spccl_status st;
    SP_TRY(open_link(d, 1, 1, IBV_ACCESS_REMOTE_READ, &l, &mine));
    st = sp_ib_link_connect(l, &mine, &mine);
    if (st == SPCCL_OK)
        *out = l;
    else
        sp_ib_link_close(l);
    return st;
}

void sp_ib_link_close(sp_ib_link *l)
{
    if (l == NULL)
        return;
    if (l->qp != NULL)
        (void)l->context->lib->destroy_qp(l->qp);
    sp_free(l);
}

spccl_status sp_ib_link_receive(sp_ib_link *l, uint64_t id, int n)
{
    for (int i = 0; i < n; i++) {
        struct ibv_recv_wr wr = {.wr_id = id}, *bad;
        int error = ibv_post_recv(l->qp, &wr, &bad);
        if (error != 0)
            return call_failed(l->context, "ibv_post_recv", error);
    }
    return SPCCL_OK;
}

static enum ibv_mtu mtu_code(uint32_t bytes)
{
    enum ibv_mtu code = IBV_MTU_256;
    while (code < IBV_MTU_4096 && 256u << code <= bytes)
        code++;
    return code;
}

/* Ready to receive: the path to the peer. */
static int enter_rtr(sp_ib_link *l, const sp_ib_end *mine, const sp_ib_end *theirs)
{
    const sp_ib_device *device = &l->context->device;
    uint32_t mtu = mine->mtu_bytes < theirs->mtu_bytes ? mine->mtu_bytes : theirs->mtu_bytes;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR,
                               .path_mtu = mtu_code(mtu),
                               .dest_qp_num = theirs->queue_pair,
                               .rq_psn = theirs->packet,
                               .max_dest_rd_atomic = 1,
                               .min_rnr_timer = MIN_RNR_TIMER,
                               .ah_attr = {.dlid = theirs->lid, .port_num = device->port}};
    /* InfiniBand within a subnet needs no GID. The first 8 bytes of a GID are the subnet. */
    if (device->ethernet || memcmp(mine->gid, theirs->gid, 8) != 0) {
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.sgid_index = device->gid_index;
        attr.ah_attr.grh.hop_limit = HOP_LIMIT;
        memcpy(attr.ah_attr.grh.dgid.raw, theirs->gid, SP_IB_GID_BYTES);
    }
    return l->context->lib->modify_qp(l->qp, &attr,
                                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                          IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

spccl_status sp_ib_link_connect(sp_ib_link *l, const sp_ib_end *mine, const sp_ib_end *theirs)
{
    int64_t timeout;
    int error;
    struct ibv_qp_attr attr;
    SP_TRY(sp_env_number(SP_ENV_IB_TIMEOUT, &timeout));
    error = enter_rtr(l, mine, theirs);
    if (error != 0)
        return call_failed(l->context, "ibv_modify_qp to RTR (no route to the peer's GID?)", error);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS,
                                .timeout = (uint8_t)timeout,
                                .retry_cnt = RETRIES,
                                .rnr_retry = RNR_RETRY,
                                .sq_psn = mine->packet,
                                .max_rd_atomic = 1};
    error = l->context->lib->modify_qp(l->qp, &attr,
                                       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                           IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    return error == 0 ? SPCCL_OK : call_failed(l->context, "ibv_modify_qp to RTS", error);
}

spccl_status sp_ib_link_write(sp_ib_link *l, const sp_ib_write *w)
{
    struct ibv_sge sge = {.addr = (uintptr_t)w->from, .length = w->bytes, .lkey = w->lkey};
    struct ibv_send_wr *bad, wr = {.wr_id = w->id,
                                   .sg_list = &sge,
                                   .num_sge = w->bytes != 0,
                                   .opcode = w->is_put ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_WRITE_WITH_IMM,
                                   .imm_data = htonl(w->imm),
                                   .wr.rdma = {.remote_addr = w->to, .rkey = w->rkey}};
    int error;
    if (w->signal)
        wr.send_flags |= IBV_SEND_SIGNALED;
    /* The processor cannot read a put's memory. */
    if (w->bytes != 0 && w->bytes <= l->inline_bytes && !w->is_put)
        wr.send_flags |= IBV_SEND_INLINE;
    error = ibv_post_send(l->qp, &wr, &bad);
    return error == 0 ? SPCCL_OK : call_failed(l->context, "ibv_post_send", error);
}

spccl_status sp_ib_link_read(sp_ib_link *l, const void *from, uint32_t rkey, void *to, uint32_t lkey,
                             uint64_t id)
{
    struct ibv_sge sge = {.addr = (uintptr_t)to, .length = 1, .lkey = lkey};
    struct ibv_send_wr *bad, wr = {.wr_id = id,
                                   .sg_list = &sge,
                                   .num_sge = 1,
                                   .opcode = IBV_WR_RDMA_READ,
                                   .send_flags = IBV_SEND_SIGNALED,
                                   .wr.rdma = {.remote_addr = (uintptr_t)from, .rkey = rkey}};
    int error = ibv_post_send(l->qp, &wr, &bad);
    return error == 0 ? SPCCL_OK : call_failed(l->context, "ibv_post_send of a read", error);
}
