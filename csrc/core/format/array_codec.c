/* array_codec.c - the public codec functions of spccl.h: spccl_encode, spccl_decode, spccl_frame_inspect, and
 * the names of formats and dtypes. */
#include "core/base/abi.h"
#include "core/base/dtype.h"
#include "core/format/codec.h"
#include "core/format/delta.h"
#include "core/format/tune_format.h"

#include <math.h>

/* slice_elems must be a multiple of this: half a pici tile, the slice of 8-byte elements on a GPU. */
#define SLICE_STEP 2048u
/* 256 KiB of float32: a slice stays in the L2 cache between scan and encode. */
#define DEFAULT_SLICE_ELEMS 65536u

/* From this size of dst on, decode uses non-temporal stores. Speed of decoding tile frames at 1% density, on
 * an AMD EPYC (Zen 4) with 32 MiB of L3:
 *   bytes of dst          16 MiB   32 MiB   64 MiB
 *   ordinary stores      61 GB/s  32 GB/s  28 GB/s
 *   non-temporal stores  44 GB/s  31 GB/s  42 GB/s */
#define NT_DST_BYTES_MIN ((size_t)32 << 20)

/* ---- names ---- */

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
    case SPCCL_FORMAT_DELTA:
        return "delta";
    }
    return "?";
}

/* ---- encode ---- */

static spccl_status read_options(const spccl_encode_options *given, spccl_encode_options *out)
{
    spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;

    SP_TRY(sp_options_copy("spccl_encode_options", given, &o, sizeof o));
    if ((int)o.format < SPCCL_FORMAT_AUTO || (int)o.format >= SPCCL_N_FORMATS)
        return SP_FAIL(SPCCL_ERR_ARG, "encode: options->format %d, wanted -1..%d", (int)o.format,
                       SPCCL_N_FORMATS - 1);
    if (o.slice_elems % SLICE_STEP != 0 || o.slice_elems > SP_FRAME_ELEMS_MAX)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "encode: options->slice_elems %u, wanted a multiple of %u, at most %llu",
                       o.slice_elems, SLICE_STEP, (unsigned long long)SP_FRAME_ELEMS_MAX);
    if (o.slice_elems == 0)
        o.slice_elems = DEFAULT_SLICE_ELEMS;
    *out = o;
    return SPCCL_OK;
}

static size_t slice_bound(size_t n_elems, size_t elem_bytes, const spccl_encode_options *o)
{
    if (o->format == SPCCL_FORMAT_AUTO)
        return sp_tune_frame_bound(n_elems, elem_bytes, o->base != NULL);
    return n_elems != 0 ? sp_frame_bound_forced(o->format, n_elems, elem_bytes) : SP_FRAME_HEADER_BYTES;
}

size_t spccl_encode_bound(size_t n_elems, spccl_dtype dtype, const spccl_encode_options *options)
{
    spccl_encode_options o;
    size_t elem_bytes = sp_dtype_bytes(dtype), rest, bound, array_bytes;

    if (elem_bytes == 0) {
        sp_fail(SPCCL_ERR_DTYPE, "encode: dtype %d, wanted 1..%d", (int)dtype, SP_N_DTYPES - 1);
        return 0;
    }
    if (read_options(options, &o) != SPCCL_OK)
        return 0;
    rest = n_elems % o.slice_elems;
    if (!sp_mul_size(n_elems, elem_bytes, &array_bytes) ||
        !sp_mul_size(n_elems / o.slice_elems, slice_bound(o.slice_elems, elem_bytes, &o), &bound) ||
        ((rest != 0 || n_elems == 0) && !sp_add_size(bound, slice_bound(rest, elem_bytes, &o), &bound))) {
        sp_fail(SPCCL_ERR_ARG, "encode: n_elems %zu of %s: size overflows", n_elems, sp_dtype_name(dtype));
        return 0;
    }
    return bound;
}

struct encode_job {
    sp_codec *codec;
    const uint8_t *x, *base;
    size_t n_elems, elem_bytes;
    spccl_dtype dtype;
    spccl_format forced;
    uint8_t *dst;
    size_t dst_cap, at; /* bytes of dst; bytes of dst written so far */
};

/* Only makes the error text; sp_codec_allows decides. */
static spccl_status refuse_forced(const struct encode_job *j, const sp_slice_stats *s, size_t from)
{
    const char *why = "";

    if (j->forced == SPCCL_FORMAT_EMPTY)
        why = j->base != NULL ? "it differs from base" : "it has nonzeros";
    else if (j->forced == SPCCL_FORMAT_TILE)
        why = "all 256 elements of a block are listed";
    else if (j->forced == SPCCL_FORMAT_DENSE)
        why = "a delta cannot be dense";
    return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                   "encode: slice of elements %zu to %zu (%zu listed) does not fit forced format %s: %s; "
                   "use auto or pici",
                   from, from + s->n_elems - 1, s->nnz, spccl_format_name(j->forced), why);
}

/* The format for a slice. AUTO means that the forced format does not fit. */
static spccl_format choose(const struct encode_job *j, const sp_slice_stats *s)
{
    if (s->n_elems == 0)
        return SPCCL_FORMAT_EMPTY; /* the only format for 0 elements, whatever is forced */
    if (j->forced == SPCCL_FORMAT_AUTO)
        return sp_tune_format(s, j->base != NULL, INFINITY);
    return sp_codec_allows(s, j->forced, j->base != NULL) ? j->forced : SPCCL_FORMAT_AUTO;
}

static spccl_status encode_slice(struct encode_job *j, size_t from, size_t n)
{
    const uint8_t *x = n != 0 ? j->x + from * j->elem_bytes : NULL;
    const uint8_t *base = n != 0 && j->base != NULL ? j->base + from * j->elem_bytes : NULL;
    sp_slice_stats s = {.n_elems = n, .elem_bytes = j->elem_bytes, .nnz = n};
    spccl_format format;
    size_t bytes;

    if (j->forced != SPCCL_FORMAT_DENSE || n == 0)
        sp_codec_scan(j->codec, x, base, n, j->dtype, &s);
    format = choose(j, &s);
    if (format == SPCCL_FORMAT_AUTO)
        return refuse_forced(j, &s, from);
    bytes = sp_frame_bytes(format, n, s.nnz, j->elem_bytes);
    if (bytes > j->dst_cap - j->at)
        return SP_FAIL(SPCCL_ERR_DST_SMALL,
                       "encode: dst_cap %zu, wanted %zu more after %zu of %zu elements: spccl_encode_bound "
                       "always suffices",
                       j->dst_cap, bytes - (j->dst_cap - j->at), from, j->n_elems);
    sp_codec_write(j->codec, x, n, j->dtype, format, j->base != NULL, s.nnz, j->dst + j->at);
    j->at += bytes;
    return SPCCL_OK;
}

static spccl_status check_encode(const struct encode_job *j, const size_t *out_bytes)
{
    size_t x_bytes;

    if (j->elem_bytes == 0)
        return SP_FAIL(SPCCL_ERR_DTYPE, "encode: dtype %d, wanted 1..%d", (int)j->dtype, SP_N_DTYPES - 1);
    if ((j->x == NULL && j->n_elems != 0) || j->dst == NULL || out_bytes == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "encode: %s is NULL",
                       j->dst == NULL      ? "dst"
                       : out_bytes == NULL ? "out_bytes"
                                           : "x");
    if (!sp_mul_size(j->n_elems, j->elem_bytes, &x_bytes))
        return SP_FAIL(SPCCL_ERR_ARG, "encode: n_elems %zu of %s: size overflows", j->n_elems,
                       sp_dtype_name(j->dtype));
    if (sp_overlap(j->x, x_bytes, j->dst, j->dst_cap))
        return SP_FAIL(SPCCL_ERR_ALIAS, "encode: x (%zu bytes) and dst (%zu bytes) overlap", x_bytes,
                       j->dst_cap);
    if (j->base != NULL && sp_overlap(j->base, x_bytes, j->dst, j->dst_cap))
        return SP_FAIL(SPCCL_ERR_ALIAS, "encode: base (%zu bytes) and dst (%zu bytes) overlap", x_bytes,
                       j->dst_cap);
    return SPCCL_OK;
}

spccl_status spccl_encode(const void *x, size_t n_elems, spccl_dtype dtype,
                          const spccl_encode_options *options, void *dst, size_t dst_cap, size_t *out_bytes)
{
    spccl_encode_options o;
    const sp_kernels *kernels;
    struct encode_job j = {.x = x,
                           .n_elems = n_elems,
                           .elem_bytes = sp_dtype_bytes(dtype),
                           .dtype = dtype,
                           .dst = dst,
                           .dst_cap = dst_cap};
    spccl_status st = SPCCL_OK;
    size_t from = 0;

    SP_TRY(read_options(options, &o));
    j.base = o.base;
    j.forced = o.format;
    SP_TRY(check_encode(&j, out_bytes));
    SP_TRY(sp_kernels_pick(&kernels));
    SP_TRY(sp_codec_create(kernels, sp_min_size(o.slice_elems, n_elems), &j.codec));
    do {
        size_t n = sp_min_size(o.slice_elems, n_elems - from);
        SP_TRY_TO(done, st, encode_slice(&j, from, n));
        from += n;
    } while (from < n_elems);
    *out_bytes = j.at;
done:
    sp_codec_destroy(j.codec);
    return st;
}

/* ---- decode ---- */

struct decode_job {
    const uint8_t *encoded;
    size_t encoded_bytes;
    spccl_verb verb;
    uint8_t *dst;
    size_t n_elems, dst_bytes;
    spccl_dtype dtype;
};

static spccl_status check_decode(struct decode_job *j)
{
    if (!sp_dtype_ok(j->dtype))
        return SP_FAIL(SPCCL_ERR_DTYPE, "decode: dtype %d, wanted 1..%d", (int)j->dtype, SP_N_DTYPES - 1);
    if ((int)j->verb < SPCCL_SET || (int)j->verb > SPCCL_OVERWRITE)
        return SP_FAIL(SPCCL_ERR_ARG, "decode: verb %d, wanted 0..2", (int)j->verb);
    if (j->encoded == NULL || (j->dst == NULL && j->n_elems != 0))
        return SP_FAIL(SPCCL_ERR_ARG, "decode: %s is NULL", j->encoded == NULL ? "encoded" : "dst");
    if (!sp_mul_size(j->n_elems, sp_dtype_bytes(j->dtype), &j->dst_bytes))
        return SP_FAIL(SPCCL_ERR_ARG, "decode: n_elems %zu of %s: size overflows", j->n_elems,
                       sp_dtype_name(j->dtype));
    if (sp_overlap(j->encoded, j->encoded_bytes, j->dst, j->dst_bytes))
        return SP_FAIL(SPCCL_ERR_ALIAS, "decode: encoded array (%zu bytes) and dst (%zu bytes) overlap",
                       j->encoded_bytes, j->dst_bytes);
    if (j->verb == SPCCL_ADD && !sp_dtype_can_reduce(j->dtype))
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "decode: no add of %s (it is carried as bytes): set or overwrite",
                       sp_dtype_name(j->dtype));
    return SPCCL_OK;
}

/* Check that this valid frame has the array's dtype. */
static spccl_status check_dtype(const struct decode_job *j, const sp_frame *f)
{
    if (f->dtype == j->dtype)
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_FRAME, "dtype %s, wanted %s", sp_dtype_name(f->dtype), sp_dtype_name(j->dtype));
}

/* Elements of the frames from byte `at` on, up to one whose header is bad: for the text of an error. */
static size_t count_elems(const struct decode_job *j, size_t at)
{
    sp_frame f;
    size_t n = 0;
    for (; at < j->encoded_bytes; at += f.frame_bytes) {
        if (sp_frame_validate_header(j->encoded + at, j->encoded_bytes - at, &f) != SPCCL_OK)
            break;
        n += f.n_elems;
    }
    return n;
}

spccl_status spccl_decode(const void *encoded, size_t encoded_bytes, spccl_verb verb, void *dst,
                          size_t n_elems, spccl_dtype dtype)
{
    struct decode_job j = {.encoded = encoded,
                           .encoded_bytes = encoded_bytes,
                           .verb = verb,
                           .dst = dst,
                           .n_elems = n_elems,
                           .dtype = dtype};
    const sp_kernels *kernels;
    size_t at = 0, done = 0, elem_bytes = sp_dtype_bytes(dtype);
    spccl_status st;

    SP_TRY(check_decode(&j));
    SP_TRY(sp_kernels_pick(&kernels));
    if (encoded_bytes == 0)
        return SP_FAIL(SPCCL_ERR_FORMAT, "decode: encoded array of 0 bytes, wanted at least one frame");
    while (at < encoded_bytes) {
        sp_frame f;
        SP_TRY_TO(bad_frame, st, sp_frame_validate(j.encoded + at, encoded_bytes - at, &f));
        SP_TRY_TO(bad_frame, st, check_dtype(&j, &f));
        if (f.n_elems > n_elems - done) {
            done += count_elems(&j, at);
            break;
        }
        SP_TRY_TO(bad_frame, st,
                  sp_codec_apply(kernels, &f, verb, f.n_elems != 0 ? j.dst + done * elem_bytes : NULL, dtype,
                                 j.dst_bytes >= NT_DST_BYTES_MIN));
        at += f.frame_bytes;
        done += f.n_elems;
    }
    if (done != n_elems)
        return SP_FAIL(SPCCL_ERR_FRAME, "decode: encoded has %zu elements, out has %zu", done, n_elems);
    return SPCCL_OK;
bad_frame:
    return SP_FAIL(st, "decode: at byte %zu of %zu: %s", at, encoded_bytes, spccl_last_error());
}

/* ---- inspect ---- */

/* Check a frame of version 2 whole, and describe it. */
static spccl_status inspect_delta(const void *bytes, size_t n_bytes, spccl_frame_info *out)
{
    sp_delta_changes *changes;
    spccl_status st = SPCCL_OK;
    sp_delta_frame f;

    SP_TRY(sp_delta_read_header(bytes, n_bytes, &f));
    changes = sp_alloc64(sizeof *changes);
    if (changes == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "inspect: %zu bytes of scratch", sizeof *changes);
    for (uint64_t s = 0; s < f.n_slices; s++)
        SP_TRY_TO(done, st, sp_delta_read_slice(&f, s, changes));
    *out = (spccl_frame_info){.version = SP_DELTA_VERSION,
                              .format = SPCCL_FORMAT_DELTA,
                              .dtype = f.dtype,
                              .is_delta = 1,
                              .n_elems = f.n_elems,
                              .nnz = f.nnz,
                              .frame_bytes = f.frame_bytes,
                              .index_off = SP_DELTA_HEADER_BYTES};
done:
    sp_free(changes);
    return st;
}

spccl_status spccl_frame_inspect(const void *encoded, size_t encoded_bytes, spccl_frame_info *out)
{
    sp_frame f;
    sp_frame_layout layout;
    spccl_frame_info info;

    if (encoded == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "inspect: encoded is NULL");
    if (sp_delta_is_frame(encoded, encoded_bytes)) {
        SP_TRY(inspect_delta(encoded, encoded_bytes, &info));
        return sp_result_copy("spccl_frame_info", &info, sizeof info, out);
    }
    SP_TRY(sp_frame_validate(encoded, encoded_bytes, &f));
    sp_frame_layout_of(f.format, f.n_elems, f.nnz, sp_dtype_bytes(f.dtype), &layout);
    info = (spccl_frame_info){.version = SP_FRAME_VERSION,
                              .format = f.format,
                              .dtype = f.dtype,
                              .is_delta = f.is_delta ? 1 : 0,
                              .n_elems = f.n_elems,
                              .nnz = f.nnz,
                              .frame_bytes = f.frame_bytes,
                              .index_off = layout.index_off,
                              .meta_off = layout.meta_off,
                              .values_off = layout.values_off};
    return sp_result_copy("spccl_frame_info", &info, sizeof info, out);
}
