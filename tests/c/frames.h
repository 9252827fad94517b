/* frames.h - frames for the tests of core/format/format.c. */
#ifndef SP_TEST_FRAMES_H
#define SP_TEST_FRAMES_H

#include "core/base/dtype.h"
#include "core/format/codec.h"
#include "test.h"

static const spccl_format formats[] = {SPCCL_FORMAT_EMPTY, SPCCL_FORMAT_TILE, SPCCL_FORMAT_PICI,
                                       SPCCL_FORMAT_COO, SPCCL_FORMAT_DENSE};
#define N_FORMATS (sizeof formats / sizeof *formats)

/* A frame in memory of exactly its size: the address sanitizer then finds any read past its end. */
struct buf {
    uint8_t *p;
    size_t bytes;
};

static inline struct buf encode(spccl_format format, const void *x, size_t n, spccl_dtype dtype,
                                const void *base)
{
    spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
    size_t cap, bytes = 0;
    struct buf b;
    uint8_t *tmp;

    o.format = format;
    o.base = base;
    o.slice_elems = (uint32_t)sp_align_up(n != 0 ? n : 1, 4096); /* one frame */
    cap = spccl_encode_bound(n, dtype, &o);
    tmp = malloc(cap);
    CHECK_OK(spccl_encode(x, n, dtype, &o, tmp, cap, &bytes));
    b.p = malloc(bytes);
    b.bytes = bytes;
    memcpy(b.p, tmp, bytes);
    free(tmp);
    return b;
}

/* An array [n] with one nonzero in `every` elements on average (0: no nonzeros). In no block of 256 are all
 * elements nonzero. */
static inline uint8_t *sparse_array(size_t n, size_t elem_bytes, unsigned every)
{
    uint8_t *x = calloc(n != 0 ? n : 1, elem_bytes);
    for (size_t i = 0; i < n; i++) {
        if (every != 0 && test_rand() % every == 0 && i % 256 != 77)
            x[i * elem_bytes + test_rand() % elem_bytes] = (uint8_t)(1 + i % 251);
    }
    return x;
}

static inline struct buf sparse_frame(spccl_format format, size_t n, spccl_dtype dtype, unsigned every)
{
    uint8_t *x = sparse_array(n, sp_dtype_bytes(dtype), format == SPCCL_FORMAT_EMPTY ? 0 : every);
    struct buf b = encode(format, x, n, dtype, NULL);
    free(x);
    return b;
}

#endif
