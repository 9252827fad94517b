/* kernels_cuda.h - the launchers in the .cu files, as sp_gpu_ops (contract/gpu.h) wants them. C and CUDA. */
#ifndef SP_KERNELS_CUDA_H
#define SP_KERNELS_CUDA_H

#include "core/contract/gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* launch_cuda.cu */
spccl_status sp_fused_cuda_workers_per_cta(int ordinal, uint32_t world_size, uint32_t n_served, bool remote,
                                           uint32_t out[SP_FUSED_OPS]);
spccl_status sp_fused_cuda(const sp_fused_args *a, void *stream);

/* encode_cuda.cu, decode_cuda.cu */
size_t sp_encode_cuda_scratch_bytes(uint64_t n_slices);
spccl_status sp_encode_cuda(const sp_gpu_encode_args *a, void *stream);
spccl_status sp_decode_cuda(const sp_gpu_decode_args *a, void *stream);

/* memory_cuda.c: copy from the current GPU, on a stream of its own; waits for the copy. */
spccl_status sp_cuda_read(void *host, const void *device, size_t bytes);

/* delta_open_cuda.cu, delta_apply_cuda.cu */
spccl_status sp_delta_open_cuda(const struct sp_gpu_delta_args *a, void *stream);
spccl_status sp_delta_run_cuda(const struct sp_gpu_delta_args *a, int what, void *stream);
spccl_status sp_delta_sum_cuda(const struct sp_gpu_delta_sum_args *a, void *stream);

/* delta_encode_cuda.cu */
spccl_status sp_delta_encode_cuda(const struct sp_gpu_delta_encode_args *a, void *stream);

/* prune_cuda.cu */
spccl_status sp_prune_cuda(const sp_gpu_prune_args *a, void *stream);
spccl_status sp_pruned_sum_cuda(const struct sp_pruned_sum_args *x, void *stream);

/* signs_cuda.cu */
spccl_status sp_signs_send_cuda(const sp_gpu_weights_args *a, void *stream);
spccl_status sp_signs_sum_cuda(const sp_gpu_signs_args *a, void *stream);
spccl_status sp_signs_decode_cuda(const sp_gpu_signs_args *a, void *stream);

/* weights_cuda.cu */
spccl_status sp_weights_send_cuda(const sp_gpu_weights_args *a, void *stream);
spccl_status sp_weights_receive_cuda(const sp_gpu_weights_args *a, void *stream);

#ifdef __cplusplus
}
#endif

#endif
