/* gpu_attach.h - an attach under way, and what the files of the start, the end and the info of a GPU call of each other. */
#ifndef SP_GPU_ATTACH_H
#define SP_GPU_ATTACH_H

#include "core/gpu/gpu_comm.h"

/* What a rank tells the others. The struct is sent as it is; ranks of another version are refused first. */
typedef struct sp_gpu_facts {
    uint32_t magic, n_bytes;
    char version[16];
    int32_t status; /* not SPCCL_OK: this rank cannot take part; `error` is the reason */
    int32_t ordinal, pid, format;
    uint32_t n_sms;
    uint8_t workers[SP_FUSED_SERVED_MAX][6]; /* as in sp_gpu_limits; the rest is zero */
    uint32_t max_ctas, handles, can_share_fd;
    uint8_t address[SP_GPU_SHARE_ADDRESS_BYTES];
    uint8_t uuid[16];
    uint64_t inbox_bytes, free_bytes;
    uint32_t fallback;
    char name[64];
    uint32_t hops; /* as in sp_gpu_limits */
    char error[448];
    uint32_t between_hosts; /* sp_between_hosts */
    uint32_t n_proxies;     /* that this rank would like */
    uint32_t direct; /* 1: it asks for rings in GPU memory (SPCCL_DEBUG_GPU_DIRECT), where that is possible */
    uint32_t pad;
} sp_gpu_facts;
_Static_assert(SP_FUSED_OPS <= 6, "facts.workers");
_Static_assert(sizeof(sp_gpu_facts) == 696, "no padding, and the same for every compiler");

/* Does this rank take part in groups on several hosts? */
typedef enum {
    SP_BETWEEN_HOSTS_OFF,
    SP_BETWEEN_HOSTS_ON,
    SP_BETWEEN_HOSTS_RDMA /* "auto", and a link is RDMA */
} sp_between_hosts;

typedef struct sp_attach {
    spccl_comm *comm;
    sp_gpu_comm
        *g; /* NULL: there was no memory for it; such a rank takes part in the exchange of facts only */
    sp_gpu_share *share;
    sp_gpu_facts mine, all[SP_GPU_RANKS_MAX];
    bool spans_hosts;
    bool direct; /* some rank asks for rings in GPU memory: then all exchange what they could do */
    int64_t deadline_ns;
} sp_attach;

/* ---- gpu_attach.c ---- */

/* As sp_gpu_part.detach. */
void sp_gpu_comm_detach(spccl_comm *comm);

/* ---- gpu_info.c ---- */

/* Write g->links, once the inboxes are mapped and the proxies run. */
void sp_gpu_info_write_links(sp_gpu_comm *g);

/* ---- gpu_facts.c ---- */

/* Set a->mine, and open a->share. Errors: any reason why this rank cannot take part. */
spccl_status sp_attach_gather_facts(sp_attach *a, const spccl_cuda_config *given);
/* From the facts of all ranks: handles, hosts, limits and shape. All ranks come to the same result. Errors:
 * MISMATCH, UNREACHABLE, SETTING, NOMEM, and those of a rank that cannot take part. */
spccl_status sp_attach_decide(sp_attach *a);

#endif
