/* kernels.h - declares every kernel of the CPU: sp_<format>_<operation>_<isa>. kernel_table.h explains the
 * arguments. dispatch.c checks that the CPU and the OS support an ISA before any kernel of that ISA runs. */
#ifndef SP_KERNELS_H
#define SP_KERNELS_H

#include "core/format/kernel_table.h"

#define SP_DECLARE_FORMAT(FORMAT, ISA)                                                                       \
    void sp_##FORMAT##_encode_##ISA(const sp_encode_args *a);                                                \
    void sp_##FORMAT##_set_##ISA(const sp_decode_args *a);                                                   \
    void sp_##FORMAT##_add_##ISA(const sp_decode_args *a);                                                   \
    void sp_##FORMAT##_overwrite_##ISA(const sp_decode_args *a);
#define SP_DECLARE_SET(ISA)                                                                                  \
    SP_DECLARE_FORMAT(tile, ISA)                                                                             \
    SP_DECLARE_FORMAT(pici, ISA)                                                                             \
    SP_DECLARE_FORMAT(coo, ISA)                                                                              \
    SP_DECLARE_FORMAT(dense, ISA)                                                                            \
    void sp_scan_##ISA(sp_scan_args *a);                                                                     \
    void sp_combine_##ISA(const sp_combine_args *a);                                                         \
    void sp_finish_##ISA(const sp_finish_args *a);                                                           \
    void sp_prune_##ISA(sp_prune_args *a);                                                                   \
    uint64_t sp_signs_send_##ISA(float *own, const float *shared, uint32_t n, float leak, uint8_t *row);     \
    void sp_signs_sum_##ISA(const sp_signs_sum_args *a);                                                     \
    void sp_signs_decode_##ISA(const uint8_t *row, float *out);                                              \
    void sp_delta_list_##ISA(sp_delta_list_args *a);                                                         \
    void sp_delta_pack_##ISA(uint8_t *dst, const uint16_t *numbers, uint32_t n, uint32_t bits,               \
                             uint16_t most);                                                                 \
    uint64_t sp_delta_sum_##ISA(const void *x, size_t n, size_t elem_bytes, uint64_t first, uint64_t key);   \
    void sp_copy_##ISA(void *dst, const void *src, size_t bytes, bool non_temporal);                         \
    void sp_zero_##ISA(void *dst, size_t bytes, bool non_temporal);

/* ---- scalar: the reference that the other sets must equal bit for bit ---- */
SP_DECLARE_SET(scalar)

#if SPCCL_KERNELS_X86
/* ---- AVX2 with BMI1, BMI2, POPCNT, LZCNT, F16C ---- */
SP_DECLARE_SET(avx2)

/* ---- AVX-512 F, BW, DQ, VL, VBMI, VBMI2, and all that the AVX2 kernels need ---- */
SP_DECLARE_SET(avx512)
#endif

#endif
