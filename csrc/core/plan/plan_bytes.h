/* plan_bytes.h - the model of bytes: what a slice becomes as a message, and how dense a sum of some ranks is. The choice of
 * the schedule (plan_cost.c), `spccl schedule check` and the simulator (core/simulate) all use it.
 * The functions depend on their arguments alone. Their arithmetic is +, -, * and / of doubles, which IEEE 754 fixes, so
 * ranks that give the same arguments get the same bits on any CPU. */
#ifndef SP_PLAN_BYTES_H
#define SP_PLAN_BYTES_H

#include "spccl.h"

#include <stddef.h>

/* A slice that will be sent. */
typedef struct sp_slice_kind {
    size_t elem_bytes;
    spccl_format format; /* AUTO or forced. DENSE: also a slice that is sent dense without a scan */
    double density;
    double link_ns; /* time per byte of the slowest link to its receivers: the format depends on it */
} sp_slice_kind;

/* The means over slices whose nonzeros are at random places. */
typedef struct sp_slice_bytes {
    spccl_format format;
    double bytes; /* of the message: envelope and frame */
    double encode_ns, decode_ns;
} sp_slice_bytes;

/* n: elements of the slice, at least 1. */
sp_slice_bytes sp_slice_bytes_of(const sp_slice_kind *k, size_t n);

/* Density of a sum of n_ranks contributions whose nonzeros are independent: 1 - (1 - density)^n_ranks. */
double sp_cost_sum_density(double density, int n_ranks);
/* Density of a sum of n_added of the n_ranks contributions. density is that of one, sum_density that of the sum of all.
 * The nonzeros of each rank are taken as independent within a support: a share of all elements that follows from both.
 * With a small support the nonzeros of the ranks coincide. */
double sp_cost_partial_density(double density, double sum_density, int n_ranks, int n_added);

#endif
