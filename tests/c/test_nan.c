/* test_nan.c - compares the NaNs of sums and products with committed bits, on every kernel set. The bits are
 * the same on x86-64, aarch64 and GPUs. The stage aarch64 runs this test under qemu. */
#include "core/base/dtype.h"
#include "core/base/status.h"
#include "core/format/kernel_table.h"
#include "test.h"

/* More than one vector and a tail, so that both the vector code and the code for single elements run. */
#define N_ELEMS 67

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

static void put_all(void *x, spccl_dtype dtype, uint64_t bits)
{
    for (size_t i = 0; i < N_ELEMS; i++)
        memcpy((uint8_t *)x + i * sp_dtype_bytes(dtype), &bits, sp_dtype_bytes(dtype));
}

/* left op right, as a collective of two ranks computes it: in the accumulator's dtype, then rounded. */
static void run_case(const sp_kernels *k, const struct nan_case *c)
{
    _Alignas(64) uint8_t acc[N_ELEMS * 8], x[N_ELEMS * 8], out[N_ELEMS * 8];
    sp_combine_args combine = {
        .acc = acc, .x = x, .n_elems = N_ELEMS, .dtype = c->dtype, .op = c->op, .first = true};
    sp_finish_args finish = {
        .acc = acc, .dst = out, .n_elems = N_ELEMS, .dtype = c->dtype, .op = c->op, .world_size = 2};
    put_all(x, c->dtype, c->left);
    k->combine(&combine);
    put_all(x, c->dtype, c->right);
    combine.first = false;
    k->combine(&combine);
    k->finish(&finish);
    for (size_t i = 0; i < N_ELEMS; i++) {
        uint64_t got = 0;
        memcpy(&got, out + i * sp_dtype_bytes(c->dtype), sp_dtype_bytes(c->dtype));
        CHECK(got == c->wanted, "%s, %s, op %d, element %zu: %#llx, %#llx: got %#llx, wanted %#llx", k->name,
              sp_dtype_name(c->dtype), (int)c->op, i, (unsigned long long)c->left,
              (unsigned long long)c->right, (unsigned long long)got, (unsigned long long)c->wanted);
    }
}

static void every_set(void)
{
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++)
        for (size_t i = 0; i < sizeof nan_cases / sizeof nan_cases[0]; i++)
            run_case(k, &nan_cases[i]);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"every_set", every_set}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
