/* fuzz_roundtrip.c - makes an array and options from the input: encodes, checks, decodes and compares. Every
 * usable kernel set must give the same bytes as the scalar one.
 *
 * The input is 8 bytes of options, then commands of 4 bytes that fill the array: skip u16, run u8, value u8.
 *   0  u8   dtype
 *   1  u8   format
 *   2  u8   flags: bit 0 base, bit 1 small slices, bits 2-4 misalignment
 *   3  u8   format in which the kernel sets are compared
 *   4  u16  n_elems
 *   6  u16  seed of the values */
#include "core/base/dtype.h"
#include "core/format/codec.h"
#include "fuzz.h"

#define N_MAX 8500u /* two pici tiles and a part; more would only make each run slower */

struct input {
    spccl_dtype dtype;
    spccl_encode_options options;
    size_t n, eb, bytes, shift;
    uint8_t *x_mem, *base_mem, *x,
        *base; /* x and base point `shift` bytes into memory of exactly bytes + shift */
};

/* Values are the command's byte plus a counter, so that neighbours differ. Some bytes are zero. */
static void fill(uint8_t *x, size_t n, size_t eb, const uint8_t *commands, size_t command_bytes,
                 unsigned seed)
{
    size_t at = 0;

    for (size_t c = 0; c + 4 <= command_bytes; c += 4) {
        at += sp_load_le16(commands + c);
        for (size_t i = 0; i < (size_t)commands[c + 2] + 1 && at < n; i++, at++) {
            for (size_t b = 0; b < eb; b++)
                x[at * eb + b] = (uint8_t)(b + 1 == eb ? commands[c + 3] : (seed += 2654435769u) >> 24);
        }
    }
}

static int read_input(const uint8_t *data, size_t bytes, struct input *in)
{
    size_t half;

    if (bytes < 8)
        return 0;
    *in = (struct input){.dtype = (spccl_dtype)(1 + data[0] % 10), .options = SPCCL_ENCODE_OPTIONS_INIT};
    in->options.format = (spccl_format)(data[1] % 6 - 1);
    in->options.slice_elems = (data[2] & 2) != 0 ? 4096 : 0;
    in->shift = data[2] >> 2 & 7;
    in->n = sp_load_le16(data + 4) % N_MAX;
    in->eb = sp_dtype_bytes(in->dtype);
    in->bytes = in->n * in->eb;
    in->x_mem = calloc(1, in->bytes + in->shift + 1);
    in->base_mem = calloc(1, in->bytes + in->shift + 1);
    EXPECT(in->x_mem != NULL && in->base_mem != NULL);
    in->x = in->x_mem + in->shift;
    in->base = in->base_mem + in->shift;
    half = (bytes - 8) / 8 * 4;
    if ((data[2] & 1) != 0) { /* all commands fill base and x; then the second half changes x */
        fill(in->base, in->n, in->eb, data + 8, bytes - 8, sp_load_le16(data + 6));
        memcpy(in->x, in->base, in->bytes);
        fill(in->x, in->n, in->eb, data + 8 + half, bytes - 8 - half, sp_load_le16(data + 6) + 1u);
        in->options.base = in->base;
    } else {
        fill(in->x, in->n, in->eb, data + 8, bytes - 8, sp_load_le16(data + 6));
    }
    return 1;
}

/* Encode and decode with the public functions: the result is x, bit for bit. */
static void round_trip(const struct input *in)
{
    size_t cap = spccl_encode_bound(in->n, in->dtype, &in->options), bytes = 0, total = 0;
    uint8_t *encoded = malloc(cap), *dst = malloc(in->bytes + 1);
    spccl_status st;

    EXPECT(cap >= 64 && encoded != NULL && dst != NULL);
    st = spccl_encode(in->x, in->n, in->dtype, &in->options, encoded, cap, &bytes);
    if (st == SPCCL_ERR_UNSUPPORTED) {
        spccl_format f = in->options.format;
        EXPECT(f == SPCCL_FORMAT_EMPTY || f == SPCCL_FORMAT_TILE || f == SPCCL_FORMAT_DENSE);
    } else {
        EXPECT(st == SPCCL_OK && bytes <= cap);
        for (size_t at = 0; at < bytes;) {
            spccl_frame_info info = {.struct_bytes = sizeof info};
            EXPECT(spccl_frame_inspect(encoded + at, bytes - at, &info) == SPCCL_OK);
            at += info.frame_bytes;
            total += info.n_elems;
        }
        EXPECT(total == in->n);
        memset(dst, 0x5a, in->bytes);
        if (in->options.base == NULL)
            EXPECT(spccl_decode(encoded, bytes, SPCCL_SET, dst, in->n, in->dtype) == SPCCL_OK);
        else
            memcpy(dst, in->base, in->bytes);
        EXPECT(spccl_decode(encoded, bytes, SPCCL_OVERWRITE, dst, in->n, in->dtype) == SPCCL_OK);
        EXPECT(memcmp(dst, in->x, in->bytes) == 0);
    }
    free(encoded);
    free(dst);
}

/* A frame made by one kernel set, in memory of exactly its size. NULL if the slice cannot take the format. */
static uint8_t *frame_of(const sp_kernels *k, const struct input *in, spccl_format format, size_t *out_bytes)
{
    sp_codec *codec;
    sp_slice_stats s;
    uint8_t *p = NULL;
    bool is_delta = in->options.base != NULL;

    EXPECT(sp_codec_create(k, in->n, &codec) == SPCCL_OK);
    sp_codec_scan(codec, in->x, in->options.base, in->n, in->dtype, &s);
    if (sp_codec_allows(&s, format, is_delta)) {
        *out_bytes = sp_frame_bytes(format, in->n, s.nnz, in->eb);
        p = malloc(*out_bytes);
        EXPECT(p != NULL);
        memset(p, 0xee, *out_bytes);
        sp_codec_write(codec, in->x, in->n, in->dtype, format, is_delta, s.nnz, p);
    }
    sp_codec_destroy(codec);
    return p;
}

static uint8_t *applied(const sp_kernels *k, const sp_frame *f, spccl_verb verb, size_t bytes)
{
    uint8_t *dst = malloc(bytes + 1);

    EXPECT(dst != NULL);
    for (size_t i = 0; i < bytes; i++)
        dst[i] = (uint8_t)(i % 251);
    EXPECT(sp_codec_apply(k, f, verb, dst, f->dtype, false) == SPCCL_OK);
    return dst;
}

static void compare_sets(const struct input *in, spccl_format format)
{
    const sp_kernels *scalar = sp_kernels_at(0), *k;
    size_t bytes = 0, k_bytes = 0;
    uint8_t *want = frame_of(scalar, in, format, &bytes);
    sp_frame f;

    if (want != NULL)
        EXPECT(sp_frame_validate(want, bytes, &f) == SPCCL_OK);
    for (size_t i = 1; (k = sp_kernels_at(i)) != NULL; i++) {
        uint8_t *got = frame_of(k, in, format, &k_bytes);
        EXPECT((got == NULL) == (want == NULL));
        EXPECT(got == NULL || (k_bytes == bytes && memcmp(got, want, bytes) == 0));
        free(got);
        for (int v = SPCCL_SET; want != NULL && v <= SPCCL_OVERWRITE; v++) {
            uint8_t *a, *b;
            if ((v == SPCCL_SET && f.is_delta) || (v == SPCCL_ADD && f.dtype == SPCCL_FLOAT8))
                continue;
            a = applied(scalar, &f, (spccl_verb)v, in->bytes);
            b = applied(k, &f, (spccl_verb)v, in->bytes);
            EXPECT(memcmp(a, b, in->bytes) == 0);
            free(a);
            free(b);
        }
    }
    free(want);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct input in;

    if (!read_input(data, bytes, &in))
        return 0;
    round_trip(&in);
    compare_sets(&in, (spccl_format)(SPCCL_FORMAT_TILE + data[3] % 4));
    free(in.x_mem);
    free(in.base_mem);
    return 0;
}
