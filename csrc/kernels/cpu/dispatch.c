/* dispatch.c - the table of each kernel set, and the function that picks one.
 * Where a set has no function of its own, its table names the function of a slower set. */
#include "core/base/env.h"
#include "core/base/status.h"
#include "kernels/cpu/cpu_feature.h"
#include "kernels/cpu/kernels.h"

#include <stdio.h>
#include <string.h>

/* The three verbs of a format. */
#define VERBS(FORMAT, ISA)                                                                                   \
    {                                                                                                        \
        [SPCCL_SET] = sp_##FORMAT##_set_##ISA, [SPCCL_ADD] = sp_##FORMAT##_add_##ISA,                        \
        [SPCCL_OVERWRITE] = sp_##FORMAT##_overwrite_##ISA                                                    \
    }

/* One set. No set has a dense_encode, coo_add or coo_overwrite that is faster than the scalar one. */
#define KERNELS(ISA)                                                                                         \
    {                                                                                                        \
        .name = #ISA, .scan = sp_scan_##ISA,                                                                 \
        .encode = {[SPCCL_FORMAT_TILE] = sp_tile_encode_##ISA,                                               \
                   [SPCCL_FORMAT_PICI] = sp_pici_encode_##ISA,                                               \
                   [SPCCL_FORMAT_COO] = sp_coo_encode_##ISA,                                                 \
                   [SPCCL_FORMAT_DENSE] = sp_dense_encode_scalar},                                           \
        .decode = {[SPCCL_FORMAT_TILE] = VERBS(tile, ISA),                                                   \
                   [SPCCL_FORMAT_PICI] = VERBS(pici, ISA),                                                   \
                   [SPCCL_FORMAT_COO] = {[SPCCL_SET] = sp_coo_set_##ISA,                                     \
                                         [SPCCL_ADD] = sp_coo_add_scalar,                                    \
                                         [SPCCL_OVERWRITE] = sp_coo_overwrite_scalar},                       \
                   [SPCCL_FORMAT_DENSE] = VERBS(dense, ISA)},                                                \
        .combine = sp_combine_##ISA, .finish = sp_finish_##ISA, .copy = sp_copy_##ISA,                       \
        .zero = sp_zero_##ISA, .prune = sp_prune_##ISA, .signs_send = sp_signs_send_##ISA,                   \
        .signs_sum = sp_signs_sum_##ISA, .signs_decode = sp_signs_decode_##ISA,                              \
        .delta_list = sp_delta_list_##ISA, .delta_pack = sp_delta_pack_##ISA,                                \
        .delta_sum = sp_delta_sum_##ISA,                                                                     \
    }

static const sp_kernels scalar_kernels = KERNELS(scalar);
#if SPCCL_KERNELS_X86
static const sp_kernels avx2_kernels = KERNELS(avx2);
static const sp_kernels avx512_kernels = KERNELS(avx512);
#endif

static const char *scalar_lacks(void)
{
    return NULL;
}

/* Slowest first. */
static const struct {
    const sp_kernels *kernels;
    const char *(*lacks)(void);
    const char *about;
} sets[] = {
    {&scalar_kernels, scalar_lacks, "plain C, runs everywhere; the other sets give the same bits"},
#if SPCCL_KERNELS_X86
    {&avx2_kernels, sp_cpu_lacks_avx2, "AVX2, BMI2, F16C"},
    {&avx512_kernels, sp_cpu_lacks_avx512, "AVX-512 F, BW, DQ, VL, VBMI, VBMI2"},
#endif
};
#define N_SETS (sizeof sets / sizeof sets[0])

bool sp_kernels_describe(size_t i, sp_kernels_info *out)
{
    const char *lacks;
    if (i >= N_SETS)
        return false;
    lacks = sets[i].lacks();
    out->name = sets[i].kernels->name;
    out->usable = lacks == NULL;
    out->why = lacks == NULL ? sets[i].about : lacks;
    return true;
}

const sp_kernels *sp_kernels_at(size_t i)
{
    for (size_t s = 0; s < N_SETS; s++)
        if (sets[s].lacks() == NULL && i-- == 0)
            return sets[s].kernels;
    return NULL;
}

/* Writes ", scalar, avx2" and so on: the names that SPCCL_DEBUG_CPU_ISA may have here, besides "auto". */
static void list_usable(char *text, size_t cap)
{
    const sp_kernels *k;
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; (k = sp_kernels_at(i)) != NULL && used < cap; i++)
        used += (size_t)snprintf(text + used, cap - used, ", %s", k->name);
}

spccl_status sp_kernels_pick(const sp_kernels **out)
{
    const char *want = sp_env_text(SP_ENV_CPU_ISA);
    char usable[128];
    if (strcmp(want, "auto") == 0) {
        for (size_t s = N_SETS; s-- > 0;) {
            if (sets[s].lacks() == NULL) {
                *out = sets[s].kernels;
                return SPCCL_OK;
            }
        }
    }
    list_usable(usable, sizeof usable);
    for (size_t s = 0; s < N_SETS; s++) {
        if (strcmp(want, sets[s].kernels->name) != 0)
            continue;
        if (sets[s].lacks() != NULL)
            return SP_FAIL(SPCCL_ERR_SETTING,
                           "SPCCL_DEBUG_CPU_ISA=%s: cannot run here (%s); use one of: auto%s", want,
                           sets[s].lacks(), usable);
        *out = sets[s].kernels;
        return SPCCL_OK;
    }
    return SP_FAIL(SPCCL_ERR_SETTING, "SPCCL_DEBUG_CPU_ISA=\"%s\": no such kernel set; use one of: auto%s",
                   want, usable);
}
