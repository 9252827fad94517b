/* fuzz_decode.c - takes any bytes as an encoded array. It inspects the array frame by frame, and decodes it
 * with every verb, to memory of the right size and of wrong sizes. No access may be out of bounds, and
 * inspect and decode must agree. Built as a libFuzzer target (SPCCL_FUZZ) and, with replay.c, as a test over
 * the committed corpus. */
#include "core/base/dtype.h"
#include "core/format/format.h"
#include "fuzz.h"

/* Arrays that may be larger are not decoded: an empty frame of 2^31 elements has only 64 bytes. */
#define DST_BYTES_MAX ((size_t)1 << 22)

struct walk {
    spccl_status st;
    spccl_dtype dtype; /* of the first frame */
    size_t n_frames, n_elems;
    int has_delta, mixes_dtypes, has_version_2;
};

static struct walk walk(const uint8_t *p, size_t bytes)
{
    struct walk w = {.dtype = SPCCL_FLOAT32};

    for (size_t at = 0; at < bytes;) {
        spccl_frame_info info = {.struct_bytes = sizeof info};
        w.st = spccl_frame_inspect(p + at, bytes - at, &info);
        if (w.st != SPCCL_OK)
            return w;
        EXPECT(info.frame_bytes <= bytes - at);
        EXPECT(info.version == 2 ? info.frame_bytes >= 32 && info.frame_bytes % 8 == 0
                                 : info.frame_bytes >= 64 && info.frame_bytes % 16 == 0);
        EXPECT(info.index_off < info.frame_bytes + 1 && info.meta_off < info.frame_bytes + 1);
        EXPECT(info.values_off < info.frame_bytes + 1 && info.nnz <= info.n_elems);
        if (w.n_frames++ == 0)
            w.dtype = info.dtype;
        w.mixes_dtypes |= info.dtype != w.dtype;
        w.has_version_2 |= info.version == 2;
        w.has_delta |= (int)info.is_delta;
        w.n_elems += info.n_elems;
        at += info.frame_bytes;
    }
    return w;
}

static spccl_status decode(const uint8_t *p, size_t bytes, spccl_verb verb, size_t n_elems, spccl_dtype dtype)
{
    size_t dst_bytes = n_elems * spccl_dtype_bytes(dtype);
    uint8_t *dst = malloc(dst_bytes != 0 ? dst_bytes : 1);
    spccl_status st;

    EXPECT(dst != NULL);
    memset(dst, 0x5a, dst_bytes);
    st = spccl_decode(p, bytes, verb, dst, n_elems, dtype);
    if (st != SPCCL_OK)
        EXPECT(spccl_last_error()[0] != '\0');
    free(dst);
    return st;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct walk w = walk(data, bytes);

    if (w.n_elems > DST_BYTES_MAX / 8)
        return 0;
    for (int v = SPCCL_SET; v <= SPCCL_OVERWRITE; v++) {
        spccl_verb verb = (spccl_verb)v;
        spccl_status st = decode(data, bytes, verb, w.n_elems, w.dtype);
        int is_good = w.st == SPCCL_OK && w.n_frames != 0 && !w.mixes_dtypes && !w.has_version_2 &&
                      !(verb == SPCCL_SET && w.has_delta) && !(verb == SPCCL_ADD && w.dtype == SPCCL_FLOAT8);
        EXPECT((st == SPCCL_OK) == is_good);
        EXPECT(decode(data, bytes, verb, w.n_elems + 1, w.dtype) != SPCCL_OK);
        if (w.n_elems != 0)
            EXPECT(decode(data, bytes, verb, w.n_elems - 1, w.dtype) != SPCCL_OK);
    }
    return 0;
}

/* ---- a mutator that writes valid headers: random bytes would nearly always fail in the header check ---- */

#ifdef SPCCL_LIBFUZZER
size_t LLVMFuzzerMutate(uint8_t *data, size_t bytes, size_t bytes_max);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t bytes, size_t bytes_max, unsigned seed);

static const size_t elem_counts[] = {1, 2, 255, 256, 257, 300, 4095, 4096, 4097, 8200};

/* Make the header of the frame at p valid, and zero the padding. Returns the size of the frame, or 0 if it is
 * larger than `capacity`. */
static size_t repair(uint8_t *p, size_t capacity)
{
    spccl_format format = (spccl_format)(p[5] % SPCCL_N_FORMATS);
    spccl_dtype dtype = (spccl_dtype)(1 + p[6] % 10);
    size_t n = sp_load_le64(p + 8), nnz = sp_load_le64(p + 16);
    sp_frame_layout l;

    n = n == 0 || n > 20000 ? elem_counts[n % (sizeof elem_counts / sizeof *elem_counts)] : n;
    nnz = format == SPCCL_FORMAT_DENSE ? n : format == SPCCL_FORMAT_EMPTY ? 0 : nnz % (n + 1);
    sp_frame_layout_of(format, n, nnz, sp_dtype_bytes(dtype), &l);
    if (l.frame_bytes > capacity)
        return 0;
    sp_frame_write_header(p, format, dtype, (p[7] & 1) != 0 && format != SPCCL_FORMAT_DENSE, n, nnz, &l);
    return l.frame_bytes;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t bytes, size_t bytes_max, unsigned seed)
{
    size_t frame_bytes;

    bytes = LLVMFuzzerMutate(data, bytes, bytes_max);
    if (seed % 4 == 0 || bytes < SP_FRAME_HEADER_BYTES)
        return bytes; /* invalid headers are tried too */
    memset(data + bytes, 0, bytes_max - bytes);
    frame_bytes = repair(data, bytes_max);
    return frame_bytes > bytes || (frame_bytes != 0 && seed % 4 == 1) ? frame_bytes : bytes;
}
#endif
