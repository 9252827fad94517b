/* test_golden.c - the golden files, which the second implementation made (tests/golden/make.py). Every good
 * encoded array gives the expected bytes with every verb. Every bad one is refused with the right status. */
#include "core/base/dtype.h"
#include "core/format/codec.h"
#include "records.h"
#include "test.h"

#define GOLDEN SPCCL_TEST_SOURCE_DIR "/tests/golden/"

/* Inspect all frames. Returns the status of the first frame that is refused; or OK, the dtype of the first
 * frame and the number of elements of all. */
static spccl_status walk(const struct record *s, spccl_dtype *dtype, size_t *n_elems)
{
    *n_elems = 0;
    for (size_t at = 0; at < s->bytes;) {
        spccl_frame_info info = {.struct_bytes = sizeof info};
        spccl_status st = spccl_frame_inspect(s->p + at, s->bytes - at, &info);
        if (st != SPCCL_OK)
            return st;
        if (at == 0)
            *dtype = info.dtype;
        *n_elems += info.n_elems;
        at += info.frame_bytes;
    }
    return SPCCL_OK;
}

static size_t n_arrays, n_expected;

/* NAME is an array; the records NAME.VERB after it are what decoding it gives. */
static void check_good(const struct record *s)
{
    static const char *const verbs[] = {".set", ".add", ".overwrite"};
    static uint8_t *encoded; /* exactly `bytes` */
    static spccl_dtype dtype;
    static size_t bytes, n;
    const char *dot = strchr(s->name, '.');
    uint8_t *dst;
    int verb = 0;

    if (dot == NULL) {
        n_arrays++;
        bytes = s->bytes;
        encoded = memcpy(realloc(encoded, bytes), s->p, bytes);
        CHECK(walk(s, &dtype, &n) == SPCCL_OK, "%s: %s", s->name, spccl_last_error());
        return;
    }
    n_expected++;
    while (verb < SPCCL_OVERWRITE && strcmp(dot, verbs[verb]) != 0)
        verb++;
    CHECK(s->bytes == n * spccl_dtype_bytes(dtype), "%s: %zu bytes for %zu elements", s->name, s->bytes, n);
    dst = malloc(s->bytes != 0 ? s->bytes : 1);
    for (size_t i = 0; i < s->bytes; i++)
        dst[i] = (uint8_t)(i % 251);
    CHECK(spccl_decode(encoded, bytes, (spccl_verb)verb, dst, n, dtype) == SPCCL_OK, "%s: %s", s->name,
          spccl_last_error());
    CHECK(memcmp(dst, s->p, s->bytes) == 0, "%s: other bytes", s->name);
    free(dst);
}

static void check_bad(const struct record *s)
{
    int rule = (s->name[1] - '0') * 10 + s->name[2] - '0';
    spccl_status want = rule == 3 ? SPCCL_ERR_VERSION : rule >= 29 ? SPCCL_ERR_FRAME : SPCCL_ERR_FORMAT;
    spccl_status st;
    spccl_dtype dtype = SPCCL_FLOAT32;
    size_t n = 0;
    float dst[10] = {0};
    uint8_t *big;

    st = spccl_decode(s->p, s->bytes, SPCCL_SET, dst, 10, SPCCL_FLOAT32);
    CHECK(rule <= 28 ? st != SPCCL_OK : st == want, "%s: %s", s->name, spccl_status_name(st));
    st = walk(s, &dtype, &n); /* n: elements of the frames before the bad one */
    CHECK(st == (rule >= 28 ? SPCCL_OK : want), "%s: %s", s->name, spccl_status_name(st));
    if (rule >= 29)
        return;
    /* An array long enough for any frame here, so that the frame and not the array is the reason. */
    big = calloc(8192, 4);
    st = spccl_decode(s->p, s->bytes, SPCCL_SET, big, 8192, SPCCL_FLOAT32);
    CHECK(st == want, "%s: %s: %s", s->name, spccl_status_name(st), spccl_last_error());
    for (size_t i = n * 4; i < (size_t)8192 * 4; i++)
        CHECK(big[i] == 0, "%s: byte %zu written from a bad frame", s->name, i);
    free(big);
}

static void test_good(void)
{
    size_t n = each_record(GOLDEN "good.hex", check_good);
    CHECK(n == n_arrays + n_expected, "good.hex was read to record %zu", n_arrays + n_expected);
    CHECK(n_arrays >= 60, "%zu good arrays", n_arrays);
    CHECK(n_expected >= 2 * n_arrays, "%zu expectations for %zu arrays", n_expected, n_arrays);
}

static void test_bad(void)
{
    size_t n = each_record(GOLDEN "bad.hex", check_bad);
    CHECK(n >= 50, "%zu bad arrays", n);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"good", test_good}, {"bad", test_bad}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
