/* plan_bytes.c - see plan_bytes.h. */
#include "core/plan/plan_bytes.h"

#include "core/base/bits.h"
#include "core/format/tune_format.h"
#include "core/plan/sched.h"

double sp_cost_sum_density(double density, int n_ranks)
{
    double absent = 1, power = 1 - density; /* power: (1 - density) to 1, 2, 4, 8 ... */
    for (unsigned n = (unsigned)n_ranks; n != 0; n >>= 1, power *= power)
        if ((n & 1) != 0)
            absent *= power;
    return 1 - absent;
}

double sp_cost_partial_density(double density, double sum_density, int n_ranks, int n_added)
{
    double low = density, high = 1024, all = sp_cost_sum_density(density, n_ranks);
    if (n_added == n_ranks)
        return sum_density;
    if (n_added == 1 || density <= 0 || density >= sum_density)
        return density;
    if (sum_density >= all * 0.999 && sum_density <= all * 1.001)
        return sp_cost_sum_density(density, n_added);
    for (int i = 0; i < 64; i++) {
        double support = (low + high) / 2;
        if (support * sp_cost_sum_density(density / support, n_ranks) < sum_density)
            low = support;
        else
            high = support;
    }
    return low * sp_cost_sum_density(density / low, n_added);
}

/* Mean bytes of frames of a format with about `nnz` listed elements. Sections are padded to 16 bytes, so this
 * looks at four counts around nnz that have other remainders modulo 4 and 16. */
static double frame_bytes(size_t elem_bytes, spccl_format format, size_t n, double nnz)
{
    static const int around[] = {-7, -2, 3, 8};
    double bytes = 0, mean = 0, first = 0, last = 0, first_bytes = 0, last_bytes = 0;
    for (int i = 0; i < 4; i++) {
        double k = (double)(size_t)nnz + around[i];
        k = k < 1 ? 1 : k > (double)n ? (double)n : k;
        last = k;
        last_bytes = (double)sp_frame_bytes(format, n, (size_t)k, elem_bytes);
        if (i == 0) {
            first = last;
            first_bytes = last_bytes;
        }
        mean += k / 4;
        bytes += last_bytes / 4;
    }
    return last > first ? bytes + (nnz - mean) * (last_bytes - first_bytes) / (last - first) : bytes;
}

sp_slice_bytes sp_slice_bytes_of(const sp_slice_kind *k, size_t n)
{
    sp_slice_stats stats = {.n_elems = n, .elem_bytes = k->elem_bytes};
    sp_slice_bytes out = {.format = k->format};
    stats.nnz = sp_min_size((size_t)(k->density * (double)n + 0.5), n);
    stats.has_full_tile = stats.nnz == n;
    if (k->format == SPCCL_FORMAT_AUTO)
        out.format = sp_tune_format(&stats, false, k->link_ns);
    else if (stats.nnz == 0)
        out.format = SPCCL_FORMAT_EMPTY;
    else if (!sp_codec_allows(&stats, k->format, false))
        out.format = SPCCL_FORMAT_DENSE;
    if (out.format == SPCCL_FORMAT_EMPTY || out.format == SPCCL_FORMAT_DENSE)
        out.bytes = (double)sp_frame_bytes(out.format, n, stats.nnz, k->elem_bytes);
    else
        out.bytes = frame_bytes(k->elem_bytes, out.format, n, k->density * (double)n);
    out.bytes += SP_ENVELOPE_BYTES;
    out.encode_ns = sp_tune_encode_ns(out.format, &stats);
    out.decode_ns = sp_tune_decode_ns(out.format, &stats);
    return out;
}
