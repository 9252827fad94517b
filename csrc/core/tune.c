/* tune.c - see tune.h. */
#include "tune.h"

#include <assert.h>

/* ---- format of a slice ---- */

const sp_link_cost sp_link_shm = {.ns_per_byte = 0.15, .name = "shm"};
const sp_link_cost sp_link_tcp = {.ns_per_byte = 0.80, .name = "tcp"};
/* So much that 16 bytes (the smallest difference of two frames) outweigh every time of the largest slice. */
const sp_link_cost sp_link_size_only = {.ns_per_byte = 1e12, .name = "size only"};

/* Time of encode (without the scan, which comes before the choice) and of decode with verb set. */
struct format_cost {
    double encode_elem_ns, encode_nnz_ns; /* per element of the slice, per listed element */
    double decode_elem_ns, decode_nnz_ns;
};
static const struct format_cost costs[SPCCL_N_FORMATS] = {
    [SPCCL_FORMAT_EMPTY] = {0.00, 0.0, 0.10, 0.0}, [SPCCL_FORMAT_TILE] = {0.02, 1.0, 0.12, 1.0},
    [SPCCL_FORMAT_PICI] = {0.10, 1.5, 0.20, 1.5},  [SPCCL_FORMAT_COO] = {0.02, 1.0, 0.10, 1.0},
    [SPCCL_FORMAT_DENSE] = {0.20, 0.0, 0.20, 0.0},
};

size_t sp_tune_frame_bound(size_t n_elems, size_t elem_bytes, bool is_delta)
{
    return is_delta ? sp_frame_bound_forced(SPCCL_FORMAT_PICI, n_elems, elem_bytes)
                    : sp_frame_bound(n_elems, elem_bytes);
}

static double format_ns(const sp_slice_stats *s, spccl_format format, size_t frame_bytes,
                        const sp_link_cost *link)
{
    const struct format_cost *c = &costs[format];
    return (c->encode_elem_ns + c->decode_elem_ns) * (double)s->n_elems +
           (c->encode_nnz_ns + c->decode_nnz_ns) * (double)s->nnz + link->ns_per_byte * (double)frame_bytes;
}

spccl_format sp_tune_format(const sp_slice_stats *stats, bool is_delta, const sp_link_cost *link)
{
    size_t bound = sp_tune_frame_bound(stats->n_elems, stats->elem_bytes, is_delta);
    spccl_format best = SPCCL_FORMAT_AUTO;
    double best_ns = 0;

    if (stats->nnz == 0)
        return SPCCL_FORMAT_EMPTY;
    for (int i = SPCCL_FORMAT_TILE; i < SPCCL_N_FORMATS; i++) {
        spccl_format format = (spccl_format)i;
        size_t bytes = sp_frame_bytes(format, stats->n_elems, stats->nnz, stats->elem_bytes);
        double ns = format_ns(stats, format, bytes, link);
        if (!sp_codec_allows(stats, format, is_delta) || bytes > bound)
            continue;
        if (best == SPCCL_FORMAT_AUTO || ns < best_ns) {
            best = format;
            best_ns = ns;
        }
    }
    assert(best != SPCCL_FORMAT_AUTO); /* dense, or pici for a delta, is always among them */
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
