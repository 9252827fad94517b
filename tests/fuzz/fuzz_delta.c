/* fuzz_delta.c - takes any bytes as a frame of version 2. No access may be out of bounds; inspect, check and apply must
 * agree; undo must restore what apply wrote, and the sum change must be that of the checksums. */
#include "core/base/delta_rule.h"
#include "fuzz.h"

#define DST_BYTES_MAX ((size_t)1 << 22) /* frames of more elements are not applied */
#define KEY 99u

static uint64_t sum_of(const void *x, uint64_t n, spccl_dtype dtype)
{
    uint64_t sum;
    EXPECT(spccl_delta_checksum(x, n, dtype, 0, KEY, &sum) == SPCCL_OK);
    return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    spccl_frame_info info = {.struct_bytes = sizeof info};
    spccl_delta_place place = {NULL, 1, 0, 1, 0, 0, 0};
    spccl_delta_target t = {data, bytes, 0, 0, &place, 1, KEY, SPCCL_UINT8, 0};
    size_t old_bytes = 0;
    uint64_t sum, before;
    void *dst, *was, *old;

    if (bytes < 5 || data[4] != SP_DELTA_VERSION || spccl_frame_inspect(data, bytes, &info) != SPCCL_OK ||
        info.frame_bytes != bytes) {
        if (bytes >=
            SP_DELTA_HEADER_BYTES) { /* the right length and dtype, so that the frame is the reason */
            t.n_elems = sp_load_le64(data + 8);
            t.dtype = (spccl_dtype)data[6];
        }
        EXPECT(spccl_delta_check(&t, 1, NULL, 0, &sum, NULL) != SPCCL_OK);
        EXPECT(spccl_delta_apply(&t, 1) != SPCCL_OK && spccl_last_error()[0] != '\0');
        return 0;
    }
    t.n_elems = info.n_elems;
    t.dtype = info.dtype;
    if (info.n_elems > DST_BYTES_MAX / 8)
        return 0;
    const size_t dst_bytes = info.n_elems * spccl_dtype_bytes(info.dtype);
    dst = malloc(dst_bytes + 1), was = malloc(dst_bytes + 1);
    EXPECT(dst != NULL && was != NULL);
    memset(dst, 0x5a, dst_bytes), memset(was, 0x5a, dst_bytes);
    place = (spccl_delta_place){dst, info.n_elems + 1, 0, 1, 0, info.n_elems, 0};
    before = sum_of(dst, info.n_elems, info.dtype);
    EXPECT(spccl_delta_check(&t, 1, NULL, 0, NULL, &old_bytes) == SPCCL_OK);
    old = malloc(old_bytes + 1);
    EXPECT(old != NULL && spccl_delta_check(&t, 1, old, old_bytes, &sum, NULL) == SPCCL_OK);
    EXPECT(memcmp(dst, was, dst_bytes) == 0);
    EXPECT(spccl_delta_apply(&t, 1) == SPCCL_OK);
    EXPECT(sum_of(dst, info.n_elems, info.dtype) == before + sum);
    EXPECT(spccl_delta_undo(&t, 1, old, old_bytes) == SPCCL_OK);
    EXPECT(memcmp(dst, was, dst_bytes) == 0);
    free(dst), free(was), free(old);
    return 0;
}

/* ---- a mutator that repairs the header: random bytes would nearly always fail there ---- */

#ifdef SPCCL_LIBFUZZER
size_t LLVMFuzzerMutate(uint8_t *data, size_t bytes, size_t bytes_max);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t bytes, size_t bytes_max, unsigned seed);

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t bytes, size_t bytes_max, unsigned seed)
{
    uint64_t n, nnz = 0, n_slices;

    bytes = LLVMFuzzerMutate(data, bytes, bytes_max);
    if (seed % 4 == 0 || bytes < SP_DELTA_HEADER_BYTES + SP_DELTA_ENTRY_BYTES)
        return bytes; /* invalid headers are tried too */
    memcpy(data, "SPCF\2\5", 6);
    data[6] = (uint8_t)(1 + data[6] % 10);
    data[7] = 1;
    n = 1 + sp_load_le64(data + 8) % 140000;
    n_slices = sp_delta_n_slices(n);
    bytes = bytes / 8 * 8;
    if (bytes < SP_DELTA_HEADER_BYTES + n_slices * SP_DELTA_ENTRY_BYTES)
        return bytes;
    for (uint64_t s = 0; s < n_slices; s++)
        nnz += sp_load_le32(data + SP_DELTA_HEADER_BYTES + s * SP_DELTA_ENTRY_BYTES) & SP_DELTA_COUNT_MASK;
    sp_store_le64(data + 8, n);
    sp_store_le64(data + 16, nnz);
    sp_store_le64(data + 24, bytes);
    sp_store_le32(data + SP_DELTA_HEADER_BYTES + 4,
                  (uint32_t)(SP_DELTA_HEADER_BYTES + n_slices * SP_DELTA_ENTRY_BYTES) / 4);
    return bytes;
}
#endif
