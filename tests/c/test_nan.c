/* test_nan.c - compares the NaNs of sums and products with the bits of nan_cases.h, on every kernel set.
 * The stage aarch64 runs this test under qemu. test_cuda_nan.c does the same on GPUs. */
#include "core/base/dtype.h"
#include "core/base/status.h"
#include "core/format/kernel_table.h"
#include "nan_cases.h"
#include "test.h"

/* More than one vector and a tail, so that both the vector code and the code for single elements run. */
#define N_ELEMS 67

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
        for (size_t i = 0; i < N_NAN_CASES; i++)
            run_case(k, &nan_cases[i]);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"every_set", every_set}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
