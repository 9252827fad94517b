/* test_kernels_reduce.c - combine and finish: compares every kernel set with the scalar one, bit for bit,
 * and with the rules of spccl.h. */
#include "kernel_data.h"

static void check_combine(const sp_kernels *k, spccl_dtype dtype, spccl_redop op, bool first, size_t n)
{
    size_t bytes = sp_dtype_bytes(dtype), acc_bytes = sp_dtype_bytes(sp_acc_dtype(dtype)),
           shift = test_rand() % 64;
    uint8_t *x, *was;
    at_end = (int)(test_rand() % 2);
    x = take(X, 0, n * bytes, test_rand() % 64);
    fill_any(x, n, bytes);
    was = take(BASE, 0, n * acc_bytes, 0);
    fill_any(was, n, acc_bytes);
    for (int who = 0; who < 2; who++) {
        sp_combine_args a = {.acc = take(DST, who, n * acc_bytes, shift),
                             .x = x,
                             .n_elems = n,
                             .dtype = dtype,
                             .op = op,
                             .first = first};
        memcpy(a.acc, was, n * acc_bytes);
        (who == 0 ? sp_kernels_at(0) : k)->combine(&a);
    }
    CHECK(same(DST, n * acc_bytes), "%s combine %s op %d first=%d n=%zu shift=%zu", k->name,
          sp_dtype_name(dtype), (int)op, first, n, shift);
}
static void check_finish(const sp_kernels *k, spccl_dtype dtype, spccl_redop op, int world_size, size_t n)
{
    size_t bytes = sp_dtype_bytes(dtype), acc_bytes = sp_dtype_bytes(sp_acc_dtype(dtype)),
           shift = test_rand() % 64;
    bool in_place = bytes == acc_bytes && test_rand() % 2 != 0, non_temporal = test_rand() % 2 != 0;
    uint8_t *acc;
    at_end = (int)(test_rand() % 2);
    acc = take(X, 0, n * acc_bytes, test_rand() % 64);
    fill_any(acc, n, acc_bytes);
    for (int who = 0; who < 2; who++) {
        sp_finish_args a = {.acc = acc,
                            .dst = take(DST, who, n * bytes, shift),
                            .n_elems = n,
                            .dtype = dtype,
                            .op = op,
                            .world_size = world_size,
                            .non_temporal = non_temporal};
        if (in_place) {
            memcpy(a.dst, acc, n * bytes);
            a.acc = a.dst;
        }
        (who == 0 ? sp_kernels_at(0) : k)->finish(&a);
    }
    CHECK(same(DST, n * bytes), "%s finish %s op %d world=%d n=%zu shift=%zu in_place=%d", k->name,
          sp_dtype_name(dtype), (int)op, world_size, n, shift, in_place);
}
static void reduce_every_set(void)
{
    static const int worlds[] = {1, 2, 3, 7, 300};
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++)
        for (int t = SPCCL_FLOAT32; t <= SPCCL_UINT8; t++)
            for (int op = SPCCL_SUM; op <= SPCCL_PROD; op++)
                for (size_t i = 0; i < sizeof sizes / sizeof sizes[0] && t != SPCCL_FLOAT8; i++) {
                    check_combine(k, (spccl_dtype)t, (spccl_redop)op, false, sizes[i]);
                    check_combine(k, (spccl_dtype)t, (spccl_redop)op, true, sizes[i]);
                    check_finish(k, (spccl_dtype)t, (spccl_redop)op, worlds[i % 5], sizes[i]);
                }
}

/* The rules of spccl.h. Sums start from +0.0. MIN returns a NaN if there is one, and of equal zeros that of
 * the lowest rank. Integers wrap, and division rounds toward zero. */
static void reduce_rules(void)
{
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++) {
        float x[3] = {-0.0f, sp_f32_from_bits(0x7fc00123u), 1.0f}, acc[3];
        sp_combine_args a = {
            .acc = acc, .x = x, .n_elems = 3, .dtype = SPCCL_FLOAT32, .op = SPCCL_SUM, .first = true};
        k->combine(&a);
        CHECK(sp_f32_to_bits(acc[0]) == 0 && sp_f32_to_bits(acc[1]) == 0x7fc00123u && acc[2] == 1.0f, "%s",
              k->name);
        float lo[3] = {0.0f, 5.0f, 2.0f};
        a.acc = lo;
        a.op = SPCCL_MIN;
        a.first = false;
        k->combine(&a);
        CHECK(sp_f32_to_bits(lo[0]) == 0 && lo[1] != lo[1] && lo[2] == 1.0f, "%s: MIN", k->name);
        int8_t i8[2] = {127, -7}, one[2] = {1, 0}, avg[2];
        sp_combine_args b = {.acc = i8, .x = one, .n_elems = 2, .dtype = SPCCL_INT8, .op = SPCCL_SUM};
        k->combine(&b);
        CHECK(i8[0] == -128, "%s: int8 wraps", k->name);
        sp_finish_args f = {
            .acc = i8, .dst = avg, .n_elems = 2, .dtype = SPCCL_INT8, .op = SPCCL_AVG, .world_size = 2};
        k->finish(&f);
        CHECK(avg[0] == -64 && avg[1] == -3, "%s: %d %d", k->name, avg[0], avg[1]);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"reduce_rules", reduce_rules},
        {"reduce_every_set", reduce_every_set},
        {NULL, NULL},
    };
    arenas_make();
    return test_main(cases, argc, argv);
}
