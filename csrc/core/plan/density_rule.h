/* density_rule.h - decides between dense and sparse from the densities of earlier steps, without a scan: the adaptive
 * rule of Hough et al. (SpCCL), section IV.C. The ring uses it. The choice changes no bit of a result.
 * The functions depend on their arguments alone. */
#ifndef SP_DENSITY_RULE_H
#define SP_DENSITY_RULE_H

#include "core/plan/sched.h"

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
bool sp_density_says_dense(const sp_densities *d, sp_density_rule rule, const sp_thresholds *t);
/* Note that the step sent dense: extrapolate its density by equation 7 of the paper. */
void sp_density_extrapolate(sp_densities *d);
/* Note the density that the step counted. */
void sp_density_count(sp_densities *d, size_t nnz, size_t n_elems);

#endif
