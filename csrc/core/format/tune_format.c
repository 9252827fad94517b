/* tune_format.c - see tune_format.h. */
#include "core/format/tune_format.h"

#include <assert.h>
#include <math.h>

/* ---- format of a slice ---- */

/* Time of encoding and decoding, in ns per element of the slice, per byte of the dense slice, and per listed
 * element. Encoding is without the scan, which comes before the choice. Decoding includes the check of the
 * frame, but not the time of writing dst, which is the same for all formats.
 *
 * bench/micro/bench_format.c fitted the numbers with the set avx512 and dtypes int8 to float64. The machine
 * was an AMD EPYC (Zen 4, 2 cores of a virtual machine, 1 MiB of L2). The set avx2 differs:
 *   - encode: 0.05 ns more per element; per listed element 2 times the cost in tile and pici, 1.2 in coo
 *   - decode: per listed element up to 2 times the cost in pici */
struct codec_cost {
    double elem_ns, byte_ns, listed_ns;
};
struct format_cost {
    struct codec_cost encode, decode;
};
static const struct format_cost costs[SPCCL_N_FORMATS] = {
    [SPCCL_FORMAT_TILE] = {.encode = {0.028, 0, 0.67}, .decode = {0.040, 0, 0.58}},
    [SPCCL_FORMAT_PICI] = {.encode = {0.040, 0, 0.36}, .decode = {0.050, 0, 0.59}},
    [SPCCL_FORMAT_COO] = {.encode = {0.022, 0, 1.05}, .decode = {0.010, 0, 1.21}},
    [SPCCL_FORMAT_DENSE] = {.encode = {0, 0.022, 0}, .decode = {0, 0, 0}},
};

size_t sp_tune_frame_bound(size_t n_elems, size_t elem_bytes, bool is_delta)
{
    return is_delta ? sp_frame_bound_forced(SPCCL_FORMAT_PICI, n_elems, elem_bytes)
                    : sp_frame_bound(n_elems, elem_bytes);
}

static double codec_ns(const struct codec_cost *c, const sp_slice_stats *s)
{
    return (c->elem_ns + c->byte_ns * (double)s->elem_bytes) * (double)s->n_elems +
           c->listed_ns * (double)s->nnz;
}

double sp_tune_encode_ns(spccl_format format, const sp_slice_stats *stats)
{
    return codec_ns(&costs[format].encode, stats);
}

double sp_tune_decode_ns(spccl_format format, const sp_slice_stats *stats)
{
    return codec_ns(&costs[format].decode, stats);
}

/* The format with the smallest frame; of equal sizes, the first in `order`. sp_choose_smallest of the GPU
 * must give the same answer, so that CPU and GPU write the same encoded arrays. */
static spccl_format smallest(const sp_slice_stats *stats, bool is_delta)
{
    static const spccl_format order[] = {SPCCL_FORMAT_DENSE, SPCCL_FORMAT_PICI, SPCCL_FORMAT_COO,
                                         SPCCL_FORMAT_TILE};
    spccl_format best = SPCCL_FORMAT_AUTO;
    size_t best_bytes = SIZE_MAX;

    for (size_t i = 0; i < sizeof order / sizeof *order; i++) {
        size_t bytes = sp_frame_bytes(order[i], stats->n_elems, stats->nnz, stats->elem_bytes);
        if (sp_codec_allows(stats, order[i], is_delta) && bytes < best_bytes) {
            best = order[i];
            best_bytes = bytes;
        }
    }
    return best;
}

spccl_format sp_tune_format(const sp_slice_stats *stats, bool is_delta, double link_ns_per_byte)
{
    size_t bound = sp_tune_frame_bound(stats->n_elems, stats->elem_bytes, is_delta);
    spccl_format best = SPCCL_FORMAT_AUTO;
    double best_ns = 0;

    if (stats->nnz == 0)
        return SPCCL_FORMAT_EMPTY;
    if (isinf(link_ns_per_byte))
        return smallest(stats, is_delta);
    for (int i = SPCCL_FORMAT_TILE; i < SPCCL_N_FORMATS; i++) {
        spccl_format format = (spccl_format)i;
        size_t bytes = sp_frame_bytes(format, stats->n_elems, stats->nnz, stats->elem_bytes);
        double ns = sp_tune_encode_ns(format, stats) + sp_tune_decode_ns(format, stats) +
                    link_ns_per_byte * (double)bytes;
        if (!sp_codec_allows(stats, format, is_delta) || bytes > bound)
            continue;
        if (best == SPCCL_FORMAT_AUTO || ns < best_ns) {
            best = format;
            best_ns = ns;
        }
    }
    assert(best != SPCCL_FORMAT_AUTO); /* dense, or pici for a delta, is always possible */
    return best;
}

spccl_status sp_tune_parse_format(const char *text, spccl_format *out)
{
    static const spccl_format formats[] = {SPCCL_FORMAT_AUTO, SPCCL_FORMAT_TILE, SPCCL_FORMAT_PICI,
                                           SPCCL_FORMAT_COO, SPCCL_FORMAT_DENSE};
    for (size_t i = 0; text != NULL && i < sizeof formats / sizeof *formats; i++) {
        if (strcmp(text, spccl_format_name(formats[i])) == 0) {
            *out = formats[i];
            return SPCCL_OK;
        }
    }
    return SP_FAIL(SPCCL_ERR_SETTING, "format \"%s\": wanted auto, tile, pici, coo or dense",
                   text != NULL ? text : "(null)");
}
