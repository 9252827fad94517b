// prune_cuda.cu - pruning on GPU memory: one kernel takes thresholds from samples, the next prunes in one pass
// over gradient and state. For given thresholds the bits are those of the host (prune_rule.h). A third one sums what
// several ranks send.
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/prune_sample.cuh"
#include "kernels/cuda/pruned_sum.cuh"

#include <atomic>

#define SP_PRUNE_GPUS 64 // GPUs of which the launcher remembers what it asked

template <int DTYPE, bool RES_BF16, int SENT>
__global__ void __launch_bounds__(SP_PRUNE_THREADS, SP_PRUNE_CTAS)
    sp_prune_kernel(const __grid_constant__ sp_gpu_prune_args a)
{
    sp_prune_pass<DTYPE, RES_BF16, sp_no_lists, SENT>(a, sp_no_lists());
}

// ---- launching ----

typedef void (*sp_prune_fn)(const sp_gpu_prune_args);

struct sp_prune_kernels {
    sp_prune_fn nonzero, sample, prune;
    size_t prune_shared_bytes;
};
template <int DTYPE, bool RES_BF16, int SENT = DTYPE> static constexpr sp_prune_kernels kernels_for()
{
    return {sp_prune_nonzero_kernel<DTYPE>, sp_prune_sample_kernel<DTYPE>,
            sp_prune_kernel<DTYPE, RES_BF16, SENT>, SP_PRUNE_SHARED_BYTES};
}
static const sp_prune_kernels kernels[] = {
    kernels_for<SPCCL_FLOAT32, false>(),
    kernels_for<SPCCL_FLOAT32, true>(),
    kernels_for<SPCCL_FLOAT16, false>(),
    kernels_for<SPCCL_FLOAT16, true>(),
    kernels_for<SPCCL_BFLOAT16, false>(),
    kernels_for<SPCCL_BFLOAT16, true>(),
    kernels_for<SPCCL_FLOAT64, false>(),
    // A float32 gradient that is sent in 16 bits.
    kernels_for<SPCCL_FLOAT32, false, SPCCL_FLOAT16>(),
    kernels_for<SPCCL_FLOAT32, false, SPCCL_BFLOAT16>(),
};
static const int FIRST_APART = 7; // of the last two
static const int N_KERNELS = sizeof kernels / sizeof *kernels;

static int kernels_index(const sp_gpu_prune_args *a)
{
    int dtype = a->dtype == SPCCL_FLOAT32    ? 0
                : a->dtype == SPCCL_FLOAT16  ? 1
                : a->dtype == SPCCL_BFLOAT16 ? 2
                                             : 3;
    if (a->options.sent != NULL)
        return FIRST_APART + (a->options.sent_dtype == SPCCL_BFLOAT16 ? 1 : 0);
    return 2 * dtype + (a->options.residual_bf16 != 0 ? 1 : 0);
}

// As sp_resident_ctas. Prepares the kernel, which also loads it. `kept`: [SP_PRUNE_GPUS] what was found before, 0: nothing.
static spccl_status residents(const void *kernel, uint32_t n_threads, size_t shared_bytes,
                              std::atomic<int> *kept, int *out)
{
    int device = 0;
    SP_TRY_CUDA(cudaGetDevice(&device));
    *out = device < SP_PRUNE_GPUS ? kept[device].load(std::memory_order_relaxed) : 0;
    if (*out != 0)
        return SPCCL_OK;
    SP_TRY_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes));
    SP_TRY(sp_resident_ctas(kernel, n_threads, shared_bytes, out));
    if (device < SP_PRUNE_GPUS)
        kept[device].store(*out, std::memory_order_relaxed);
    return SPCCL_OK;
}

// Prepares the sampling kernel of kernels[index]; *out as above, of its pruning kernel.
static spccl_status prepare(int index, int *out)
{
    static std::atomic<int> sample[N_KERNELS][SP_PRUNE_GPUS], prune[N_KERNELS][SP_PRUNE_GPUS];
    const sp_prune_kernels &k = kernels[index];
    SP_TRY(residents((const void *)k.sample, SP_SAMPLE_THREADS, SP_SAMPLE_SHARED_BYTES(SP_PRUNE_SAMPLES_MAX),
                     sample[index], out));
    return residents((const void *)k.prune, SP_PRUNE_THREADS, k.prune_shared_bytes, prune[index], out);
}

static const char launching[] = "launch of a pruning kernel";

// What runs before the pruning kernel.
static spccl_status launch_samples(const sp_gpu_prune_args *a, const sp_prune_kernels &k, uint32_t n_ctas,
                                   void *stream)
{
    if (a->stage == SP_PRUNE_STAGE_PASS)
        return SPCCL_OK;
    uint64_t n_samples = sp_prune_samples_most(a->most_elems, (float)a->options.density, a->options.sample);
    if (a->options.skip_zeros != 0)
        SP_TRY(sp_launch(k.nonzero, {n_ctas, SP_PRUNE_THREADS, 0}, a, stream, launching));
    return sp_launch(k.sample, {a->n_segments, SP_SAMPLE_THREADS, SP_SAMPLE_SHARED_BYTES(n_samples)}, a,
                     stream, launching);
}

extern "C" spccl_status sp_prune_cuda(const sp_gpu_prune_args *a, void *stream)
{
    int index = kernels_index(a), n_resident = 0;
    const sp_prune_kernels &k = kernels[index];
    uint32_t n_ctas;
    SP_TRY(prepare(index, &n_resident));
    n_ctas = (uint32_t)sp_min_size((size_t)n_resident, a->n_tiles);
    SP_TRY(launch_samples(a, k, n_ctas, stream));
    if (a->stage == SP_PRUNE_STAGE_SAMPLE)
        return SPCCL_OK;
    return sp_launch(k.prune, {n_ctas, SP_PRUNE_THREADS, k.prune_shared_bytes}, a, stream, launching);
}

// ---- launching: pruning and sums of several ranks ----

typedef void (*sp_pruned_fn)(const sp_pruned_sum_args);

static const sp_pruned_fn list_kernels[2] = {sp_prune_list_kernel<false>, sp_prune_list_kernel<true>};
static const sp_pruned_fn sum_kernels[] = {sp_pruned_sum_kernel<2>, sp_pruned_sum_kernel<4>,
                                           sp_pruned_sum_kernel<8>, sp_pruned_sum_kernel<16>};
static const int N_SUM_KERNELS = sizeof sum_kernels / sizeof *sum_kernels;

extern "C" spccl_status sp_pruned_sum_cuda(const sp_pruned_sum_args *x, void *stream)
{
    static std::atomic<int> kept_list[2][SP_PRUNE_GPUS], kept_sum[N_SUM_KERNELS][SP_PRUNE_GPUS];
    const sp_gpu_prune_args *a = &x->prune;
    int of_list = a->options.residual_bf16 != 0 ? 1 : 0, of_sum = 0, index = kernels_index(a);
    int n_listing = 0, n_summing = 0, n_sampling = 0;
    while (of_sum < N_SUM_KERNELS && x->world_size > 2 << of_sum)
        of_sum++;
    if (of_sum == N_SUM_KERNELS || a->dtype != SPCCL_FLOAT32)
        return SP_FAIL(SPCCL_ERR_BUG, "sums of dtype %d, %d ranks", (int)a->dtype, x->world_size);
    // All kernels are loaded before the first is launched: loading waits for kernels that run.
    SP_TRY(prepare(index, &n_sampling));
    SP_TRY(residents((const void *)list_kernels[of_list], SP_PRUNE_THREADS, SP_PRUNE_SHARED_BYTES,
                     kept_list[of_list], &n_listing));
    SP_TRY(residents((const void *)sum_kernels[of_sum], SP_SUM_WARPS * 32, SP_SUM_SHARED_BYTES,
                     kept_sum[of_sum], &n_summing));
    n_listing = (int)sp_min_size((size_t)n_listing, a->n_tiles);
    n_summing = (int)sp_min_size((size_t)n_summing, (a->n_tiles + SP_SUM_WARPS - 1) / SP_SUM_WARPS);
    if (x->max_ctas != 0)
        n_summing = (int)sp_min_size((size_t)n_summing, x->max_ctas);
    SP_TRY(launch_samples(a, kernels[index], (uint32_t)n_listing, stream));
    SP_TRY(sp_launch(list_kernels[of_list], {(uint32_t)n_listing, SP_PRUNE_THREADS, SP_PRUNE_SHARED_BYTES}, x,
                     stream, launching));
    return sp_launch(sum_kernels[of_sum], {(uint32_t)n_summing, SP_SUM_WARPS * 32, SP_SUM_SHARED_BYTES}, x,
                     stream, "launch of the kernel that sums lists");
}
