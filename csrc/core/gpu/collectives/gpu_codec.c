/* gpu_codec.c - the public codec on GPU memory: checks arguments and launches. See array_codec.c. */
#include "core/gpu/gpu_comm.h"

#include "core/base/abi.h"
#include "core/base/dtype.h"
#include "core/format/format.h"

#define SLICE_STEP 2048u

uint32_t spccl_cuda_slice_elems(spccl_dtype dtype, uint32_t wanted)
{
    uint32_t most;
    if (!sp_dtype_ok(dtype))
        return 0;
    most = (uint32_t)(SP_GPU_SLICE_BYTES / sp_dtype_bytes(dtype));
    if (wanted == 0)
        return most;
    return wanted <= most && wanted % SLICE_STEP == 0 ? wanted : 0;
}

size_t spccl_cuda_encode_scratch_bytes(size_t n_elems, spccl_dtype dtype, uint32_t slice_elems)
{
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    uint32_t elems = spccl_cuda_slice_elems(dtype, slice_elems);
    if (ops == NULL || elems == 0 || n_elems == 0)
        return 0;
    return ops->encode_scratch_bytes(sp_ceil_div(n_elems, elems));
}

/* An argument that must point into memory of the current GPU. */
struct gpu_arg {
    const char *name;
    const void *p;
    size_t align;
    bool may_be_null;
};

static spccl_status check_pointers(const sp_gpu_ops *ops, const char *call, const struct gpu_arg *args,
                                   size_t n)
{
    int device = -1;
    SP_TRY(ops->current_device(&device));
    for (size_t i = 0; i < n; i++)
        if (args[i].p != NULL || !args[i].may_be_null)
            SP_TRY(sp_gpu_check_memory(call, args[i].name, args[i].p, args[i].align, device,
                                       "wanted memory of"));
    return SPCCL_OK;
}

/* Checks of encode and decode. */
static spccl_status check_array(const char *call, size_t n_elems, spccl_dtype dtype, uint32_t wanted,
                                uint32_t *slice_elems)
{
    size_t bytes;
    if (!sp_dtype_ok(dtype))
        return SP_FAIL(SPCCL_ERR_DTYPE, "%s: dtype %d is unknown", call, (int)dtype);
    if (sp_gpu_ops_here() == NULL)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "%s: this build of spccl has no CUDA (`spccl info` says why)",
                       call);
    if (n_elems == 0 || !sp_mul_size(n_elems, sp_dtype_bytes(dtype), &bytes) || bytes > PTRDIFF_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %zu elements of %s, wanted 1 or more, at most PTRDIFF_MAX bytes",
                       call, n_elems, sp_dtype_name(dtype));
    *slice_elems = spccl_cuda_slice_elems(dtype, wanted);
    if (*slice_elems == 0)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "%s: slices of %u %s, wanted 0 or a multiple of %u up to %u (a slice must fit into "
                       "shared memory)",
                       call, wanted, sp_dtype_name(dtype), SLICE_STEP, spccl_cuda_slice_elems(dtype, 0));
    return SPCCL_OK;
}

/* *o holds the defaults. */
static spccl_status read_options(const spccl_encode_options *given, spccl_encode_options *o)
{
    SP_TRY(sp_options_copy("spccl_encode_options", given, o, sizeof *o));
    if ((int)o->format < SPCCL_FORMAT_AUTO || (int)o->format >= SPCCL_N_FORMATS)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_cuda_encode: format %d is unknown", (int)o->format);
    if (o->base != NULL && o->format == SPCCL_FORMAT_DENSE)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "spccl_cuda_encode: a delta cannot be dense");
    return SPCCL_OK;
}

spccl_status spccl_cuda_encode(const void *x, size_t n_elems, spccl_dtype dtype,
                               const spccl_encode_options *options, void *dst, size_t dst_cap,
                               uint64_t *offsets, void *scratch, uint32_t *status, void *stream)
{
    spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
    const char *call = "spccl_cuda_encode";
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    sp_gpu_encode_args a = {.x = x,
                            .n_elems = n_elems,
                            .dtype = dtype,
                            .dst = dst,
                            .dst_cap = dst_cap,
                            .offsets = offsets,
                            .scratch = scratch,
                            .status = status};
    size_t elem_bytes = sp_dtype_bytes(dtype);
    SP_TRY(read_options(options, &o));
    SP_TRY(check_array(call, n_elems, dtype, o.slice_elems, &a.slice_elems));
    a.base = o.base;
    a.format = o.format;
    {
        const struct gpu_arg args[] = {{"x", x, elem_bytes, false},     {"base", a.base, elem_bytes, true},
                                       {"dst", dst, 16, dst_cap == 0},  {"offsets", offsets, 8, false},
                                       {"scratch", scratch, 16, false}, {"status", status, 4, false}};
        SP_TRY(check_pointers(ops, call, args, sizeof args / sizeof args[0]));
    }
    if (sp_overlap(x, n_elems * elem_bytes, dst, dst_cap) ||
        (a.base != NULL && sp_overlap(a.base, n_elems * elem_bytes, dst, dst_cap)))
        return SP_FAIL(SPCCL_ERR_ALIAS, "%s: dst [%p, +%zu) overlaps x or base", call, dst, dst_cap);
    return ops->encode(&a, stream);
}

spccl_status spccl_cuda_decode(const void *frames, size_t frames_bytes, const uint64_t *offsets,
                               spccl_verb verb, void *dst, size_t n_elems, spccl_dtype dtype,
                               uint32_t slice_elems, uint32_t *status, void *stream)
{
    const char *call = "spccl_cuda_decode";
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    sp_gpu_decode_args a = {.encoded = frames,
                            .encoded_bytes = frames_bytes,
                            .offsets = offsets,
                            .n_elems = n_elems,
                            .dtype = dtype,
                            .verb = verb,
                            .dst = dst,
                            .status = status};
    size_t elem_bytes = sp_dtype_bytes(dtype);
    SP_TRY(check_array(call, n_elems, dtype, slice_elems, &a.slice_elems));
    if ((int)verb < SPCCL_SET || (int)verb > SPCCL_OVERWRITE)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: verb %d is unknown", call, (int)verb);
    if (verb == SPCCL_ADD && !sp_dtype_can_reduce(dtype))
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "%s: %s is carried as bytes and cannot be added", call,
                       sp_dtype_name(dtype));
    {
        const struct gpu_arg args[] = {{"frames", frames, 16, false},
                                       {"offsets", offsets, 8, false},
                                       {"dst", dst, elem_bytes, false},
                                       {"status", status, 4, false}};
        SP_TRY(check_pointers(ops, call, args, sizeof args / sizeof args[0]));
    }
    if (sp_overlap(frames, frames_bytes, dst, n_elems * elem_bytes))
        return SP_FAIL(SPCCL_ERR_ALIAS, "%s: frames [%p, +%zu) overlap dst", call, frames, frames_bytes);
    return ops->decode(&a, stream);
}
