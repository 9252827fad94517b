/* test_format_mutated.c - compares sp_frame_validate on frames with changed bytes with a second, plain check
 * of rules 20 to 27 of FORMAT.md 4. Accepted frames are decoded: the sanitizers then find the accesses that a
 * wrong answer allows. */
#include "frames.h"

static int plain_tile_ok(const sp_frame *f)
{
    size_t k = 0, blocks = (f->n_elems + 255) / 256, total = 0;
    for (size_t b = 0; b < blocks; b++)
        total += f->index[b];
    if (total != f->nnz)
        return 0;
    for (size_t b = 0; b < blocks; b++) {
        int before = -1;
        for (int i = 0; i < f->index[b]; i++, k++) {
            if (f->meta[k] <= before || b * 256 + f->meta[k] >= f->n_elems)
                return 0;
            before = f->meta[k];
        }
    }
    return 1;
}

static int plain_pici_ok(const sp_frame *f)
{
    size_t sum = 0;
    for (size_t t = 0; t * 4096 < f->n_elems; t++) {
        if (sp_load_le32(f->index + 4 * t) != sum)
            return 0;
        for (size_t i = 0; i < 4096; i++) {
            if ((sp_load_le64(f->meta + (t * 64 + i % 64) * 8) >> (i / 64) & 1) == 0)
                continue;
            if (t * 4096 + i >= f->n_elems)
                return 0;
            sum++;
        }
    }
    return sum == f->nnz;
}

static int plain_coo_ok(const sp_frame *f)
{
    int64_t before = -1;
    for (size_t i = 0; i < f->nnz; i++) {
        int64_t at = sp_load_le32(f->index + 4 * i);
        if (at <= before || (size_t)at >= f->n_elems)
            return 0;
        before = at;
    }
    return 1;
}

static int plain_ok(const sp_frame *f)
{
    switch (f->format) {
    case SPCCL_FORMAT_TILE:
        return plain_tile_ok(f);
    case SPCCL_FORMAT_PICI:
        return plain_pici_ok(f);
    case SPCCL_FORMAT_COO:
        return plain_coo_ok(f);
    case SPCCL_FORMAT_AUTO:
    case SPCCL_FORMAT_DELTA:
    case SPCCL_FORMAT_EMPTY:
    case SPCCL_FORMAT_DENSE:
        break;
    }
    return 1;
}

/* Apply an accepted frame with every verb to memory of exactly the array's size. */
static void apply_all(const sp_frame *f)
{
    const sp_kernels *k;
    size_t bytes = f->n_elems * sp_dtype_bytes(f->dtype);
    uint8_t *dst = calloc(1, bytes != 0 ? bytes : 1);
    CHECK_OK(sp_kernels_pick(&k));
    for (int verb = SPCCL_SET; verb <= SPCCL_OVERWRITE; verb++) {
        spccl_status st = sp_codec_apply(k, f, (spccl_verb)verb, dst, f->dtype, false);
        int may_refuse =
            (verb == SPCCL_SET && f->is_delta) || (verb == SPCCL_ADD && f->dtype == SPCCL_FLOAT8);
        CHECK((st == SPCCL_OK) == !may_refuse, "verb %d: %s", verb, spccl_last_error());
    }
    free(dst);
}

static size_t n_accepted, n_rejected;

static void check_mutated(const struct buf *b)
{
    sp_frame f, h;
    spccl_status st = sp_frame_validate(b->p, b->bytes, &f);

    if (st == SPCCL_OK) {
        n_accepted++;
        CHECK(f.n_elems > 1 << 20 || plain_ok(&f), "accepted a broken %s frame", spccl_format_name(f.format));
        if (f.n_elems <= 1 << 20)
            apply_all(&f);
        return;
    }
    n_rejected++;
    CHECK(st == SPCCL_ERR_FORMAT || st == SPCCL_ERR_VERSION, "%s", spccl_status_name(st));
    if (sp_frame_validate_header(b->p, b->bytes, &h) == SPCCL_OK)
        CHECK(!plain_ok(&h), "refused a good %s frame", spccl_format_name(h.format));
}

static void test_byte_flips(void)
{
    n_accepted = n_rejected = 0;
    for (int round = 0; round < 300; round++) {
        size_t n = 1 + test_rand() % (round % 10 == 0 ? 20000 : 700);
        struct buf b = sparse_frame(formats[test_rand() % N_FORMATS], n, (spccl_dtype)(1 + test_rand() % 10),
                                    (unsigned)(1 + test_rand() % 40));
        for (int i = 0; i < 100; i++) {
            size_t at = test_rand() % (i % 3 == 0 ? 64 : b.bytes);
            uint8_t was = b.p[at];
            b.p[at] = (uint8_t)(i % 2 == 0 ? was ^ (1u << test_rand() % 8) : test_rand());
            check_mutated(&b);
            b.p[at] = was;
        }
        check_mutated(&b);
        free(b.p);
    }
    CHECK(n_accepted > 1000 && n_rejected > 1000, "%zu accepted, %zu refused: the test is lopsided",
          n_accepted, n_rejected);
}

/* Index sections of a few small numbers: many are valid, and many others nearly are. */
static void test_dense_index_noise(void)
{
    n_accepted = n_rejected = 0;
    for (int round = 0; round < 20000; round++) {
        spccl_format format = formats[1 + test_rand() % 3];
        size_t n = 1 + test_rand() % 1100;
        size_t nnz = test_rand() % (1 + sp_min_size(n, 12)), at;
        struct buf b;
        sp_frame_layout l;
        sp_frame_layout_of(format, n, nnz, 1, &l);
        b.bytes = l.frame_bytes;
        b.p = calloc(1, b.bytes);
        sp_frame_write_header(b.p, format, SPCCL_UINT8, false, n, nnz, &l);
        for (size_t i = 0; i < nnz; i++) {
            if (format == SPCCL_FORMAT_TILE) {
                b.p[l.index_off + test_rand() % sp_ceil_div(n, 256)]++;
                b.p[l.meta_off + i] = (uint8_t)((i > 0 ? b.p[l.meta_off + i - 1] : 0) + test_rand() % 90);
            } else if (format == SPCCL_FORMAT_PICI) {
                at = test_rand() % (n + 3);
                b.p[l.meta_off + at % 64 * 8 + at / 64 / 8] |= (uint8_t)(1u << (at / 64 % 8));
            } else {
                at = (i > 0 ? sp_load_le32(b.p + l.index_off + 4 * (i - 1)) : 0) + test_rand() % 99;
                sp_store_le32(b.p + l.index_off + 4 * i, (uint32_t)at);
            }
        }
        check_mutated(&b);
        free(b.p);
    }
    CHECK(n_accepted > 1000 && n_rejected > 1000, "%zu accepted, %zu refused: the test is lopsided",
          n_accepted, n_rejected);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"byte_flips", test_byte_flips},
        {"dense_index_noise", test_dense_index_noise},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
