/* delta_scalar.c - deltas (delta_rule.h): lists what a scan found, packs numbers, sums hashes.
 * The vector kernels must give the same results as this code. */
#include "kernels/cpu/delta_loops.h"

#define DELTA_GATHER(NAME)                                                                                   \
    static void gather_##NAME(void *to, const void *x, const uint16_t *place, uint32_t n)                    \
    {                                                                                                        \
        for (uint32_t i = 0; i < n; i++)                                                                     \
            sp_put_##NAME(to, i, sp_get_##NAME(x, place[i]));                                                \
    }
DELTA_GATHER(u8)
DELTA_GATHER(u16)
DELTA_GATHER(u32)
DELTA_GATHER(u64)

void sp_delta_list_scalar(sp_delta_list_args *a)
{
    uint64_t old[SP_DELTA_RUN];
    uint32_t n = 0;

    memset(a->escaped, 0, sizeof a->escaped);
    a->sum_change = 0;
    for (uint32_t w = 0; w * 64 < a->n_elems; w++)
        for (uint64_t bits = a->mask[w]; bits != 0; bits &= bits - 1)
            a->place[n++] = (uint16_t)(w * 64 + sp_ctz64(bits));
    SP_BY_WIDTH(a->elem_bytes, gather, a->values, a->x, a->place, n);
    for (uint32_t j = 0; j < n; j += SP_DELTA_RUN) {
        uint32_t run = n - j < SP_DELTA_RUN ? n - j : SP_DELTA_RUN;
        SP_BY_WIDTH(a->elem_bytes, gather, old, a->base, a->place + j, run);
        SP_BY_WIDTH(a->elem_bytes, delta_changes, a, j, run, old);
        delta_count(a->number + j, run, a->escaped);
    }
}

void sp_delta_pack_scalar(uint8_t *dst, const uint16_t *numbers, uint32_t n, uint32_t bits, uint16_t most)
{
    const uint32_t mask = (1u << bits) - 1;
    uint64_t word = 0;
    uint32_t filled = 0; /* bits of `word`, below 32 */

    for (uint32_t j = 0; j < n; j++) {
        word |= (uint64_t)((numbers[j] < most ? numbers[j] : most) & mask) << filled;
        filled += bits;
        if (filled >= 32) {
            sp_store_le32(dst, (uint32_t)word);
            dst += 4;
            word >>= 32;
            filled -= 32;
        }
    }
    sp_store_le32(dst, (uint32_t)word);
}

uint64_t sp_delta_sum_scalar(const void *x, size_t n, size_t elem_bytes, uint64_t first, uint64_t key)
{
    uint64_t sum;
    SP_BY_WIDTH(elem_bytes, delta_sum, x, n, first, key, &sum);
    return sum;
}
