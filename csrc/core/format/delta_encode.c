/* delta_encode.c - spccl_delta_bound, spccl_delta_encode and spccl_delta_checksum on the host. */
#include "core/base/abi.h"
#include "core/base/mem.h"
#include "core/format/delta.h"

#include <stdlib.h>

/* Elements of x that are rounded at a time: their float32, the rounded ones and the base stay in the L2 cache. */
_Static_assert(SP_DELTA_SLICE_ELEMS * 8 <= 1 << 20, "a slice in the cache");

size_t spccl_delta_bound(uint64_t n_elems, spccl_dtype dtype)
{
    const size_t e = sp_dtype_bytes(dtype);
    uint64_t n_slices = sp_delta_n_slices(n_elems), last;
    size_t bytes;

    if (e == 0 || n_elems > SP_DELTA_ELEMS_MAX) {
        sp_fail(e == 0 ? SPCCL_ERR_DTYPE : SPCCL_ERR_ARG,
                "delta_bound: dtype %d, n_elems %llu; wanted 1..%d, at most 2^40", (int)dtype,
                (unsigned long long)n_elems, SP_N_DTYPES - 1);
        return 0;
    }
    bytes = SP_DELTA_HEADER_BYTES + n_slices * SP_DELTA_ENTRY_BYTES;
    if (n_slices != 0) {
        last = sp_delta_slice_elems(n_elems, n_slices - 1);
        bytes += (n_slices - 1) * (SP_DELTA_SLICE_ELEMS / 8 + SP_DELTA_SLICE_ELEMS * e);
        bytes += sp_delta_section_bytes((uint32_t)last) + sp_align_up(last * e, 4);
    }
    return sp_align_up(bytes, SP_DELTA_ALIGN);
}

/* ---- encode ---- */

struct encode_job {
    const spccl_delta_source *source;
    size_t number; /* of the source, for texts */
    uint8_t *dst;
    size_t dst_cap, at; /* bytes of dst; bytes of dst written so far */
    sp_delta_slice slice;
    _Alignas(64) uint16_t rounded[SP_DELTA_SLICE_ELEMS];
};

/* Do x or base of a source overlap these bytes? */
static bool overlaps(const spccl_delta_source *s, const void *p, size_t bytes)
{
    return sp_overlap(s->x, s->n_elems * sp_dtype_bytes(s->x_dtype), p, bytes) ||
           sp_overlap(s->base, s->n_elems * sp_dtype_bytes(s->dtype), p, bytes);
}

spccl_status sp_delta_check_source(const char *call, size_t number, const spccl_delta_source *s,
                                   const void *dst, size_t dst_cap, const spccl_delta_options *o)
{
    const size_t e = sp_dtype_bytes(s->dtype);
    const bool is_cast =
        s->x_dtype == SPCCL_FLOAT32 && (s->dtype == SPCCL_BFLOAT16 || s->dtype == SPCCL_FLOAT16);

    if (e == 0 || (s->x_dtype != s->dtype && !is_cast))
        return SP_FAIL(
            SPCCL_ERR_DTYPE,
            "%s: sources[%zu]: x_dtype %s, dtype %s; wanted the same, or float32 to bfloat16 or float16",
            call, number, sp_dtype_name(s->x_dtype), sp_dtype_name(s->dtype));
    if (s->n_elems > SP_DELTA_ELEMS_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: sources[%zu]: n_elems %llu, wanted at most 2^40", call, number,
                       (unsigned long long)s->n_elems);
    if (s->n_elems != 0 && (s->x == NULL || s->base == NULL))
        return SP_FAIL(SPCCL_ERR_ARG, "%s: sources[%zu]: %s is NULL", call, number,
                       s->x == NULL ? "x" : "base");
    if (overlaps(s, dst, dst_cap))
        return SP_FAIL(SPCCL_ERR_ALIAS, "%s: sources[%zu] (%llu elements) and dst (%zu bytes) overlap", call,
                       number, (unsigned long long)s->n_elems, dst_cap);
    if (o->old != NULL && (overlaps(s, o->old, o->old_cap) || sp_overlap(dst, dst_cap, o->old, o->old_cap)))
        return SP_FAIL(SPCCL_ERR_ALIAS, "%s: options->old (%zu bytes) overlaps dst or sources[%zu]", call,
                       o->old_cap, number);
    return SPCCL_OK;
}

/* An x or a base. */
struct span {
    const uint8_t *begin, *end;
    size_t number; /* of its source */
    bool is_base;
};
static int by_begin(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

spccl_status sp_delta_check_apart(const char *call, const spccl_delta_source *sources, size_t n)
{
    struct span *spans = malloc((2 * n + 1) * sizeof *spans);
    const struct span *last[2] = {NULL, NULL}; /* that ends last, of x and of bases */
    size_t n_spans = 0;
    spccl_status st = SPCCL_OK;

    if (spans == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%s: %zu sources", call, n);
    for (size_t i = 0; i < n; i++) {
        const spccl_delta_source *s = &sources[i];
        const uint8_t *x = s->x, *base = s->base;
        if (s->n_elems == 0)
            continue;
        spans[n_spans++] = (struct span){x, x + s->n_elems * sp_dtype_bytes(s->x_dtype), i, false};
        spans[n_spans++] = (struct span){base, base + s->n_elems * sp_dtype_bytes(s->dtype), i, true};
    }
    qsort(spans, n_spans, sizeof *spans, by_begin);
    for (size_t i = 0; i < n_spans && st == SPCCL_OK; i++) {
        const struct span *p = &spans[i];
        for (int is_base = !p->is_base; is_base <= 1 && st == SPCCL_OK; is_base++)
            if (last[is_base] != NULL && last[is_base]->end > p->begin)
                st = SP_FAIL(
                    SPCCL_ERR_ALIAS,
                    "%s: sources[%zu].%s and sources[%zu].%s overlap, and options->old advances bases", call,
                    p->number, p->is_base ? "base" : "x", last[is_base]->number, is_base ? "base" : "x");
        if (last[p->is_base] == NULL || last[p->is_base]->end < p->end)
            last[p->is_base] = p;
    }
    free(spans);
    return st;
}

spccl_status sp_delta_read_options(const char *call, const spccl_delta_options *given,
                                   spccl_delta_options *out)
{
    *out = (spccl_delta_options)SPCCL_DELTA_OPTIONS_INIT;
    SP_TRY(sp_options_copy("spccl_delta_options", given, out, sizeof *out));
    if (out->raw > 1)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: options->raw %llu, wanted 0 or 1", call,
                       (unsigned long long)out->raw);
    return SPCCL_OK;
}

static spccl_status need(const struct encode_job *j, size_t bytes)
{
    if (bytes <= j->dst_cap - j->at)
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_DST_SMALL,
                   "delta_encode: dst_cap %zu, wanted %zu more in sources[%zu]: the sum of spccl_delta_bound "
                   "of all sources always suffices",
                   j->dst_cap, bytes - (j->dst_cap - j->at), j->number);
}

static spccl_status encode_slice(struct encode_job *j, uint8_t *frame, uint64_t number)
{
    const spccl_delta_source *from = j->source;
    const size_t e = sp_dtype_bytes(from->dtype);
    const uint64_t at = number * SP_DELTA_SLICE_ELEMS;
    sp_delta_slice *s = &j->slice;
    const uint64_t start = (uint64_t)(j->dst + j->at - frame);

    s->n_elems = sp_delta_slice_elems(from->n_elems, number);
    s->elem_bytes = (uint32_t)e;
    s->first = from->first + at;
    s->key = from->key;
    s->x = (const uint8_t *)from->x + at * e;
    s->base = (const uint8_t *)from->base + at * e;
    if (from->x_dtype != from->dtype) {
        s->kernels->finish(&(sp_finish_args){.acc = (const float *)from->x + at,
                                             .dst = j->rounded,
                                             .n_elems = s->n_elems,
                                             .dtype = from->dtype,
                                             .op = SPCCL_SUM,
                                             .world_size = 1});
        s->x = j->rounded;
    }
    sp_delta_scan(s);
    if (start + s->bytes > SP_DELTA_BYTES_MAX - SP_DELTA_ALIGN)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "delta_encode: sources[%zu]: the frame exceeds 16 GiB: split the array into parts",
                       j->number);
    SP_TRY(need(j, s->bytes));
    sp_delta_write_slice(s, j->dst + j->at);
    sp_delta_write_entry(frame, number, s->nnz, s->code, start);
    j->at += s->bytes;
    return SPCCL_OK;
}

static spccl_status encode_source(struct encode_job *j, spccl_delta_frame *out)
{
    const spccl_delta_source *from = j->source;
    const uint64_t n_slices = sp_delta_n_slices(from->n_elems);
    const size_t head = SP_DELTA_HEADER_BYTES + n_slices * SP_DELTA_ENTRY_BYTES, begin = j->at;
    uint8_t *frame = j->dst + begin;

    *out = (spccl_delta_frame){.offset = begin};
    SP_TRY(need(j, head));
    j->at += head;
    for (uint64_t s = 0; s < n_slices; s++) {
        SP_TRY(encode_slice(j, frame, s));
        out->nnz += j->slice.nnz;
        out->sum_change += j->slice.sum_change;
    }
    SP_TRY(need(j, sp_align_up(j->at, SP_DELTA_ALIGN) - j->at));
    while (j->at % SP_DELTA_ALIGN != 0)
        j->dst[j->at++] = 0;
    out->bytes = j->at - begin;
    sp_delta_write_header(frame, from->dtype, from->n_elems, out->nnz, out->bytes);
    return SPCCL_OK;
}

/* Bases become what the frames say; o->old gets what they were. */
static spccl_status advance(const spccl_delta_source *sources, size_t n, const spccl_delta_frame *frames,
                            const uint8_t *dst, const spccl_delta_options *o)
{
    spccl_delta_target *targets = calloc(n + 1, sizeof *targets);
    spccl_delta_place *places = calloc(n + 1, sizeof *places);
    spccl_status st = SPCCL_OK;
    size_t old_bytes = 0;

    if (targets == NULL || places == NULL) {
        st = SP_FAIL(SPCCL_ERR_NOMEM, "delta_encode: %zu targets", n);
        goto done;
    }
    for (size_t i = 0; i < n; i++) {
        const spccl_delta_source *s = &sources[i];
        /* The elements as one row of the tensor. */
        places[i] = (spccl_delta_place){
            (void *)(uintptr_t)s->base, s->first + s->n_elems, 0, 1, s->first, s->n_elems, s->n_elems};
        targets[i] = (spccl_delta_target){dst + frames[i].offset,
                                          frames[i].bytes,
                                          s->n_elems,
                                          s->first,
                                          &places[i],
                                          1,
                                          s->key,
                                          s->dtype,
                                          0};
    }
    SP_TRY_TO(done, st, spccl_delta_check(targets, n, NULL, 0, NULL, &old_bytes));
    if (old_bytes > o->old_cap) {
        st = SP_FAIL(SPCCL_ERR_DST_SMALL, "delta_encode: options->old_cap %zu, wanted %zu", o->old_cap,
                     old_bytes);
        goto done;
    }
    SP_TRY_TO(done, st, spccl_delta_check(targets, n, o->old, o->old_cap, NULL, NULL));
    st = spccl_delta_apply(targets, n);
done:
    free(targets);
    free(places);
    return st;
}

spccl_status spccl_delta_encode(const spccl_delta_source *sources, size_t n_sources,
                                const spccl_delta_options *options, void *dst, size_t dst_cap,
                                spccl_delta_frame *frames, size_t *out_bytes)
{
    spccl_delta_options o;
    spccl_status st = SPCCL_OK;
    const sp_kernels *kernels;
    struct encode_job *j;
    spccl_delta_frame frame;

    SP_TRY(sp_delta_read_options("delta_encode", options, &o));
    if (out_bytes == NULL || (n_sources != 0 && (sources == NULL || dst == NULL || frames == NULL)))
        return SP_FAIL(SPCCL_ERR_ARG, "delta_encode: sources, dst, frames or out_bytes is NULL");
    for (size_t i = 0; i < n_sources; i++)
        SP_TRY(sp_delta_check_source("delta_encode", i, &sources[i], dst, dst_cap, &o));
    if (o.old != NULL)
        SP_TRY(sp_delta_check_apart("delta_encode", sources, n_sources));
    SP_TRY(sp_kernels_pick(&kernels));
    j = sp_alloc64(sp_align_up(sizeof *j, 64));
    if (j == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "delta_encode: %zu bytes of scratch", sizeof *j);
    j->slice.kernels = kernels;
    j->dst = dst;
    j->dst_cap = dst_cap;
    j->at = 0;
    j->slice.raw = o.raw != 0;
    for (j->number = 0; j->number < n_sources; j->number++) {
        j->source = &sources[j->number];
        SP_TRY_TO(done, st, encode_source(j, &frame));
        frames[j->number] = frame;
    }
    if (o.old != NULL)
        SP_TRY_TO(done, st, advance(sources, n_sources, frames, dst, &o));
    *out_bytes = j->at;
done:
    sp_free(j);
    return st;
}

/* ---- checksum ---- */

spccl_status spccl_delta_checksum(const void *x, uint64_t n_elems, spccl_dtype dtype, uint64_t first,
                                  uint64_t key, uint64_t *out)
{
    const size_t e = sp_dtype_bytes(dtype);
    const sp_kernels *kernels;

    if (e == 0)
        return SP_FAIL(SPCCL_ERR_DTYPE, "delta_checksum: dtype %d, wanted 1..%d", (int)dtype,
                       SP_N_DTYPES - 1);
    if ((x == NULL && n_elems != 0) || out == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "delta_checksum: %s is NULL", out == NULL ? "out" : "x");
    SP_TRY(sp_kernels_pick(&kernels));
    *out = kernels->delta_sum(x, n_elems, e, first, key);
    return SPCCL_OK;
}
