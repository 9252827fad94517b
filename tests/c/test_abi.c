/* test_abi.c - callers that were built with an older or a newer spccl.h than the library. Each struct of the
 * interface is declared here twice: as an older header may have it, with fewer fields, and as a newer header
 * may have it, with one more. The GPU is fake (fake_gpu.h). */
#include "fake_gpu.h"
#include "ranks.h"
#include "spccl_channel.h"
#include "spccl_experimental.h"

#include <stddef.h>

/* No struct may end in padding: a field added there would be read from bytes that an older caller never set.
 */
#define ENDS_WITH(type, field)                                                                               \
    _Static_assert(offsetof(type, field) + sizeof(((type *)0)->field) == sizeof(type),                       \
                   #type " ends in padding")
ENDS_WITH(spccl_encode_options, slice_elems);
ENDS_WITH(spccl_frame_info, values_off);
ENDS_WITH(spccl_delta_options, old_cap);
ENDS_WITH(spccl_config, schedule);
ENDS_WITH(spccl_store, get);
ENDS_WITH(spccl_stats, buffer_bytes);
ENDS_WITH(spccl_cuda_config, caller_orders);
ENDS_WITH(spccl_cuda_options, max_ctas);
ENDS_WITH(spccl_cuda_stats, n_remote);
ENDS_WITH(spccl_info_entry, why);
ENDS_WITH(spccl_prune_options, sent_dtype);
ENDS_WITH(spccl_weights_options, levels);
ENDS_WITH(spccl_signs_sum_options, device);
ENDS_WITH(spccl_plan_info, gpu_results);
ENDS_WITH(spccl_simulate_options, wake_ns);
ENDS_WITH(spccl_simulated, format_bytes);
ENDS_WITH(spccl_channels_config, window);

/* The sizes of version 0.2: what a program compiled with it passes. They never change; a field that is added
 * gets a line of its own here with the new size. */
_Static_assert(sizeof(spccl_encode_options) == 24, "0.2");
_Static_assert(sizeof(spccl_frame_info) == 72, "0.2");
_Static_assert(sizeof(spccl_delta_options) == 32, "0.2");
_Static_assert(sizeof(spccl_config) == 72, "0.2");
_Static_assert(sizeof(spccl_store) == 32, "0.2");
_Static_assert(sizeof(spccl_stats) == 176, "0.2");
_Static_assert(sizeof(spccl_cuda_config) == 40, "0.2");
_Static_assert(sizeof(spccl_cuda_options) == 16, "0.2");
_Static_assert(sizeof(spccl_cuda_stats) == 192, "0.2");
_Static_assert(sizeof(spccl_info_entry) == 40, "0.2");
_Static_assert(sizeof(spccl_prune_options) == 136, "0.2");
_Static_assert(sizeof(spccl_weights_options) == 56, "0.2");
_Static_assert(sizeof(spccl_signs_sum_options) == 56, "0.2");
_Static_assert(sizeof(spccl_plan_info) == 328, "0.2");
_Static_assert(sizeof(spccl_simulate_options) == 200 && sizeof(spccl_simulated) == 248, "0.2");
_Static_assert(sizeof(spccl_channels_config) == 40, "0.2");
/* What kernels of users read: another size or place needs another SPCCL_CHANNEL_LAYOUT. */
_Static_assert(SPCCL_CHANNEL_LAYOUT == 2 && sizeof(spccl_channel_state) == 64 &&
                   sizeof(spccl_channel_report) == 40 && sizeof(spccl_channel_base) == 88 &&
                   sizeof(spccl_memory_channel) == 104 && sizeof(spccl_port_channel) == 128 &&
                   sizeof(spccl_trigger) == 32 && offsetof(spccl_channel_base, report) == 80,
               "layout 2");
/* python/spccl/channels.py and tests/py/test_channels.py have the same numbers. */
#define AT(type, member, offset) _Static_assert(offsetof(type, member) == (offset), #member)
AT(spccl_channel_base, window, 16);
AT(spccl_channel_base, peer_bytes, 32);
AT(spccl_channel_base, state, 48);
AT(spccl_channel_base, signals, 56);
AT(spccl_channel_base, abort, 72);
AT(spccl_channel_state, signals_taken, 8);
AT(spccl_channel_state, blocks_here, 40);
AT(spccl_memory_channel, peer_window, 88);
AT(spccl_memory_channel, peer_signals, 96);
AT(spccl_port_channel, fifo, 88);
AT(spccl_port_channel, done, 104);
AT(spccl_port_channel, src_memory, 124);
/* Without struct_bytes: they lie in GPU memory or come as arrays, and never change. */
_Static_assert(sizeof(spccl_prune_state) == 48, "0.2");
_Static_assert(sizeof(spccl_prune_segment) == 48 && sizeof(spccl_weights_segment) == 48, "0.2");
_Static_assert(sizeof(spccl_delta_source) == 48 && sizeof(spccl_delta_frame) == 32 &&
                   sizeof(spccl_delta_place) == 56 && sizeof(spccl_delta_target) == 64,
               "0.2");

#define NEWER(type)                                                                                          \
    struct {                                                                                                 \
        type known;                                                                                          \
        uint64_t added;                                                                                      \
    }
#define CANARY 0x5ca1ab1e5ca1ab1eu

/* ---- options ---- */

static void test_encode_options(void)
{
    struct {
        size_t struct_bytes;
        const void *base;
    } older = {sizeof older, NULL};
    NEWER(spccl_encode_options) newer = {SPCCL_ENCODE_OPTIONS_INIT, 0};
    _Alignas(16) static float x[70000] = {[7] = 1.0f};
    uint8_t a[1024], b[1024];
    spccl_frame_info info = {.struct_bytes = sizeof info};
    size_t n_default = 0, n_older = 0, n_newer = 0;
    CHECK_OK(spccl_encode(x, 70000, SPCCL_FLOAT32, NULL, a, sizeof a, &n_default));
    CHECK_OK(spccl_encode(x, 70000, SPCCL_FLOAT32, (void *)&older, b, sizeof b, &n_older));
    CHECK(n_older == n_default && memcmp(a, b, n_older) == 0, "fields that are not there take the defaults");
    newer.known.struct_bytes = sizeof newer;
    newer.known.format = SPCCL_FORMAT_COO;
    CHECK_OK(spccl_encode(x, 70000, SPCCL_FLOAT32, (void *)&newer, b, sizeof b, &n_newer));
    CHECK_OK(spccl_frame_inspect(b, n_newer, &info));
    CHECK(info.format == SPCCL_FORMAT_COO, "the known fields count: %s", spccl_format_name(info.format));
    newer.added = 1;
    CHECK_FAILS(spccl_encode(x, 70000, SPCCL_FLOAT32, (void *)&newer, b, sizeof b, &n_newer), SPCCL_ERR_ARG,
                "spccl_encode_options: got 32 bytes with byte 24 not zero, wanted zeros from byte 24 on");
    CHECK(spccl_encode_bound(70000, SPCCL_FLOAT32, (void *)&newer) == 0, "bound with an unknown option");
    older.struct_bytes = 0;
    CHECK_FAILS(spccl_encode(x, 70000, SPCCL_FLOAT32, (void *)&older, b, sizeof b, &n_older), SPCCL_ERR_ARG,
                "spccl_encode_options.struct_bytes is 0, wanted");
    older.struct_bytes = SIZE_MAX - 7;
    CHECK_FAILS(spccl_encode(x, 70000, SPCCL_FLOAT32, (void *)&older, b, sizeof b, &n_older), SPCCL_ERR_ARG,
                "from 8 to 4096");
}

static void test_delta_options(void)
{
    struct {
        size_t struct_bytes;
    } older = {sizeof older};
    NEWER(spccl_delta_options) newer = {SPCCL_DELTA_OPTIONS_INIT, 0};
    static const uint8_t x[100] = {[3] = 1, [90] = 2}, base[100];
    spccl_delta_source source = {x, base, 100, 0, SPCCL_UINT8, SPCCL_UINT8, 1};
    uint8_t dst[1024];
    spccl_delta_frame frame;
    size_t bytes = 0;
    CHECK_OK(spccl_delta_encode(&source, 1, (void *)&older, dst, sizeof dst, &frame, &bytes));
    newer.known.struct_bytes = sizeof newer;
    CHECK_OK(spccl_delta_encode(&source, 1, (void *)&newer, dst, sizeof dst, &frame, &bytes));
    newer.added = 1;
    CHECK_FAILS(spccl_delta_encode(&source, 1, (void *)&newer, dst, sizeof dst, &frame, &bytes),
                SPCCL_ERR_ARG, "spccl_delta_options: got 40 bytes with byte 32 not zero");
}

static void test_config_and_store(void)
{
    struct {
        size_t struct_bytes;
        const char *name;
        int64_t timeout_ms;
    } older = {sizeof older, "older", 5000};
    NEWER(spccl_config) newer = {SPCCL_CONFIG_INIT, 0};
    NEWER(spccl_store) newer_store = {{.struct_bytes = sizeof newer_store}, 0};
    spccl_comm *comm = NULL;
    CHECK_OK(spccl_comm_create(NULL, 0, 1, (void *)&older, &comm));
    CHECK_OK(spccl_comm_destroy(comm));
    newer.known.struct_bytes = sizeof newer;
    CHECK_OK(spccl_comm_create((void *)&newer_store, 0, 1, (void *)&newer, &comm));
    CHECK_OK(spccl_comm_destroy(comm));
    newer.added = 1;
    CHECK_FAILS(spccl_comm_create(NULL, 0, 1, (void *)&newer, &comm), SPCCL_ERR_ARG,
                "spccl_config: got 80 bytes with byte 72 not zero");
    newer_store.added = 1;
    CHECK_FAILS(spccl_comm_create((void *)&newer_store, 0, 1, NULL, &comm), SPCCL_ERR_ARG,
                "spccl_store: got 40 bytes with byte 32 not zero");
}

/* ---- results ---- */

/* An older caller's struct lies before the canary, which the library must leave alone. */
static void test_frame_info(void)
{
    struct {
        struct {
            size_t struct_bytes;
            uint32_t version;
            spccl_format format;
        } known;
        uint64_t canary;
    } older = {{sizeof older.known, 0, SPCCL_FORMAT_AUTO}, CANARY};
    NEWER(spccl_frame_info) newer = {{.struct_bytes = sizeof newer}, CANARY};
    float x[300] = {[7] = 1.0f};
    uint8_t dst[2048];
    size_t bytes = 0;
    CHECK_OK(spccl_encode(x, 300, SPCCL_FLOAT32, NULL, dst, sizeof dst, &bytes));
    CHECK_OK(spccl_frame_inspect(dst, bytes, (void *)&older));
    CHECK(older.known.version == 1 && older.known.format > SPCCL_FORMAT_EMPTY && older.canary == CANARY,
          "version %u", older.known.version);
    CHECK(older.known.struct_bytes == 16, "struct_bytes is the caller's");
    CHECK_OK(spccl_frame_inspect(dst, bytes, (void *)&newer));
    CHECK(newer.known.n_elems == 300 && newer.added == CANARY, "what the library does not know stays");
    newer.known.struct_bytes = 3;
    CHECK_FAILS(spccl_frame_inspect(dst, bytes, (void *)&newer), SPCCL_ERR_ARG,
                "spccl_frame_info.struct_bytes is 3, wanted");
}

static void test_stats(void)
{
    struct {
        struct {
            size_t struct_bytes;
            uint64_t n_collectives;
        } known;
        uint64_t canary;
    } older = {{sizeof older.known, 77}, CANARY};
    NEWER(spccl_stats) newer = {{.struct_bytes = sizeof newer}, CANARY};
    spccl_comm *comm = NULL;
    CHECK_OK(spccl_comm_create(NULL, 0, 1, NULL, &comm));
    CHECK_OK(spccl_comm_stats(comm, (void *)&older));
    CHECK(older.known.n_collectives == 0 && older.canary == CANARY, "%llu",
          (unsigned long long)older.known.n_collectives);
    CHECK_OK(spccl_comm_stats(comm, (void *)&newer));
    CHECK(newer.known.buffer_bytes > 0 && newer.added == CANARY, "newer");
    CHECK_FAILS(spccl_comm_stats(comm, NULL), SPCCL_ERR_ARG, "spccl_stats: out is NULL");
    CHECK_OK(spccl_comm_destroy(comm));
}

static void test_info(void)
{
    struct {
        struct {
            size_t struct_bytes;
            const char *kind, *name;
        } known;
        uint64_t canary;
    } older = {{sizeof older.known, NULL, NULL}, CANARY};
    NEWER(spccl_info_entry) newer = {{.struct_bytes = sizeof newer}, CANARY};
    CHECK_OK(spccl_info(0, (void *)&older));
    CHECK(strcmp(older.known.kind, "kernels") == 0 && older.canary == CANARY, "%s", older.known.kind);
    CHECK_OK(spccl_info(0, (void *)&newer));
    CHECK(newer.known.why != NULL && newer.added == CANARY, "newer");
    CHECK_FAILS(spccl_info(1000, (void *)&newer), SPCCL_ERR_ARG, "no entry 1000");
}

/* ---- GPU ---- */

static void check_call_options(spccl_comm *comm)
{
    struct {
        size_t struct_bytes;
    } oldest = {sizeof oldest};
    NEWER(spccl_cuda_options) newer = {SPCCL_CUDA_OPTIONS_INIT, 0};
    CHECK_OK(spccl_cuda_set_options(comm, (void *)&oldest));
    newer.known.struct_bytes = sizeof newer;
    newer.known.max_ctas = 1;
    CHECK_OK(spccl_cuda_set_options(comm, (void *)&newer));
    newer.added = 1;
    CHECK_FAILS(spccl_cuda_set_options(comm, (void *)&newer), SPCCL_ERR_ARG,
                "spccl_cuda_options: got 24 bytes with byte 16 not zero");
}

static void gpu_rank(struct rank_ctx *c)
{
    struct {
        size_t struct_bytes;
        int device;
        int32_t decline;
        uint64_t max_ctas;
    } older = {sizeof older, 0, 0, 2};
    NEWER(spccl_cuda_config) newer = {SPCCL_CUDA_CONFIG_INIT, 1};
    struct {
        struct {
            size_t struct_bytes;
            int device;
            uint32_t n_ctas;
        } known;
        uint64_t canary;
    } older_stats = {{sizeof older_stats.known, -1, 0}, CANARY};
    NEWER(spccl_cuda_stats) newer_stats = {{.struct_bytes = sizeof newer_stats}, CANARY};
    spccl_cuda_config wrong = SPCCL_CUDA_CONFIG_INIT;
    wrong.between_hosts = 7;
    CHECK_FAILS(spccl_cuda_attach(c->comm, &wrong), SPCCL_ERR_ARG,
                "spccl_cuda_config.between_hosts is 7, wanted 0 to 2");
    newer.known.struct_bytes = sizeof newer;
    CHECK_FAILS(spccl_cuda_attach(c->comm, (void *)&newer), SPCCL_ERR_ARG,
                "spccl_cuda_config: got 48 bytes with byte 40 not zero");
    CHECK_OK(spccl_cuda_attach(c->comm, (void *)&older));
    CHECK_OK(spccl_cuda_get_stats(c->comm, (void *)&older_stats));
    CHECK(older_stats.known.device == 0 && older_stats.known.n_ctas == 2 && older_stats.canary == CANARY,
          "device %d, %u blocks", older_stats.known.device, older_stats.known.n_ctas);
    CHECK_OK(spccl_cuda_get_stats(c->comm, (void *)&newer_stats));
    CHECK(newer_stats.known.inbox_bytes > 0 && newer_stats.added == CANARY, "newer");
    CHECK_FAILS(spccl_cuda_get_stats(c->comm, NULL), SPCCL_ERR_ARG, "spccl_cuda_stats: out is NULL");
    check_call_options(c->comm);
}

static void test_gpu(void)
{
    struct rank_ctx ctx[1];
    run_ranks(1, NULL, gpu_rank, NULL, ctx);
    CHECK_OK(ctx[0].created);
}

static void test_prune_options(void)
{
    struct {
        size_t struct_bytes;
        double density;
    } older = {sizeof older, 1};
    NEWER(spccl_prune_options) newer = {SPCCL_PRUNE_OPTIONS_INIT, 0};
    static float grad[4096], residual[4096];
    static spccl_prune_state state;
    spccl_prune_segment s = {.n_elems = 4096, .residual = residual, .state = &state};
    spccl_prune_plan *plan = NULL;
    for (size_t i = 0; i < 4096; i++)
        grad[i] = (float)i;
    CHECK_OK(spccl_prune_plan_create(&s, 1, 4096, SPCCL_FLOAT32, -1, &plan));
    CHECK_OK(spccl_prune(plan, grad, (void *)&older));
    CHECK(state.n_sent == 4096 && grad[4095] == 4095, "fields that are not there take the defaults");
    newer.known.struct_bytes = sizeof newer;
    CHECK_OK(spccl_prune(plan, grad, (void *)&newer));
    CHECK(state.n_sent > 0 && state.n_sent < 400, "the known fields count: %llu sent",
          (unsigned long long)state.n_sent);
    newer.added = CANARY;
    CHECK_FAILS(spccl_prune(plan, grad, (void *)&newer), SPCCL_ERR_ARG,
                "spccl_prune_options: got 144 bytes with byte 136 not zero");
    spccl_prune_plan_destroy(plan);
}

static void test_weights_options(void)
{
    struct {
        size_t struct_bytes;
        double density;
    } older = {sizeof older, 1};
    NEWER(spccl_weights_options) newer = {SPCCL_WEIGHTS_OPTIONS_INIT, CANARY};
    float own[3] = {1, 2, 3}, shared[3] = {0}, out[3];
    spccl_prune_state state = {0};
    spccl_weights_segment s = {.n_elems = 3, .own = own, .shared = shared, .state = &state};
    spccl_weights_plan *plan = NULL;
    CHECK_OK(spccl_weights_plan_create(&s, 1, 3, SPCCL_FLOAT32, -1, &plan));
    CHECK_OK(spccl_weights_send(plan, out, (void *)&older, NULL));
    CHECK(state.n_sent == 3 && out[0] == 1, "fields that are not there take the defaults");
    newer.known.struct_bytes = sizeof newer;
    CHECK_FAILS(spccl_weights_send(plan, out, (void *)&newer, NULL), SPCCL_ERR_ARG,
                "spccl_weights_options: got 64 bytes with byte 56 not zero");
    spccl_weights_plan_destroy(plan);
}

static void test_signs_sum_options(void)
{
    NEWER(spccl_signs_sum_options) newer = {SPCCL_SIGNS_SUM_OPTIONS_INIT, CANARY};
    newer.known.struct_bytes = sizeof newer;
    CHECK_FAILS(spccl_signs_sum((void *)&newer, NULL), SPCCL_ERR_ARG,
                "spccl_signs_sum_options: got 64 bytes with byte 56 not zero");
}

static void test_gpu_encode(void)
{
    struct {
        size_t struct_bytes;
        const void *base;
    } older = {sizeof older, NULL};
    NEWER(spccl_encode_options) newer = {SPCCL_ENCODE_OPTIONS_INIT, 0};
    uint8_t *m = fake_memory[0];
    uint64_t *offsets = (void *)(m + 16384);
    uint32_t *status = (void *)(m + 20480);
    newer.known.struct_bytes = sizeof newer;
    CHECK_OK(spccl_cuda_encode(m, 1000, SPCCL_FLOAT32, (void *)&older, m + 8192, 8192, offsets, m + 24576,
                               status, NULL));
    CHECK_OK(spccl_cuda_encode(m, 1000, SPCCL_FLOAT32, (void *)&newer, m + 8192, 8192, offsets, m + 24576,
                               status, NULL));
    newer.added = CANARY;
    CHECK_FAILS(spccl_cuda_encode(m, 1000, SPCCL_FLOAT32, (void *)&newer, m + 8192, 8192, offsets, m + 24576,
                                  status, NULL),
                SPCCL_ERR_ARG, "spccl_encode_options: got 32 bytes");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"encode_options", test_encode_options},
        {"delta_options", test_delta_options},
        {"config_and_store", test_config_and_store},
        {"frame_info", test_frame_info},
        {"stats", test_stats},
        {"info", test_info},
        {"prune_options", test_prune_options},
        {"weights_options", test_weights_options},
        {"signs_sum_options", test_signs_sum_options},
        {"gpu", test_gpu},
        {"gpu_encode", test_gpu_encode},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
