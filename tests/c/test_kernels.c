/* test_kernels.c - which kernel sets there are and how one is chosen; copy and zero of every set. The other
 * kernels have tests of their own: test_kernels_codec.c, test_kernels_reduce.c, test_prune_kernels.c. */
#include "core/base/status.h"
#include "kernel_data.h"

/* ---- choosing ---- */

static void choosing(void)
{
    const sp_kernels *k = NULL, *last = NULL, *kept;
    sp_kernels_info info;
    size_t n_usable = 0;
    for (size_t i = 0; (k = sp_kernels_at(i)) != NULL; i++)
        last = k;
    CHECK(sp_kernels_at(0) != NULL && strcmp(sp_kernels_at(0)->name, "scalar") == 0, "first set");
    unsetenv("SPCCL_DEBUG_CPU_ISA");
    CHECK_OK(sp_kernels_pick(&k));
    CHECK(k == last, "auto is %s, wanted %s", k->name, last->name);
    for (size_t i = 0; sp_kernels_describe(i, &info); i++) {
        setenv("SPCCL_DEBUG_CPU_ISA", info.name, 1);
        kept = k;
        spccl_status st = sp_kernels_pick(&k);
        n_usable += info.usable;
        printf("set %s: %s (%s)\n", info.name, info.usable ? "usable" : "absent", info.why);
        if (info.usable) {
            CHECK(st == SPCCL_OK && strcmp(k->name, info.name) == 0, "forcing %s", info.name);
        } else {
            CHECK(st == SPCCL_ERR_SETTING && k == kept, "forcing %s", info.name);
            CHECK(strstr(spccl_last_error(), info.why) != NULL, "text: %s", spccl_last_error());
        }
    }
    CHECK(sp_kernels_at(n_usable) == NULL && sp_kernels_at(n_usable - 1) == last, "%zu usable", n_usable);
    setenv("SPCCL_DEBUG_CPU_ISA", "sse9", 1);
    CHECK(sp_kernels_pick(&k) == SPCCL_ERR_SETTING, "an unknown set was accepted");
    CHECK(strstr(spccl_last_error(), "sse9") != NULL && strstr(spccl_last_error(), "scalar") != NULL,
          "text: %s", spccl_last_error());
    unsetenv("SPCCL_DEBUG_CPU_ISA");
}

static void no_entry_missing(void)
{
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++) {
        CHECK(k->scan && k->combine && k->finish && k->copy && k->zero, "%s", k->name);
        for (int f = SPCCL_FORMAT_TILE; f <= SPCCL_FORMAT_DENSE; f++)
            CHECK(k->encode[f] && k->decode[f][0] && k->decode[f][1] && k->decode[f][2], "%s format %d",
                  k->name, f);
        CHECK(!k->encode[0] && !k->decode[0][0] && !k->decode[0][1] && !k->decode[0][2], "%s: empty",
              k->name);
    }
}

/* ---- copy, zero ---- */

static void bulk_every_set(void)
{
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++) {
        for (int i = 0; i < 400; i++) {
            size_t bytes = (size_t)(test_rand() % (i % 8 == 0 ? 600000 : i % 2 == 0 ? 300 : 20000));
            size_t shift = test_rand() % 80;
            bool non_temporal = test_rand() % 2 != 0;
            at_end = (int)(test_rand() % 2);
            uint8_t *src = take(X, 0, bytes, test_rand() % 80), *dst = take(DST, 0, bytes, shift);
            for (size_t j = 0; j < bytes; j++)
                src[j] = (uint8_t)(j % 251);
            k->copy(dst, src, bytes, non_temporal);
            CHECK(guards_whole(DST, 0) && memcmp(src, dst, bytes) == 0, "%s copy %zu shift %zu", k->name,
                  bytes, shift);
            k->zero(dst, bytes, non_temporal);
            size_t j = 0;
            while (j < bytes && dst[j] == 0)
                j++;
            CHECK(guards_whole(DST, 0) && j == bytes, "%s zero %zu shift %zu: byte %zu", k->name, bytes,
                  shift, j);
        }
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"choosing", choosing},
        {"no_entry_missing", no_entry_missing},
        {"bulk_every_set", bulk_every_set},
        {NULL, NULL},
    };
    arenas_make();
    return test_main(cases, argc, argv);
}
