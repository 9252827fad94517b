/* gpu_delta_encode.c - spccl_cuda_delta_encode: checks arguments and calls the kernels. See core/format/delta_encode.c. */
#include "core/contract/delta_gpu.h"
#include "core/format/delta.h"
#include "core/gpu/gpu_comm.h"

#include <stdio.h>

static const char call[] = "cuda_delta_encode";

static spccl_status check_source(const spccl_delta_source *s, size_t number, const void *dst, size_t dst_cap,
                                 const spccl_delta_options *o, int device)
{
    char what[64];
    SP_TRY(sp_delta_check_source(call, number, s, dst, dst_cap, o));
    if (s->n_elems == 0)
        return SPCCL_OK;
    snprintf(what, sizeof what, "sources[%zu].x", number);
    SP_TRY(sp_gpu_check_memory(call, what, s->x, sp_dtype_bytes(s->x_dtype), device, "wanted memory of"));
    snprintf(what, sizeof what, "sources[%zu].base", number);
    return sp_gpu_check_memory(call, what, s->base, sp_dtype_bytes(s->dtype), device, "wanted memory of");
}

static spccl_status wait(int device, void *stream)
{
    return sp_gpu_wait_stream(call, device, stream);
}

spccl_status spccl_cuda_delta_encode(const spccl_delta_source *sources, size_t n_sources,
                                     const spccl_delta_options *options, void *dst, size_t dst_cap,
                                     spccl_delta_frame *frames, size_t *out_bytes, void *stream)
{
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    unsigned long long capture = 0;
    spccl_delta_options o;
    int device = -1;
    sp_gpu_delta_encode_args a = {.sources = sources,
                                  .n_sources = n_sources,
                                  .dst = dst,
                                  .dst_cap = dst_cap,
                                  .frames = frames,
                                  .out_bytes = out_bytes,
                                  .wait = wait};

    SP_TRY(sp_delta_read_options(call, options, &o));
    if (out_bytes == NULL || (n_sources != 0 && (sources == NULL || dst == NULL || frames == NULL)))
        return SP_FAIL(SPCCL_ERR_ARG, "%s: sources, dst, frames or out_bytes is NULL", call);
    if (ops == NULL)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "%s: this build of spccl has no CUDA (`spccl info` says why)",
                       call);
    if (n_sources > UINT32_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %zu sources, wanted fewer than 2^32", call, n_sources);
    SP_TRY(ops->current_device(&device));
    if (n_sources != 0)
        SP_TRY(sp_gpu_check_memory(call, "dst", dst, 8, device, "wanted memory of"));
    if (o.old != NULL)
        SP_TRY(sp_gpu_check_memory(call, "options->old", o.old, 8, device, "wanted memory of"));
    for (size_t i = 0; i < n_sources; i++)
        SP_TRY(check_source(&sources[i], i, dst, dst_cap, &o, device));
    if (o.old != NULL)
        SP_TRY(sp_delta_check_apart(call, sources, n_sources));
    SP_TRY(ops->capture_id(stream, &capture));
    if (capture != 0)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "%s: the stream is being captured, and this call waits for it",
                       call);
    if (n_sources == 0) {
        *out_bytes = 0;
        return SPCCL_OK;
    }
    a.device = device;
    a.raw = o.raw != 0;
    a.old = o.old;
    a.old_cap = o.old_cap;
    return ops->delta_encode(&a, stream);
}
