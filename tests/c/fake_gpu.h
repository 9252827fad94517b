/* fake_gpu.h - GPUs made of host memory, for tests of everything but the kernels. An inbox is a memfd, which
 * is really passed between threads and processes. A "kernel" is a thread that writes a mark to the peers'
 * inboxes and waits for their marks. Like a real kernel it has a deadline, reads the abort flag and writes a
 * report. */
#ifndef SP_TEST_FAKE_GPU_H
#define SP_TEST_FAKE_GPU_H

#include "core/base/bits.h"
#include "core/base/clock.h"
#include "core/base/mem.h"
#include "core/contract/gpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FAKE_GPUS 4
#define FAKE_BYTES 65536

/* A test sets these before the ranks start. */
static struct {
    int n_gpus;
    bool no_access[FAKE_GPUS][FAKE_GPUS], no_fd[FAKE_GPUS];
    size_t free_bytes;
    bool import_fails, create_fails, launch_fails;
    bool import_fails_at[FAKE_GPUS]; /* GPUs on which nothing is mapped */
    _Atomic bool enter_fails_at[FAKE_GPUS], pinned_fails_at[FAKE_GPUS];
    _Atomic int slow_ms_at[FAKE_GPUS]; /* what some calls on these GPUs take */
    bool import_loses_at[FAKE_GPUS];   /* GPUs that are lost when they map memory: from then on enter fails */
    uint32_t bad_rule; /* not 0: rank 0's kernels report that a frame of rank 1 breaks this rule */
    atomic_int n_memories, n_waits, n_kernels; /* memories not freed; calls of stream_wait; launches */
    atomic_int n_records, n_asked;             /* calls of event_record; of capture_id and stream_id */
    _Atomic bool hold;                         /* kernels do not end while it is set */
    _Atomic unsigned long long capture;        /* id of the capture of all streams; 0 = none */
    sp_fused_args last;                        /* arguments of the last launch, for tests of one rank */
} fake = {.n_gpus = FAKE_GPUS, .free_bytes = (size_t)1 << 40};

/* Memory of each fake GPU, for the arguments of collectives. */
static _Alignas(64) uint8_t fake_memory[FAKE_GPUS][FAKE_BYTES];
static _Thread_local int fake_current;

/* What the library has not freed: a GPU that is lost keeps it. fake_free_lost frees it. */
#define FAKE_ALLOCATIONS 256
static struct {
    void *p;
    bool is_memory; /* a sp_gpu_memory */
} fake_allocations[FAKE_ALLOCATIONS];
static pthread_mutex_t fake_mu = PTHREAD_MUTEX_INITIALIZER;

/* Replace the entry of `was` by that of `is`. */
static void fake_note(const void *was, void *is, bool is_memory)
{
    int i = 0;
    pthread_mutex_lock(&fake_mu);
    while (i < FAKE_ALLOCATIONS && fake_allocations[i].p != was)
        i++;
    if (i == FAKE_ALLOCATIONS) {
        fprintf(stderr, "fake_gpu.h: more than %d allocations, or memory that is not the fake's\n", i);
        abort();
    }
    fake_allocations[i].p = is;
    fake_allocations[i].is_memory = is_memory;
    pthread_mutex_unlock(&fake_mu);
}
static void fake_free(void *p)
{
    if (p != NULL)
        fake_note(p, NULL, false);
    free(p);
}

struct sp_gpu_memory {
    int fd;
    size_t bytes;
    void *at;
};
struct fake_stream {
    unsigned long long id;
    atomic_uint n_launched, n_done;
};
struct fake_event {
    struct fake_stream *stream;
    unsigned n;
};

static spccl_status fake_count(int *out)
{
    *out = fake.n_gpus;
    return SPCCL_OK;
}
static spccl_status fake_current_device(int *out)
{
    *out = fake_current;
    return SPCCL_OK;
}
static spccl_status fake_describe(int ordinal, sp_gpu_device *out)
{
    *out = (sp_gpu_device){.ordinal = ordinal, .n_sms = 8, .can_share_fd = !fake.no_fd[ordinal]};
    snprintf(out->name, sizeof out->name, "Fake %c", 'A' + ordinal);
    memset(out->uuid, 'a' + ordinal, sizeof out->uuid);
    return SPCCL_OK;
}
static void fake_be_slow(int ordinal)
{
    usleep((useconds_t)fake.slow_ms_at[ordinal] * 1000);
}
static spccl_status fake_net_facts(int ordinal, sp_gpu_net_facts *out)
{
    fake_be_slow(ordinal);
    *out = (sp_gpu_net_facts){.pci = "ffff:00:00.0"};
    return SPCCL_OK;
}
static spccl_status fake_enter(int ordinal, int *before)
{
    if (fake.enter_fails_at[ordinal])
        return SP_FAIL(SPCCL_ERR_DEVICE, "fakeEnter: GPU %d is lost", ordinal);
    *before = fake_current;
    fake_current = ordinal;
    return SPCCL_OK;
}
static void fake_leave(int before)
{
    fake_current = before;
}
static spccl_status fake_device_of(const void *p, int *ordinal)
{
    const uint8_t *at = p;
    *ordinal = -1;
    for (int d = 0; d < FAKE_GPUS; d++)
        if (at >= fake_memory[d] && at < fake_memory[d] + FAKE_BYTES)
            *ordinal = d;
    return SPCCL_OK;
}
static spccl_status fake_can_access(int a, int b, bool *out)
{
    *out = !fake.no_access[a][b];
    return SPCCL_OK;
}
static spccl_status fake_memory_free(size_t *out)
{
    *out = fake.free_bytes;
    return SPCCL_OK;
}

static void fake_memory_destroy(sp_gpu_memory *m)
{
    if (m == NULL)
        return;
    if (m->at != NULL)
        munmap(m->at, m->bytes);
    if (m->fd >= 0)
        close(m->fd);
    fake_free(m);
    fake.n_memories--;
}
static inline void fake_free_lost(void)
{
    for (int i = 0; i < FAKE_ALLOCATIONS; i++)
        if (fake_allocations[i].is_memory)
            fake_memory_destroy(fake_allocations[i].p);
        else
            fake_free(fake_allocations[i].p);
}
static spccl_status fake_map(int fd, size_t bytes, sp_gpu_memory **out)
{
    sp_gpu_memory *m = calloc(1, sizeof *m);
    fake_note(NULL, m, true);
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    *m = (sp_gpu_memory){.fd = fd, .bytes = bytes, .at = at == MAP_FAILED ? NULL : at};
    fake.n_memories++;
    if (m->at == NULL) {
        fake_memory_destroy(m);
        return SP_FAIL(SPCCL_ERR_DEVICE, "fakeMap: no mapping");
    }
    *out = m;
    return SPCCL_OK;
}
static spccl_status fake_memory_create(int ordinal, size_t bytes, const char *handles, bool for_network,
                                       sp_gpu_memory **out)
{
    int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
    (void)ordinal;
    (void)for_network;
    if (fake.create_fails || fd < 0 || ftruncate(fd, (off_t)bytes) != 0) {
        if (fd >= 0)
            close(fd);
        return SP_FAIL(SPCCL_ERR_NOMEM, "fakeCreate: out of memory, shared by %s", handles);
    }
    return fake_map(fd, bytes, out);
}
static spccl_status fake_memory_borrow(int ordinal, void *p, size_t bytes, sp_gpu_memory **out)
{
    (void)p; /* peers map memory of the same size */
    return fake_memory_create(ordinal, bytes, "ipc", false, out);
}
static spccl_status fake_memory_export(sp_gpu_memory *m, uint8_t *handle, int *fd)
{
    memset(handle, 0x5a, SP_GPU_HANDLE_BYTES);
    sp_store_le64(handle, m->bytes);
    *fd = dup(m->fd);
    return SPCCL_OK;
}
static spccl_status fake_memory_import(int ordinal, const uint8_t *handle, int fd, size_t bytes,
                                       sp_gpu_memory **out)
{
    if (fake.import_loses_at[ordinal])
        fake.enter_fails_at[ordinal] = true;
    if (fake.import_loses_at[ordinal] || fake.import_fails || fake.import_fails_at[ordinal] || fd < 0 ||
        sp_load_le64(handle) != bytes || handle[SP_GPU_HANDLE_BYTES - 1] != 0x5a)
        return SP_FAIL(SPCCL_ERR_DEVICE, "fakeImport: refused");
    return fake_map(dup(fd), bytes, out);
}
static void *fake_memory_address(const sp_gpu_memory *m)
{
    return m->at;
}

static spccl_status fake_pinned_find(void *host, size_t bytes, void **device)
{
    (void)bytes;
    *device = host;
    return SPCCL_OK;
}
static spccl_status fake_pinned_create(size_t bytes, void **host, void **device)
{
    if (fake.pinned_fails_at[fake_current])
        return SP_FAIL(SPCCL_ERR_NOMEM, "fakePinned: %zu bytes", bytes);
    fake_be_slow(fake_current);
    *host = *device = calloc(1, bytes);
    if (*host == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "fakePinned: %zu bytes", bytes);
    fake_note(NULL, *host, false);
    return SPCCL_OK;
}
static spccl_status fake_upload(int ordinal, const void *host, size_t bytes, size_t capacity, void **out)
{
    (void)ordinal;
    *out = malloc(capacity);
    memset(*out, 0xa5, capacity); /* whoever reads what was not copied is seen */
    memcpy(*out, host, bytes);
    fake_note(NULL, *out, false);
    return SPCCL_OK;
}
static void fake_unload(int ordinal, void *p)
{
    (void)ordinal;
    fake_free(p);
}
static spccl_status fake_control_create(sp_gpu_control **host, sp_gpu_control **device)
{
    *host = *device = calloc(1, sizeof **host);
    fake_note(NULL, *host, false);
    return SPCCL_OK;
}
static void fake_control_destroy(sp_gpu_control *host)
{
    fake_free(host);
}
static spccl_status fake_read(void *host, const void *device, size_t bytes)
{
    memcpy(host, device, bytes);
    return SPCCL_OK;
}

static spccl_status fake_event_create(void **out)
{
    *out = calloc(1, sizeof(struct fake_event));
    fake_note(NULL, *out, false);
    return SPCCL_OK;
}
static spccl_status fake_event_record(void *event, void *stream)
{
    struct fake_event *e = event;
    struct fake_stream *s = stream;
    fake.n_records++;
    *e = (struct fake_event){.stream = s, .n = s->n_launched};
    return SPCCL_OK;
}
static spccl_status fake_event_query(void *event)
{
    const struct fake_event *e = event;
    return e->stream->n_done >= e->n ? SPCCL_OK : SPCCL_AGAIN;
}
/* Waits on the host, as these streams have no queue. */
static spccl_status fake_stream_wait(void *stream, void *event)
{
    (void)stream;
    fake.n_waits++;
    while (fake_event_query(event) == SPCCL_AGAIN)
        usleep(100);
    return SPCCL_OK;
}
static spccl_status fake_stream_query(void *stream)
{
    struct fake_stream *s = stream;
    return s->n_done >= s->n_launched ? SPCCL_OK : SPCCL_AGAIN;
}
static spccl_status fake_capture_id(void *stream, unsigned long long *id)
{
    (void)stream;
    fake.n_asked++;
    *id = fake.capture;
    return SPCCL_OK;
}
static spccl_status fake_stream_id(void *stream, unsigned long long *id)
{
    fake.n_asked++;
    *id = ((struct fake_stream *)stream)->id;
    return SPCCL_OK;
}

/* ---- the kernel ---- */

struct fake_launch {
    sp_fused_args a;
    struct fake_stream *stream;
};

/* The mark of rank `from` in an inbox; it is the first tail of the rank's slot. */
static uint64_t *fake_mark(const sp_fused_args *a, int to, int from)
{
    uint32_t slot = sp_inbox_slot((uint32_t)to, (uint32_t)from, (uint32_t)a->world_size);
    return (uint64_t *)(void *)(a->inboxes[to] + sp_inbox_tail_off(a->shape, SP_INBOX_INPUT, slot, 0));
}

/* Kernels of one stream run in any order here, so a mark may only grow. */
static void fake_raise(uint64_t *mark, uint64_t wanted)
{
    uint64_t seen = __atomic_load_n(mark, __ATOMIC_ACQUIRE);
    while (seen < wanted &&
           !__atomic_compare_exchange_n(mark, &seen, wanted, false, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE))
        ;
}

static void fake_report(const sp_fused_args *a, int peer, uint64_t wanted, uint64_t seen)
{
    sp_gpu_report *r = &a->control->report;
    r->peer = (uint32_t)peer;
    r->worker = 12;
    r->slice = 4;
    r->seq = a->seq;
    r->wanted = wanted;
    r->seen = seen;
    r->detail = fake.bad_rule;
    __atomic_store_n(&r->fault, fake.bad_rule != 0 ? SP_GPU_BAD_FRAME : SP_GPU_NO_DATA, __ATOMIC_RELEASE);
}

static void *fake_kernel(void *arg)
{
    struct fake_launch *l = arg;
    const sp_fused_args *a = &l->a;
    int64_t deadline_ns = sp_now_ns() + (int64_t)a->timeout_ns;
    uint64_t wanted = (uint64_t)a->seq + 1, seen = 0;
    sp_inbox_state *state = (sp_inbox_state *)(void *)(a->inboxes[a->rank] + sp_inbox_state_off(a->shape, 0));
    for (int r = 0; r < a->world_size; r++)
        if (r != a->rank)
            fake_raise(fake_mark(a, r, a->rank), wanted);
    for (int r = 0; r < a->world_size; r++)
        while (r != a->rank &&
               (seen = __atomic_load_n(fake_mark(a, a->rank, r), __ATOMIC_ACQUIRE)) < wanted) {
            if (__atomic_load_n(&a->control->abort, __ATOMIC_ACQUIRE) != 0)
                goto out;
            if (sp_deadline_passed(deadline_ns)) {
                fake_report(a, r, wanted, seen);
                goto out;
            }
            usleep(200);
        }
    if (fake.bad_rule != 0 && a->rank == 0) {
        fake_report(a, 1, 1000, 999);
        goto out;
    }
    __atomic_fetch_add(&state->frame_bytes, 64, __ATOMIC_RELAXED);
    __atomic_fetch_add(&state->n_frames[SPCCL_FORMAT_DENSE], 1, __ATOMIC_RELAXED);
out:
    while (fake.hold)
        usleep(100);
    l->stream->n_done++;
    free(l);
    return NULL;
}

static spccl_status fake_fused(const sp_fused_args *a, void *stream)
{
    struct fake_launch *l = calloc(1, sizeof *l);
    pthread_t thread;
    if (fake.launch_fails) {
        free(l);
        return SP_FAIL(SPCCL_ERR_DEVICE, "fakeLaunch: refused");
    }
    fake.n_kernels++;
    if (a->world_size == 1)
        fake.last = *a;
    if (fake.capture != 0) { /* during a capture nothing runs */
        free(l);
        return SPCCL_OK;
    }
    *l = (struct fake_launch){.a = *a, .stream = stream};
    l->stream->n_launched++;
    if (pthread_create(&thread, NULL, fake_kernel, l) != 0)
        return SP_FAIL(SPCCL_ERR_DEVICE, "fakeLaunch: no thread");
    pthread_detach(thread);
    return SPCCL_OK;
}
static spccl_status fake_workers_per_cta(int ordinal, uint32_t world_size, uint32_t n_served, bool remote,
                                         uint32_t out[SP_FUSED_OPS])
{
    (void)remote;
    (void)world_size;
    (void)ordinal;
    for (int op = 0; op < SP_FUSED_OPS; op++)
        out[op] = op == SP_FUSED_ALL_REDUCE ? 1 : n_served == 1 || op == SP_FUSED_ALL_GATHER ? 2 : 0;
    return SPCCL_OK;
}
static size_t fake_scratch_bytes(uint64_t n_slices)
{
    return 16 * n_slices;
}
static spccl_status fake_encode(const sp_gpu_encode_args *a, void *stream)
{
    (void)stream;
    *a->status = a->slice_elems; /* the test reads it */
    return SPCCL_OK;
}
static spccl_status fake_decode(const sp_gpu_decode_args *a, void *stream)
{
    (void)stream;
    *a->status = a->slice_elems;
    return SPCCL_OK;
}
/* As if no frame had a fault, and nothing changed. */
static spccl_status fake_delta_open(const struct sp_gpu_delta_args *a, void *stream)
{
    (void)a;
    (void)stream;
    return SPCCL_OK;
}
static spccl_status fake_delta_run(const struct sp_gpu_delta_args *a, int what, void *stream)
{
    (void)what;
    return fake_delta_open(a, stream);
}

extern const sp_gpu_ops sp_gpu_ops_fake;
const sp_gpu_ops sp_gpu_ops_fake = {
    .name = "fake",
    .about = "host memory",
    .device_count = fake_count,
    .current_device = fake_current_device,
    .describe = fake_describe,
    .net_facts = fake_net_facts,
    .enter = fake_enter,
    .leave = fake_leave,
    .device_of = fake_device_of,
    .can_access = fake_can_access,
    .memory_free = fake_memory_free,
    .memory_create = fake_memory_create,
    .memory_borrow = fake_memory_borrow,
    .memory_export = fake_memory_export,
    .memory_import = fake_memory_import,
    .memory_address = fake_memory_address,
    .memory_destroy = fake_memory_destroy,
    .pinned_create = fake_pinned_create,
    .pinned_destroy = fake_free,
    .pinned_find = fake_pinned_find,
    .upload = fake_upload,
    .unload = fake_unload,
    .control_create = fake_control_create,
    .control_destroy = fake_control_destroy,
    .read = fake_read,
    .event_create = fake_event_create,
    .event_record = fake_event_record,
    .event_query = fake_event_query,
    .stream_wait = fake_stream_wait,
    .event_destroy = fake_free,
    .stream_query = fake_stream_query,
    .capture_id = fake_capture_id,
    .stream_id = fake_stream_id,
    .fused_workers_per_cta = fake_workers_per_cta,
    .fused = fake_fused,
    .encode_scratch_bytes = fake_scratch_bytes,
    .encode = fake_encode,
    .decode = fake_decode,
    .delta_open = fake_delta_open,
    .delta_run = fake_delta_run,
};

#endif
