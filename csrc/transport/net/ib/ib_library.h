/* ib_library.h - libibverbs, opened at run time. Only ib_devices.c and ib_verbs.c use it. Functions that the header
 * defines inline (ibv_post_send, ibv_poll_cq ...) call the driver directly and need no symbol. */
#ifndef SP_IB_LIBRARY_H
#define SP_IB_LIBRARY_H

#include "core/base/status.h"

#include <infiniband/verbs.h>

typedef struct sp_ib_library {
    int (*fork_init)(void);
    struct ibv_device **(*get_device_list)(int *n);
    void (*free_device_list)(struct ibv_device **list);
    const char *(*get_device_name)(struct ibv_device *device);
    struct ibv_context *(*open_device)(struct ibv_device *device);
    int (*close_device)(struct ibv_context *context);
    int (*query_device)(struct ibv_context *context, struct ibv_device_attr *out);
    /* Writes the fields up to `flags`. */
    int (*query_port)(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out);
    int (*query_gid)(struct ibv_context *context, uint8_t port, int index, union ibv_gid *out);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *context);
    int (*dealloc_pd)(struct ibv_pd *pd);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *pd, void *data, size_t bytes, int access);
    int (*dereg_mr)(struct ibv_mr *mr);
    /* NULL: the library is older than 1.12. */
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t iova, int fd,
                                    int access);
    struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *context);
    int (*destroy_comp_channel)(struct ibv_comp_channel *channel);
    struct ibv_cq *(*create_cq)(struct ibv_context *context, int n, void *ctx,
                                struct ibv_comp_channel *channel, int vector);
    int (*destroy_cq)(struct ibv_cq *cq);
    int (*get_cq_event)(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **ctx);
    void (*ack_cq_events)(struct ibv_cq *cq, unsigned n);
    struct ibv_qp *(*create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
    int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
    int (*destroy_qp)(struct ibv_qp *qp);
    int (*get_async_event)(struct ibv_context *context, struct ibv_async_event *out);
    void (*ack_async_event)(struct ibv_async_event *event);
    const char *(*event_type_str)(enum ibv_event_type type);
    const char *(*wc_status_str)(enum ibv_wc_status status);
} sp_ib_library;

/* The library, opened once and never closed: it registers handlers with the process. NULL: *why says why not. */
const sp_ib_library *sp_ib_library_get(const char **why);

#endif
