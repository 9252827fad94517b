/* stream.c - the public codec functions of spccl.h: arrays to streams of frames and back; names of formats
 * and dtypes. Place in the map: running, above codec. Knows no ranks, schedules or transports. */
#include "format.h"

#include "dtype.h"
#include "status.h"

size_t spccl_dtype_bytes(spccl_dtype dtype)
{
    return sp_dtype_bytes(dtype);
}

const char *spccl_dtype_name(spccl_dtype dtype)
{
    return sp_dtype_name(dtype);
}

const char *spccl_format_name(spccl_format format)
{
    switch (format) {
    case SPCCL_FORMAT_AUTO:
        return "auto";
    case SPCCL_FORMAT_EMPTY:
        return "empty";
    case SPCCL_FORMAT_TILE:
        return "tile";
    case SPCCL_FORMAT_PICI:
        return "pici";
    case SPCCL_FORMAT_COO:
        return "coo";
    case SPCCL_FORMAT_DENSE:
        return "dense";
    }
    return "?";
}

spccl_status spccl_frame_inspect(const void *stream, size_t stream_bytes, spccl_frame_info *out)
{
    sp_frame f;
    sp_frame_layout layout;

    if (stream == NULL || out == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_frame_inspect: %s is NULL", stream == NULL ? "stream" : "out");
    if (out->struct_bytes < sizeof *out)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "spccl_frame_inspect: out->struct_bytes %zu, wanted sizeof(spccl_frame_info) %zu",
                       out->struct_bytes, sizeof *out);
    SP_TRY(sp_frame_validate(stream, stream_bytes, &f));
    sp_frame_layout_of(f.format, f.n_elems, f.nnz, sp_dtype_bytes(f.dtype), &layout);
    out->version = SP_FRAME_VERSION;
    out->format = f.format;
    out->dtype = f.dtype;
    out->is_delta = f.is_delta ? 1 : 0;
    out->n_elems = f.n_elems;
    out->nnz = f.nnz;
    out->frame_bytes = f.frame_bytes;
    out->index_off = layout.index_off;
    out->meta_off = layout.meta_off;
    out->values_off = layout.values_off;
    return SPCCL_OK;
}
