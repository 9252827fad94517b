/* nan_cases.h - sums and products whose result is a NaN, with the bits that it must have. The bits are the
 * same on x86-64, aarch64 and GPUs. */
#ifndef SP_TEST_NAN_CASES_H
#define SP_TEST_NAN_CASES_H

#include "spccl.h"

/* `left` of rank 0, then `right` of rank 1. */
struct nan_case {
    spccl_dtype dtype;
    spccl_redop op;
    uint64_t left, right, wanted;
};

static const struct nan_case nan_cases[] = {
    /* No operand is a NaN: the sign bit of the result is set, whatever the CPU's default NaN is. */
    {SPCCL_FLOAT32, SPCCL_SUM, 0x7f800000, 0xff800000, 0xffc00000},
    {SPCCL_FLOAT32, SPCCL_SUM, 0xff800000, 0x7f800000, 0xffc00000},
    {SPCCL_FLOAT32, SPCCL_PROD, 0x7f800000, 0x00000000, 0xffc00000},
    {SPCCL_FLOAT32, SPCCL_PROD, 0x80000000, 0x7f800000, 0xffc00000},
    {SPCCL_FLOAT64, SPCCL_SUM, 0x7ff0000000000000, 0xfff0000000000000, 0xfff8000000000000},
    {SPCCL_FLOAT64, SPCCL_PROD, 0x0000000000000000, 0xfff0000000000000, 0xfff8000000000000},
    {SPCCL_FLOAT16, SPCCL_SUM, 0x7c00, 0xfc00, 0xfe00},
    {SPCCL_FLOAT16, SPCCL_PROD, 0x7c00, 0x0000, 0xfe00},
    {SPCCL_BFLOAT16, SPCCL_SUM, 0x7f80, 0xff80, 0xffc0},
    {SPCCL_BFLOAT16, SPCCL_PROD, 0x0000, 0xff80, 0xffc0},
    /* The left NaN, else the right one, is made quiet, and keeps its sign and payload. */
    {SPCCL_FLOAT32, SPCCL_SUM, 0x7fc12345, 0xffc54321, 0x7fc12345},
    {SPCCL_FLOAT32, SPCCL_SUM, 0xff812345, 0x3f800000, 0xffc12345},
    {SPCCL_FLOAT32, SPCCL_SUM, 0x3f800000, 0x7f812345, 0x7fc12345},
    {SPCCL_FLOAT32, SPCCL_SUM, 0x7fc12345, 0x7f854321, 0x7fc12345},
    {SPCCL_FLOAT32, SPCCL_PROD, 0x00000000, 0x7f812345, 0x7fc12345},
    {SPCCL_FLOAT64, SPCCL_SUM, 0x7ff0000000012345, 0xfff8000000054321, 0x7ff8000000012345},
    {SPCCL_FLOAT64, SPCCL_PROD, 0x3ff0000000000000, 0xfff0000000054321, 0xfff8000000054321},
    {SPCCL_FLOAT16, SPCCL_SUM, 0x7c01, 0xfe12, 0x7e01},
    {SPCCL_BFLOAT16, SPCCL_SUM, 0x3f80, 0xff81, 0xffc1},
};

#define N_NAN_CASES (sizeof nan_cases / sizeof nan_cases[0])

#endif
