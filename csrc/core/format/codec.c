/* codec.c - see codec.h. */
#include "core/format/codec.h"

#include "core/base/dtype.h"

#include <assert.h>

struct sp_codec {
    const sp_kernels *kernels;
    size_t max_elems;
    /* Results of the last scan. */
    uint64_t *mask;     /* [ceil(max_elems/64)] */
    uint16_t *tile_nnz; /* [ceil(max_elems/256)] */
};

spccl_status sp_codec_create(const sp_kernels *kernels, size_t max_elems, sp_codec **out)
{
    sp_codec *c;
    size_t mask_bytes = sp_ceil_div(max_elems, 64) * sizeof *c->mask;
    size_t count_bytes = sp_ceil_div(max_elems, SP_TILE_ELEMS) * sizeof *c->tile_nnz;

    assert(max_elems <= SP_FRAME_ELEMS_MAX);
    c = sp_calloc(1, sizeof *c);
    if (c == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "codec: %zu bytes", sizeof *c);
    c->kernels = kernels;
    c->max_elems = max_elems;
    c->mask = sp_alloc64(mask_bytes);
    c->tile_nnz = sp_alloc64(count_bytes);
    if (c->mask == NULL || c->tile_nnz == NULL) {
        sp_codec_destroy(c);
        return SP_FAIL(SPCCL_ERR_NOMEM, "codec: %zu bytes of scratch for slices of %zu elements",
                       mask_bytes + count_bytes, max_elems);
    }
    *out = c;
    return SPCCL_OK;
}

void sp_codec_destroy(sp_codec *codec)
{
    if (codec == NULL)
        return;
    sp_free(codec->mask);
    sp_free(codec->tile_nnz);
    sp_free(codec);
}

/* x, base, n_elems, elem_bytes and ignores_sign of `a` are set. */
static void scan(sp_codec *codec, sp_scan_args *a, sp_slice_stats *out)
{
    assert(a->n_elems <= codec->max_elems);
    a->mask = codec->mask;
    a->tile_nnz = codec->tile_nnz;
    if (a->n_elems != 0)
        codec->kernels->scan(a);
    *out = (sp_slice_stats){
        .n_elems = a->n_elems, .elem_bytes = a->elem_bytes, .nnz = a->nnz, .has_full_tile = a->has_full_tile};
}

void sp_codec_scan(sp_codec *codec, const void *x, const void *base, size_t n_elems, spccl_dtype dtype,
                   sp_slice_stats *out)
{
    scan(codec,
         &(sp_scan_args){.x = x, .base = base, .n_elems = n_elems, .elem_bytes = sp_dtype_bytes(dtype)}, out);
}

void sp_codec_scan_contribution(sp_codec *codec, const void *x, size_t n_elems, spccl_dtype dtype,
                                sp_slice_stats *out)
{
    scan(codec,
         &(sp_scan_args){
             .x = x, .n_elems = n_elems, .elem_bytes = sp_dtype_bytes(dtype), .ignores_sign = true},
         out);
}

bool sp_codec_allows(const sp_slice_stats *stats, spccl_format format, bool is_delta)
{
    switch (format) {
    case SPCCL_FORMAT_EMPTY:
        return stats->nnz == 0;
    case SPCCL_FORMAT_TILE:
        return stats->n_elems != 0 && !stats->has_full_tile;
    case SPCCL_FORMAT_PICI:
    case SPCCL_FORMAT_COO:
        return stats->n_elems != 0;
    case SPCCL_FORMAT_DENSE:
        return stats->n_elems != 0 && !is_delta;
    case SPCCL_FORMAT_AUTO:
    case SPCCL_FORMAT_DELTA:
        break;
    }
    return false;
}

void sp_codec_write(sp_codec *codec, const void *x, size_t n_elems, spccl_dtype dtype, spccl_format format,
                    bool is_delta, size_t nnz, void *dst)
{
    uint8_t *p = dst;
    sp_frame_layout at;
    sp_encode_args a = {.x = x, .n_elems = n_elems, .elem_bytes = sp_dtype_bytes(dtype), .nnz = nnz};

    sp_frame_layout_of(format, n_elems, nnz, a.elem_bytes, &at);
    sp_frame_write_header(dst, format, dtype, is_delta, n_elems, nnz, &at);
    if (format == SPCCL_FORMAT_EMPTY)
        return;
    if (format == SPCCL_FORMAT_DENSE) {
        a.nnz = n_elems;
    } else {
        a.mask = codec->mask;
        a.tile_nnz = codec->tile_nnz;
    }
    a.index = at.index_off != 0 ? p + at.index_off : NULL;
    a.meta = at.meta_off != 0 ? p + at.meta_off : NULL;
    a.values = p + at.values_off;
    codec->kernels->encode[format](&a);
}

static bool dst_dtype_fits(spccl_verb verb, spccl_dtype dtype, spccl_dtype dst_dtype)
{
    return dst_dtype == dtype || (verb == SPCCL_ADD && dst_dtype == sp_acc_dtype(dtype));
}

spccl_status sp_codec_apply(const sp_kernels *kernels, const sp_frame *frame, spccl_verb verb, void *dst,
                            spccl_dtype dst_dtype, bool non_temporal)
{
    sp_decode_args a = {.index = frame->index,
                        .meta = frame->meta,
                        .values = frame->values,
                        .n_elems = frame->n_elems,
                        .nnz = frame->nnz,
                        .dtype = frame->dtype,
                        .dst_dtype = dst_dtype,
                        .dst = dst,
                        .non_temporal = non_temporal};

    if (!dst_dtype_fits(verb, frame->dtype, dst_dtype))
        return SP_FAIL(SPCCL_ERR_BUG, "codec: %s frame into %s with verb %d", sp_dtype_name(frame->dtype),
                       sp_dtype_name(dst_dtype), (int)verb);
    if (verb == SPCCL_ADD && frame->dtype == SPCCL_FLOAT8)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "decode: no add of float8 (it is carried as bytes): set or overwrite");
    if (verb == SPCCL_SET && frame->is_delta)
        return SP_FAIL(SPCCL_ERR_FRAME,
                       "decode: frame is a delta, wanted a frame encoded without base for verb "
                       "set: use overwrite on a copy of the base");
    if (frame->nnz == 0) {
        if (verb == SPCCL_SET && frame->n_elems != 0)
            kernels->zero(dst, frame->n_elems * sp_dtype_bytes(dst_dtype), non_temporal);
        return SPCCL_OK;
    }
    kernels->decode[frame->format][verb](&a);
    return SPCCL_OK;
}
