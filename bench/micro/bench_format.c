/* bench_format.c - time per slice of each format on one thread, and a fit for the cost table of
 * core/format/tune_format.c.
 *   spccl_bench_format [slice_elems]
 * SPCCL_DEBUG_CPU_ISA chooses the kernel set. Slices come in turn from an array of 32 MiB. Frames go to a ring of
 * 1 MiB, as between two ranks of a host. Times are medians over all slices, in ns per slice:
 *   encode   header and sections, without the scan, which comes before the choice of format
 *   check    sp_frame_validate
 *   set      decode with verb SET
 * The fit is least squares of encode, and of check + set, over the densities shown. Its variables are the
 * numbers of elements and of listed elements. */
#include "core/base/clock.h"
#include "core/base/dtype.h"
#include "core/format/codec.h"

#include <stdio.h>
#include <stdlib.h>

#define ARRAY_BYTES ((size_t)32 << 20)
#define RING_BYTES ((size_t)1 << 20)
#define N_DENSITIES 8
#define SAMPLES_MAX 1024

static const double densities[N_DENSITIES] = {0.001, 0.005, 0.01, 0.03, 0.06, 0.12, 0.25, 0.5};

struct bench {
    const sp_kernels *kernels;
    sp_codec *codec;
    size_t slice_elems;
    uint8_t *x, *dst, *ring;
    size_t ring_at;
};
struct result {
    double encode_ns, check_ns, set_ns, nnz;
};

static int cmp_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double median(double *v, size_t n)
{
    qsort(v, n, sizeof *v, cmp_double);
    return v[n / 2];
}

static void fill(uint8_t *x, size_t eb, double density)
{
    uint64_t state = 1;
    memset(x, 0, ARRAY_BYTES);
    for (size_t i = 0; i < ARRAY_BYTES / eb; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        if ((double)(state >> 33) < density * 2147483648.0 && i % 256 != 0)
            x[i * eb] = 1;
    }
}

static struct result run(struct bench *b, spccl_dtype dtype, spccl_format format)
{
    static double encode[SAMPLES_MAX], check[SAMPLES_MAX], set[SAMPLES_MAX];
    size_t n = b->slice_elems, eb = sp_dtype_bytes(dtype), slice_bytes = n * eb, k = 0;
    struct result r = {0};

    for (; k < SAMPLES_MAX && (k + 1) * slice_bytes <= ARRAY_BYTES; k++) {
        uint8_t *frame, *x = b->x + k * slice_bytes;
        sp_slice_stats s;
        sp_frame f;
        size_t bytes;
        int64_t t0, t1, t2, t3;
        sp_codec_scan(b->codec, x, NULL, n, dtype, &s);
        bytes = sp_frame_bytes(format, n, s.nnz, eb);
        b->ring_at = b->ring_at + bytes > RING_BYTES ? 0 : b->ring_at;
        frame = b->ring + b->ring_at;
        b->ring_at += bytes;
        t0 = sp_now_ns();
        sp_codec_write(b->codec, x, n, dtype, format, false, s.nnz, frame);
        t1 = sp_now_ns();
        if (sp_frame_validate(frame, bytes, &f) != SPCCL_OK)
            exit((fprintf(stderr, "%s\n", spccl_last_error()), 1));
        t2 = sp_now_ns();
        (void)sp_codec_apply(b->kernels, &f, SPCCL_SET, b->dst + k * slice_bytes, dtype, true);
        t3 = sp_now_ns();
        encode[k] = (double)(t1 - t0);
        check[k] = (double)(t2 - t1);
        set[k] = (double)(t3 - t2);
        r.nnz += (double)s.nnz;
    }
    r.encode_ns = median(encode, k);
    r.check_ns = median(check, k);
    r.set_ns = median(set, k);
    r.nnz /= (double)k;
    return r;
}

/* Fit y = a * n + b * nnz. n is the same for all points, so this is a straight line over nnz. */
static void fit(const double *y, const double *nnz, double n, double *per_elem, double *per_nnz)
{
    double sx = 0, sy = 0, sxx = 0, sxy = 0, k = N_DENSITIES;
    for (int i = 0; i < N_DENSITIES; i++) {
        sx += nnz[i];
        sy += y[i];
        sxx += nnz[i] * nnz[i];
        sxy += nnz[i] * y[i];
    }
    *per_nnz = (k * sxy - sx * sy) / (k * sxx - sx * sx);
    *per_elem = (sy - *per_nnz * sx) / k / n;
}

static void bench_dtype(struct bench *b, spccl_dtype dtype)
{
    struct result r[SPCCL_N_FORMATS][N_DENSITIES];

    for (int d = 0; d < N_DENSITIES; d++) {
        fill(b->x, sp_dtype_bytes(dtype), densities[d]);
        for (int f = SPCCL_FORMAT_TILE; f < SPCCL_N_FORMATS; f++) {
            r[f][d] = run(b, dtype, (spccl_format)f);
            printf("%-8s %6.1f%% %-6s encode %8.0f  check %8.0f  set %8.0f\n", sp_dtype_name(dtype),
                   100 * densities[d], spccl_format_name((spccl_format)f), r[f][d].encode_ns,
                   r[f][d].check_ns, r[f][d].set_ns);
        }
    }
    for (int f = SPCCL_FORMAT_TILE; f < SPCCL_N_FORMATS; f++) {
        double encode[N_DENSITIES], decode[N_DENSITIES], nnz[N_DENSITIES], c[4];
        for (int d = 0; d < N_DENSITIES; d++) {
            encode[d] = r[f][d].encode_ns;
            decode[d] = r[f][d].check_ns + r[f][d].set_ns;
            nnz[d] = r[f][d].nnz;
        }
        fit(encode, nnz, (double)b->slice_elems, &c[0], &c[1]);
        fit(decode, nnz, (double)b->slice_elems, &c[2], &c[3]);
        printf(
            "fit %-8s %-6s encode %.3f ns/element %.3f ns/listed   decode %.3f ns/element %.3f ns/listed\n",
            sp_dtype_name(dtype), spccl_format_name((spccl_format)f), c[0], c[1], c[2], c[3]);
    }
}

int main(int argc, char **argv)
{
    static const spccl_dtype dtypes[] = {SPCCL_INT8, SPCCL_BFLOAT16, SPCCL_FLOAT32, SPCCL_FLOAT64};
    struct bench b = {.slice_elems = argc > 1 ? strtoull(argv[1], NULL, 0) : 65536};
    if (b.slice_elems == 0 || b.slice_elems * 8 > ARRAY_BYTES / 8)
        return fprintf(stderr, "slice_elems: wanted 1..%zu\n", ARRAY_BYTES / 64), 1;
    b.x = sp_alloc64(ARRAY_BYTES);
    b.dst = sp_alloc64(ARRAY_BYTES);
    b.ring = sp_alloc64(2 * RING_BYTES + b.slice_elems * 16);
    if (b.x == NULL || b.dst == NULL || b.ring == NULL || sp_kernels_pick(&b.kernels) != SPCCL_OK ||
        sp_codec_create(b.kernels, b.slice_elems, &b.codec) != SPCCL_OK)
        return fprintf(stderr, "set-up: %s\n", spccl_last_error()), 1;
    memset(b.dst, 1, ARRAY_BYTES);
    memset(b.ring, 1, 2 * RING_BYTES);
    printf("kernels %s, %zu elements per slice, ns per slice\n", b.kernels->name, b.slice_elems);
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        bench_dtype(&b, dtypes[i]);
    sp_codec_destroy(b.codec);
    sp_free(b.x);
    sp_free(b.dst);
    sp_free(b.ring);
    return 0;
}
