/* density_rule.c - see density_rule.h. */
#include "core/format/density_rule.h"

sp_thresholds sp_thresholds_of(spccl_format format)
{
    /* Hough et al. found both by sweeps: section IV.C for Pici, section IV.D for COO. */
    static const sp_thresholds pici = {.intra = 0.6f, .inter = 0.5f, .gather = 0.1f};
    static const sp_thresholds coo = {.intra = 0.7f, .inter = 0.6f, .gather = 0.5f};
    return format == SPCCL_FORMAT_COO ? coo : pici;
}

bool sp_density_says_dense(const sp_densities *d, sp_hop hop, const sp_thresholds *t)
{
    switch (hop) {
    case SP_HOP_PLAIN:
        return false;
    case SP_HOP_IN_HOST:
        return d->known && 1 - d->last <= t->intra;
    case SP_HOP_BETWEEN_HOSTS:
        return d->known && 1 - d->last <= t->inter;
    case SP_HOP_GATHER:
        return d->known && 1 - d->last <= t->gather;
    }
    return false;
}

void sp_density_extrapolate(sp_densities *d)
{
    d->last = 1 - (1 - d->last) * (1 - d->first);
}

void sp_density_count(sp_densities *d, size_t nnz, size_t n_elems)
{
    d->last = (float)nnz / (float)n_elems;
    if (!d->known)
        d->first = d->last;
    d->known = true;
}
