/* test_golden.c - the golden files, which the second implementation made (tests/golden/make.py). Every good
 * encoded array gives the expected bytes with every verb. Every bad one is refused with the right status. */
#include "core/base/dtype.h"
#include "core/format/codec.h"
#include "test.h"

#include <dirent.h>

#define GOLDEN SPCCL_TEST_SOURCE_DIR "/tests/golden/"

struct file {
    char name[128]; /* without folder and ".bin" */
    uint8_t *p;     /* memory of exactly `bytes` */
    size_t bytes;
};

/* Returns 0 if there is no such file. */
static int read_file(const char *folder, const char *name, const char *suffix, struct file *out)
{
    char path[2048];
    FILE *f;
    long end;

    snprintf(path, sizeof path, "%s%s/%s%s", GOLDEN, folder, name, suffix);
    f = fopen(path, "rb");
    if (f == NULL)
        return 0;
    fseek(f, 0, SEEK_END);
    end = ftell(f);
    rewind(f);
    out->bytes = end > 0 ? (size_t)end : 0;
    out->p = malloc(out->bytes != 0 ? out->bytes : 1);
    CHECK(fread(out->p, 1, out->bytes, f) == out->bytes, "reading %s", path);
    snprintf(out->name, sizeof out->name, "%s", name);
    fclose(f);
    return 1;
}

/* Call fn on every NAME.bin of a folder. Returns the number of files. */
static size_t each_bin(const char *folder, void (*fn)(const struct file *encoded))
{
    char path[2048], name[256];
    struct dirent *e;
    size_t n = 0;
    DIR *d;

    snprintf(path, sizeof path, "%s%s", GOLDEN, folder);
    d = opendir(path);
    CHECK(d != NULL, "cannot open %s", path);
    while (d != NULL && (e = readdir(d)) != NULL) {
        struct file encoded;
        char *dot;
        snprintf(name, sizeof name, "%s", e->d_name);
        dot = strrchr(name, '.');
        if (dot == NULL || strcmp(dot, ".bin") != 0)
            continue;
        *dot = '\0';
        n++;
        if (read_file(folder, name, ".bin", &encoded)) {
            fn(&encoded);
            free(encoded.p);
        }
    }
    if (d != NULL)
        closedir(d);
    return n;
}

/* Inspect all frames. Returns the status of the first frame that is refused; or OK, the dtype of the first
 * frame and the number of elements of all. */
static spccl_status walk(const struct file *s, spccl_dtype *dtype, size_t *n_elems)
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

static size_t n_expected;

static void check_good(const struct file *s)
{
    static const char *const suffix[] = {".set", ".add", ".overwrite"};
    spccl_dtype dtype = SPCCL_FLOAT32;
    size_t n = 0;

    CHECK(walk(s, &dtype, &n) == SPCCL_OK, "%s: %s", s->name, spccl_last_error());
    for (int verb = SPCCL_SET; verb <= SPCCL_OVERWRITE; verb++) {
        struct file want;
        uint8_t *dst;
        spccl_status st;
        if (!read_file("good", s->name, suffix[verb], &want))
            continue;
        n_expected++;
        CHECK(want.bytes == n * spccl_dtype_bytes(dtype), "%s%s: %zu bytes for %zu elements", s->name,
              suffix[verb], want.bytes, n);
        dst = malloc(want.bytes != 0 ? want.bytes : 1);
        for (size_t i = 0; i < want.bytes; i++)
            dst[i] = (uint8_t)(i % 251);
        st = spccl_decode(s->p, s->bytes, (spccl_verb)verb, dst, n, dtype);
        CHECK(st == SPCCL_OK, "%s%s: %s", s->name, suffix[verb], spccl_last_error());
        CHECK(memcmp(dst, want.p, want.bytes) == 0, "%s%s: other bytes", s->name, suffix[verb]);
        free(dst);
        free(want.p);
    }
}

static void check_bad(const struct file *s)
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
    size_t n = each_bin("good", check_good);
    CHECK(n >= 60, "%zu good files", n);
    CHECK(n_expected >= 2 * n, "%zu expectations for %zu files", n_expected, n);
}

static void test_bad(void)
{
    size_t n = each_bin("bad", check_bad);
    CHECK(n >= 50, "%zu bad files", n);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"good", test_good}, {"bad", test_bad}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
