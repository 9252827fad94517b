/* density_rule.h - decides between dense and sparse from the densities of earlier steps, without a scan: the adaptive
 * rule of Hough et al. (SpCCL), section IV.C. The ring's steps are such hops. The choice changes no bit of a result.
 * The functions depend on their arguments alone. */
#ifndef SP_DENSITY_RULE_H
#define SP_DENSITY_RULE_H

#include "spccl.h"

#include <stdbool.h>
#include <stddef.h>

/* The kinds of hops that have a threshold. A schedule says of each step which it is, and decides nothing. */
typedef enum sp_hop {
    SP_HOP_PLAIN,         /* no threshold: the format is chosen from the data alone */
    SP_HOP_IN_HOST,       /* intra_thresh: a contribution or a sum, to a rank of the same host */
    SP_HOP_BETWEEN_HOSTS, /* inter_thresh: a contribution or a sum, to a rank of another host */
    SP_HOP_GATHER /* ag_thresh: a result, from the reduce-scatter to the all-gather of an all-reduce */
} sp_hop;

/* A step sends dense if the step before it had at most this share of zeros. */
typedef struct sp_thresholds {
    float intra, inter, gather;
} sp_thresholds;

/* The paper's thresholds. COO has its own, the other formats have those of Pici. */
sp_thresholds sp_thresholds_of(spccl_format format);

/* What one rank knows of the densities of one slice, step after step. Starts zeroed. */
typedef struct sp_densities {
    bool known;
    float first; /* of the first step */
    float last;  /* of the last step: counted, or extrapolated */
} sp_densities;

/* True if the next step sends dense without a scan. */
bool sp_density_says_dense(const sp_densities *d, sp_hop hop, const sp_thresholds *t);
/* Note that the step sent dense: extrapolate its density by equation 7 of the paper. */
void sp_density_extrapolate(sp_densities *d);
/* Note the density that the step counted. */
void sp_density_count(sp_densities *d, size_t nnz, size_t n_elems);

#endif
