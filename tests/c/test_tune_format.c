/* test_tune_format.c - core/format/tune_format.c: the choice of format, and format names as text. */
#include "core/format/tune_format.h"
#include "test.h"

#include <math.h>

static const size_t sizes[] = {0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 3 * 4096 + 7};
#define N_SIZES (sizeof sizes / sizeof *sizes)

static void check_choice(const sp_slice_stats *s, bool is_delta)
{
    static const double links[] = {0.1, 0.8, INFINITY}; /* ns per byte: shared memory, TCP, smallest frame */
    size_t smallest = SIZE_MAX, bound = sp_tune_frame_bound(s->n_elems, s->elem_bytes, is_delta);

    for (int f = 0; f < SPCCL_N_FORMATS; f++) {
        size_t bytes = sp_frame_bytes((spccl_format)f, s->n_elems, s->nnz, s->elem_bytes);
        if (sp_codec_allows(s, (spccl_format)f, is_delta) && bytes < smallest)
            smallest = bytes;
    }
    for (size_t l = 0; l < 3; l++) {
        spccl_format f = sp_tune_format(s, is_delta, links[l]);
        size_t bytes;
        CHECK(sp_codec_allows(s, f, is_delta), "n %zu nnz %zu, %g ns per byte: format %d", s->n_elems, s->nnz,
              links[l], f);
        bytes = sp_frame_bytes(f, s->n_elems, s->nnz, s->elem_bytes);
        CHECK(bytes <= bound, "n %zu nnz %zu, %g ns per byte: %zu bytes above the bound", s->n_elems, s->nnz,
              links[l], bytes);
        CHECK(l != 2 || bytes == smallest, "n %zu nnz %zu: %zu bytes, wanted %zu", s->n_elems, s->nnz, bytes,
              smallest);
    }
}

static void test_choice(void)
{
    for (size_t i = 0; i < N_SIZES; i++) {
        for (size_t eb = 1; eb <= 8; eb *= 2) {
            for (size_t step = 0; step <= 40; step++) {
                sp_slice_stats s = {.n_elems = sizes[i], .elem_bytes = eb, .nnz = sizes[i] * step / 40};
                s.has_full_tile = s.nnz > sizes[i] - (sizes[i] + 255) / 256 && sizes[i] >= 256;
                check_choice(&s, false);
                check_choice(&s, true);
            }
        }
    }
    for (int is_tcp = 0; is_tcp < 2; is_tcp++) { /* choices that must stay when the cost table is updated */
        double link = is_tcp ? 0.8 : 0.1;
        sp_slice_stats s = {.n_elems = 65536, .elem_bytes = 4, .nnz = 0};
        CHECK(sp_tune_format(&s, false, link) == SPCCL_FORMAT_EMPTY, "0%%");
        s.nnz = 655;
        CHECK(sp_frame_bytes(sp_tune_format(&s, false, link), 65536, 655, 4) < 65536 / 8, "1%%");
        s.nnz = 65536;
        s.has_full_tile = true;
        CHECK(sp_tune_format(&s, false, link) == SPCCL_FORMAT_DENSE, "100%%");
    }
}

static void test_names(void)
{
    spccl_format f = SPCCL_FORMAT_DENSE;

    for (int i = SPCCL_FORMAT_AUTO; i < SPCCL_N_FORMATS; i++) {
        if (i == SPCCL_FORMAT_EMPTY)
            continue;
        CHECK_OK(sp_tune_parse_format(spccl_format_name((spccl_format)i), &f));
        CHECK((int)f == i, "format %d parsed as %d", i, (int)f);
    }
    f = SPCCL_FORMAT_COO;
    CHECK_FAILS(sp_tune_parse_format("empty", &f), SPCCL_ERR_SETTING, "\"empty\"");
    CHECK_FAILS(sp_tune_parse_format("Tile", &f), SPCCL_ERR_SETTING, "\"Tile\"");
    CHECK_FAILS(sp_tune_parse_format("", &f), SPCCL_ERR_SETTING, "wanted auto");
    CHECK_FAILS(sp_tune_parse_format(NULL, &f), SPCCL_ERR_SETTING, "null");
    CHECK(f == SPCCL_FORMAT_COO, "out touched on failure");
    CHECK(strcmp(spccl_format_name((spccl_format)9), "?") == 0, "format 9");
    CHECK(strcmp(spccl_dtype_name(SPCCL_BFLOAT16), "bfloat16") == 0, "bfloat16");
    CHECK(strcmp(spccl_dtype_name((spccl_dtype)0), "?") == 0, "dtype 0");
    CHECK(spccl_dtype_bytes(SPCCL_FLOAT64) == 8 && spccl_dtype_bytes((spccl_dtype)11) == 0, "dtype bytes");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"choice", test_choice},
        {"names", test_names},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
