/* bench_codec.c - speed of encode and decode on one thread, beside the read and memset bandwidth of the same
 * run.
 *   spccl_bench_codec [--csv FILE] [--repeats N] [--format tile|pici|coo|dense] [--mib N] [--contribution 0|1]
 * SPCCL_DEBUG_CPU_ISA chooses the kernel set. GB/s are 1e9 bytes of dense data per second, whatever the frames'
 * size.
 *   encode   scan, choice of format by exact size, and encode of a 64 MiB array, slice by slice, to one
 *            buffer
 *            With --contribution 1 as for a sum, so that -0.0 would not be listed; the data has none
 *   set      decode SET with non-temporal stores to a 64 MiB array; the frames lie one after the other
 *   add      decode ADD of the same frames to the same array
 * memset is timed with 0 and with 1: on AMD Zen 4, cache lines of zeros leave the core about three times as
 * fast. */
#include "core/base/clock.h"
#include "core/base/dtype.h"
#include "core/base/mem.h"
#include "core/format/kernel_table.h"

#include <stdio.h>
#include <stdlib.h>

#define PEAK_BYTES ((size_t)256 << 20)
#define REPEATS_MAX 99

struct options {
    FILE *csv;
    int repeats;
    spccl_format format; /* AUTO: the format with the smallest frame */
    size_t bytes;        /* of the dense array */
    bool contribution;
};
struct bench {
    const sp_kernels *k;
    struct options opt;
    double read_gbs, memset0_gbs, memset1_gbs;
    uint8_t *x, *dst, *frames; /* dense input, dense output, frames back to back */
    uint64_t *mask;
    uint16_t *tile_nnz;
};
static volatile uint64_t sink;

static double gbs(size_t bytes, int64_t ns)
{
    return (double)bytes / (double)(ns > 0 ? ns : 1);
}
static int cmp_i64(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}
static int64_t median(int64_t *ns, int n)
{
    qsort(ns, (size_t)n, sizeof *ns, cmp_i64);
    return ns[n / 2];
}

/* ---- bandwidth of the memory ---- */

static double read_bandwidth(const uint64_t *p, size_t n_words)
{
    int64_t best = INT64_MAX;
    for (int r = 0; r < 7; r++) {
        int64_t t0 = sp_now_ns();
        uint64_t acc[16] = {0};
        for (size_t i = 0; i + 16 <= n_words; i += 16)
            for (size_t j = 0; j < 16; j++)
                acc[j] |= p[i + j];
        for (size_t j = 1; j < 16; j++)
            acc[0] |= acc[j];
        sink = acc[0];
        int64_t t = sp_now_ns() - t0;
        best = t < best ? t : best;
    }
    return gbs(n_words * 8, best);
}
static double memset_bandwidth(uint8_t *p, size_t bytes, int value)
{
    int64_t best = INT64_MAX;
    for (int r = 0; r < 7; r++) {
        int64_t t0 = sp_now_ns();
        memset(p, value, bytes);
        int64_t t = sp_now_ns() - t0;
        sink = p[bytes / 2];
        best = t < best ? t : best;
    }
    return gbs(bytes, best);
}

/* ---- frames ---- */

static uint64_t rng = 1;
static uint64_t rand64(void)
{
    uint64_t z = (rng += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static void fill(uint8_t *x, size_t n, size_t elem_bytes, double density)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t r = rand64(),
                 v = (double)(r >> 40) * 0x1p-24 < density ? UINT64_C(0x3c003c00) | (r & 0x83ff83ff) : 0;
        memcpy(x + i * elem_bytes, &v, elem_bytes);
    }
}
static spccl_format choose(const struct bench *b, const sp_scan_args *s)
{
    spccl_format best = SPCCL_FORMAT_DENSE;
    if (s->nnz == 0)
        return SPCCL_FORMAT_EMPTY;
    if (b->opt.format != SPCCL_FORMAT_AUTO)
        return b->opt.format == SPCCL_FORMAT_TILE && s->has_full_tile ? SPCCL_FORMAT_DENSE : b->opt.format;
    for (int f = SPCCL_FORMAT_TILE; f < SPCCL_FORMAT_DENSE; f++)
        if ((f != SPCCL_FORMAT_TILE || !s->has_full_tile) &&
            sp_frame_bytes((spccl_format)f, s->n_elems, s->nnz, s->elem_bytes) <
                sp_frame_bytes(best, s->n_elems, s->nnz, s->elem_bytes))
            best = (spccl_format)f;
    return best;
}
/* Encode one slice to `out`. Returns the bytes of the frame. */
static size_t encode_slice(struct bench *b, const uint8_t *x, size_t n, spccl_dtype dtype, uint8_t *out,
                           spccl_format *used)
{
    sp_scan_args s = {.x = x,
                      .n_elems = n,
                      .elem_bytes = sp_dtype_bytes(dtype),
                      .ignores_sign = b->opt.contribution,
                      .mask = b->mask,
                      .tile_nnz = b->tile_nnz};
    sp_encode_args e = {
        .x = x, .n_elems = n, .elem_bytes = s.elem_bytes, .mask = b->mask, .tile_nnz = b->tile_nnz};
    sp_frame_layout lay;
    b->k->scan(&s);
    *used = choose(b, &s);
    e.nnz = *used == SPCCL_FORMAT_DENSE ? n : s.nnz;
    sp_frame_layout_of(*used, n, e.nnz, s.elem_bytes, &lay);
    sp_frame_write_header(out, *used, dtype, false, n, e.nnz, &lay);
    e.index = out + lay.index_off;
    e.meta = out + lay.meta_off;
    e.values = out + lay.values_off;
    if (*used != SPCCL_FORMAT_EMPTY)
        b->k->encode[*used](&e);
    return lay.frame_bytes;
}

/* ---- one row ---- */

struct row {
    spccl_dtype dtype;
    double sparsity;
    size_t slice_elems;
};

static void report(struct bench *b, const struct row *r, spccl_format f, const char *what, int64_t *ns)
{
    int n = b->opt.repeats;
    double mid = gbs(b->opt.bytes, median(ns, n)), lo = gbs(b->opt.bytes, ns[n - 1]),
           hi = gbs(b->opt.bytes, ns[0]);
    printf("%-8s %6.1f%% %6zu %-6s %-7s %7.2f %7.2f %7.2f   %5.2f %7.2f %7.2f\n", spccl_dtype_name(r->dtype),
           100 * r->sparsity, r->slice_elems, spccl_format_name(f), what, mid, lo, hi, mid / b->read_gbs,
           mid / b->memset0_gbs, mid / b->memset1_gbs);
    if (b->opt.csv != NULL)
        fprintf(b->opt.csv, "%s,%s,%g,%zu,%s,%s,%.3f,%.3f,%.3f,%.3f,%.3f,%.3f\n", b->k->name,
                spccl_dtype_name(r->dtype), r->sparsity, r->slice_elems, spccl_format_name(f), what, mid, lo,
                hi, b->read_gbs, b->memset0_gbs, b->memset1_gbs);
}

static spccl_format time_encode(struct bench *b, const struct row *r)
{
    size_t eb = sp_dtype_bytes(r->dtype), n = b->opt.bytes / eb;
    int64_t ns[REPEATS_MAX];
    spccl_format f = SPCCL_FORMAT_EMPTY;
    for (int rep = -1; rep < b->opt.repeats; rep++) { /* -1: warm-up */
        int64_t t0 = sp_now_ns();
        for (size_t i = 0; i < n; i += r->slice_elems)
            encode_slice(b, b->x + i * eb, sp_min_size(r->slice_elems, n - i), r->dtype, b->frames, &f);
        if (rep >= 0)
            ns[rep] = sp_now_ns() - t0;
    }
    report(b, r, f, "encode", ns);
    return f;
}

static int time_decode(struct bench *b, const struct row *r, spccl_verb verb)
{
    size_t eb = sp_dtype_bytes(r->dtype), n = b->opt.bytes / eb, used = 0, at;
    int64_t ns[REPEATS_MAX];
    spccl_format f = SPCCL_FORMAT_EMPTY;
    for (size_t i = 0; i < n; i += r->slice_elems)
        used += encode_slice(b, b->x + i * eb, sp_min_size(r->slice_elems, n - i), r->dtype, b->frames + used,
                             &f);
    for (int rep = -1; rep < b->opt.repeats; rep++) {
        int64_t t0 = sp_now_ns();
        at = 0;
        for (size_t i = 0; i < n; i += r->slice_elems) {
            sp_frame fr;
            if (sp_frame_validate_header(b->frames + at, used - at, &fr) != SPCCL_OK)
                return fprintf(stderr, "%s\n", spccl_last_error()), 1;
            sp_decode_args d = {.index = fr.index,
                                .meta = fr.meta,
                                .values = fr.values,
                                .n_elems = fr.n_elems,
                                .nnz = fr.nnz,
                                .dtype = r->dtype,
                                .dst_dtype = r->dtype,
                                .dst = b->dst + i * eb,
                                .non_temporal = verb == SPCCL_SET};
            if (fr.format != SPCCL_FORMAT_EMPTY)
                b->k->decode[fr.format][verb](&d);
            else if (verb == SPCCL_SET)
                b->k->zero(d.dst, fr.n_elems * eb, true);
            at += fr.frame_bytes;
        }
        if (rep >= 0)
            ns[rep] = sp_now_ns() - t0;
        if (verb == SPCCL_SET && rep == -1 && memcmp(b->dst, b->x, b->opt.bytes) != 0)
            return fprintf(stderr, "decode gave other bytes than were encoded\n"), 1;
    }
    report(b, r, f, verb == SPCCL_SET ? "set" : "add", ns);
    return 0;
}

static int run(struct bench *b)
{
    static const double sparsities[] = {0, 0.5, 0.9, 0.99, 0.999};
    static const spccl_dtype dtypes[] = {SPCCL_FLOAT32, SPCCL_BFLOAT16};
    static const size_t slices[] = {32768, 65536};
    printf("set %s; best of 7 over 256 MiB: read %.2f, memset 0 %.2f, memset 1 %.2f GB/s; rows: median, min, "
           "max of %d\n",
           b->k->name, b->read_gbs, b->memset0_gbs, b->memset1_gbs, b->opt.repeats);
    printf("%-8s %7s %6s %-6s %-7s %7s %7s %7s   /read /memset0 /memset1\n", "dtype", "zeros", "slice",
           "format", "what", "GB/s", "min", "max");
    for (size_t t = 0; t < 2; t++) {
        for (size_t s = 0; s < 5; s++) {
            size_t eb = sp_dtype_bytes(dtypes[t]);
            fill(b->x, b->opt.bytes / eb, eb, 1 - sparsities[s]);
            for (size_t w = 0; w < 2; w++) {
                struct row r = {dtypes[t], sparsities[s], slices[w]};
                time_encode(b, &r);
                if (time_decode(b, &r, SPCCL_SET) != 0 || time_decode(b, &r, SPCCL_ADD) != 0)
                    return 1;
            }
        }
    }
    return 0;
}

static int parse(int argc, char **argv, struct options *o)
{
    *o = (struct options){NULL, 9, SPCCL_FORMAT_AUTO, (size_t)64 << 20, false};
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--csv") == 0) {
            o->csv = fopen(argv[i + 1], "w");
            if (o->csv == NULL)
                return perror(argv[i + 1]), 1;
            fprintf(o->csv, "set,dtype,sparsity,slice_elems,format,what,gbs_median,gbs_min,gbs_max,read_gbs,"
                            "memset0_gbs,memset1_gbs\n");
        } else if (strcmp(argv[i], "--repeats") == 0) {
            o->repeats = atoi(argv[i + 1]);
        } else if (strcmp(argv[i], "--contribution") == 0) {
            o->contribution = atoi(argv[i + 1]) != 0;
        } else if (strcmp(argv[i], "--mib") == 0) {
            o->bytes = strtoull(argv[i + 1], NULL, 10) << 20;
        } else if (strcmp(argv[i], "--format") == 0) {
            for (int f = SPCCL_FORMAT_TILE; f <= SPCCL_FORMAT_DENSE; f++)
                if (strcmp(argv[i + 1], spccl_format_name((spccl_format)f)) == 0)
                    o->format = (spccl_format)f;
            if (o->format == SPCCL_FORMAT_AUTO)
                return fprintf(stderr, "--format %s: wanted tile, pici, coo or dense\n", argv[i + 1]), 1;
        } else {
            return fprintf(stderr, "unknown option %s\n", argv[i]), 1;
        }
    }
    if (argc % 2 == 0 || o->repeats < 7 || o->repeats > REPEATS_MAX || o->bytes == 0 || o->bytes > PEAK_BYTES)
        return fprintf(stderr, "usage: [--csv FILE] [--repeats 7..%d] [--format F] [--mib 1..256]\n",
                       REPEATS_MAX),
               1;
    return 0;
}

int main(int argc, char **argv)
{
    struct bench b = {0};
    int rc = parse(argc, argv, &b.opt);
    if (rc != 0)
        return rc;
    if (sp_kernels_pick(&b.k) != SPCCL_OK)
        return fprintf(stderr, "%s\n", spccl_last_error()), 1;
    /* Enough for frames of any format: the largest is coo of a dense array of 16-bit elements, three times
     * the array. */
    uint8_t *big = sp_alloc64(PEAK_BYTES);
    b.x = sp_alloc64(b.opt.bytes);
    b.frames = sp_alloc64(b.opt.bytes * 3 + ((size_t)8 << 20));
    b.mask = sp_alloc64(65536 / 8);
    b.tile_nnz = sp_alloc64(65536 / 256 * 2);
    if (big == NULL || b.x == NULL || b.frames == NULL || b.mask == NULL || b.tile_nnz == NULL)
        return fprintf(stderr, "out of memory\n"), 1;
    memset(big, 1, PEAK_BYTES);
    memset(b.frames, 1, b.opt.bytes * 3 + ((size_t)8 << 20));
    b.read_gbs = read_bandwidth((const uint64_t *)(const void *)big, PEAK_BYTES / 8);
    b.memset0_gbs = memset_bandwidth(big, PEAK_BYTES, 0);
    b.memset1_gbs = memset_bandwidth(big, PEAK_BYTES, 1);
    b.dst = big;
    rc = run(&b);
    if (b.opt.csv != NULL && fclose(b.opt.csv) != 0)
        rc = 1;
    sp_free(big);
    sp_free(b.x);
    sp_free(b.frames);
    sp_free(b.mask);
    sp_free(b.tile_nnz);
    return rc;
}
