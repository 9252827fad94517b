/* signs_scalar.c - one bit per element without an instruction set of its own: defines the bits; see signs.inc. */
#define SP_ISA_NAME(x) x##_scalar

#include "kernels/cpu/signs.inc"
