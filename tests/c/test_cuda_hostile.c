/* test_cuda_hostile.c - spccl_cuda_decode of broken encoded arrays: each rule of docs/FORMAT.md 4 is broken
 * in turn, bytes are changed at random, and offsets are wrong. The reference is spccl_decode of each slice's
 * bytes alone. If it refuses them, the slice must stay untouched and the status must not be 0. If it takes
 * them, the bits must be the same. Nothing else may be written. SPCCL_TEST_ROUNDS=n or --long: more random
 * changes. */
#include "cuda_test.h"

#define SLICES_MAX 48u
#define ENCODED_CAP (SLICES_MAX * 90000u)
#define ARRAY_CAP (SLICES_MAX * 16384u + 2 * GUARD_BYTES)

static struct {
    uint8_t *encoded, *encoded_d, *dst, *dst_d, *want, *got;
    uint64_t *offsets, *offsets_d;
    uint32_t *status, *status_d;
    cudaStream_t on;
    size_t n_accepted, n_refused; /* slices */
} g;

/* A well-formed encoded array in g.encoded; g.offsets has its frames. */
struct subject {
    spccl_dtype dtype;
    size_t n, bytes;
    uint32_t slice_elems, n_slices;
};

static void make_buffers(void)
{
    g.encoded = pinned_alloc(ENCODED_CAP), g.encoded_d = device_alloc(ENCODED_CAP);
    g.dst = pinned_alloc(ARRAY_CAP), g.dst_d = device_alloc(ARRAY_CAP);
    g.want = pinned_alloc(ARRAY_CAP), g.got = pinned_alloc(ARRAY_CAP);
    g.offsets = (uint64_t *)pinned_alloc((SLICES_MAX + 1) * 8);
    g.offsets_d = (uint64_t *)device_alloc((SLICES_MAX + 1) * 8);
    g.status = (uint32_t *)pinned_alloc(4), g.status_d = (uint32_t *)device_alloc(4);
    CUDA_OK(cudaStreamCreateWithFlags(&g.on, cudaStreamNonBlocking));
}

static size_t elems_of(const struct subject *s, uint32_t slice)
{
    size_t from = (size_t)slice * s->slice_elems;
    return s->n - from < s->slice_elems ? s->n - from : s->slice_elems;
}

/* Encode each slice in its own format, in `format`, or with AUTO in any. The last slice is short. */
static void make_subject(struct subject *s, spccl_dtype dtype, uint32_t n_slices, spccl_format format)
{
    static uint8_t x[16384];
    size_t e = spccl_dtype_bytes(dtype);
    *s = (struct subject){.dtype = dtype, .n_slices = n_slices};
    s->slice_elems = spccl_cuda_slice_elems(dtype, test_rand() % 2 == 0 ? 0 : 2048);
    s->n = (size_t)s->slice_elems * (n_slices - 1) + 1 + test_rand() % (s->slice_elems - 1);
    for (uint32_t i = 0; i < n_slices; i++) {
        static const array_kind kinds[] = {KIND_ONE,        KIND_PERCENT_1, KIND_PERCENT_10,
                                           KIND_PERCENT_50, KIND_ONE_BLOCK, KIND_ALTERNATING};
        spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
        size_t bytes = 0, n = elems_of(s, i);
        o.slice_elems = s->slice_elems;
        o.format = format != SPCCL_FORMAT_AUTO ? format : (spccl_format)(test_rand() % SPCCL_N_FORMATS);
        fill_array(x, n, dtype, o.format == SPCCL_FORMAT_EMPTY ? KIND_ZERO : kinds[test_rand() % 6],
                   &test_rng_state);
        if (o.format == SPCCL_FORMAT_TILE) /* tile cannot encode a full block */
            for (size_t k = 77; k < n; k += 256)
                memset(x + k * e, 0, e);
        g.offsets[i] = s->bytes;
        CHECK_OK(spccl_encode(x, n, dtype, &o, g.encoded + s->bytes, ENCODED_CAP - s->bytes, &bytes));
        s->bytes += bytes;
    }
    g.offsets[n_slices] = s->bytes;
}

/* g.want = what dst must hold. Returns the number of refused slices; *only = the status of the last one. */
static uint32_t expect(const struct subject *s, spccl_verb verb, uint8_t *want, spccl_status *only)
{
    size_t e = spccl_dtype_bytes(s->dtype);
    static uint8_t slice[16384];
    uint32_t n_bad = 0;
    for (uint32_t i = 0; i < s->n_slices; i++) {
        uint64_t from = g.offsets[i], to = g.offsets[i + 1];
        spccl_status st = SPCCL_ERR_FORMAT;
        uint8_t *dst = want + (size_t)i * s->slice_elems * e;
        memcpy(slice, dst,
               elems_of(s, i) * e); /* the CPU applies frames before it finds that one is missing */
        if (from % 16 == 0 && from < to && to <= s->bytes)
            st = spccl_decode(g.encoded + from, to - from, verb, slice, elems_of(s, i), s->dtype);
        if (st == SPCCL_OK)
            memcpy(dst, slice, elems_of(s, i) * e);
        if (st != SPCCL_OK) {
            *only = st;
            n_bad++;
        }
    }
    g.n_accepted += s->n_slices - n_bad;
    g.n_refused += n_bad;
    return n_bad;
}

/* Decode g.encoded with g.offsets on CPU and GPU, and compare. Returns the number of refused slices. */
static uint32_t check_decode(const struct subject *s, spccl_verb verb, const char *what)
{
    size_t e = spccl_dtype_bytes(s->dtype), lead = GUARD_BYTES + test_rand() % 2 * e;
    size_t all = lead + s->n * e + GUARD_BYTES, at;
    spccl_status only = SPCCL_OK;
    uint32_t n_bad, status;
    fill_array(g.dst, all / e, s->dtype, KIND_PERCENT_50, &test_rng_state);
    memcpy(g.want, g.dst, all);
    CUDA_OK(cudaMemcpyAsync(g.dst_d, g.dst, all, cudaMemcpyHostToDevice, g.on));
    CUDA_OK(cudaMemcpyAsync(g.encoded_d, g.encoded, s->bytes, cudaMemcpyHostToDevice, g.on));
    CUDA_OK(cudaMemcpyAsync(g.offsets_d, g.offsets, (s->n_slices + 1) * 8, cudaMemcpyHostToDevice, g.on));
    CUDA_OK(cudaMemsetAsync(g.status_d, POISON, 4, g.on));
    CHECK_OK(spccl_cuda_decode(g.encoded_d, s->bytes, g.offsets_d, verb, g.dst_d + lead, s->n, s->dtype,
                               s->slice_elems, g.status_d, g.on));
    CUDA_OK(cudaMemcpyAsync(g.status, g.status_d, 4, cudaMemcpyDeviceToHost, g.on));
    CUDA_OK(cudaMemcpyAsync(g.got, g.dst_d, all, cudaMemcpyDeviceToHost, g.on));
    n_bad = expect(s, verb, g.want + lead, &only);
    sync_stream(g.on);
    status = g.status[0];
    CHECK((status != 0) == (n_bad != 0),
          "%s, %s, verb %d: status %u, the CPU refuses %u of %u slices (last: %d)", what,
          spccl_dtype_name(s->dtype), (int)verb, status, n_bad, s->n_slices, (int)only);
    CHECK(status == 0 || status == (uint32_t)-SPCCL_ERR_FORMAT || status == (uint32_t)-SPCCL_ERR_VERSION ||
              status == (uint32_t)-SPCCL_ERR_FRAME,
          "%s: status %u", what, status);
    CHECK(n_bad != 1 || (status == (uint32_t)-SPCCL_ERR_VERSION) == (only == SPCCL_ERR_VERSION),
          "%s: status %u, the CPU says %d", what, status, (int)only);
    at = first_difference(g.want, g.got, all);
    CHECK(at == all, "%s, %s, verb %d, slices of %u: dst differs at byte %td of %zu (slice %td)", what,
          spccl_dtype_name(s->dtype), (int)verb, s->slice_elems, (ptrdiff_t)at - (ptrdiff_t)lead, s->n * e,
          ((ptrdiff_t)at - (ptrdiff_t)lead) / (ptrdiff_t)(s->slice_elems * e));
    return n_bad;
}

static spccl_verb any_verb(spccl_dtype dtype)
{
    spccl_verb verb = (spccl_verb)(test_rand() % 3);
    return verb == SPCCL_ADD && dtype == SPCCL_FLOAT8 ? SPCCL_OVERWRITE : verb;
}

/* ---- each rule broken in turn ---- */

#define ON(format) (1u << SPCCL_FORMAT_##format)
#define LISTS (ON(TILE) | ON(PICI) | ON(COO))
#define ALL (LISTS | ON(EMPTY) | ON(DENSE))

enum how { PUT, PLUS };
/* Change `width` bytes at `off` of the header. */
static const struct patch {
    const char *name;
    unsigned formats;
    int off, width;
    enum how how;
    int64_t value;
} patches[] = {
    {"rule 2: magic", ALL, 0, 4, PLUS, 1},
    {"rule 2: magic, last byte", ALL, 3, 1, PUT, 'f'},
    {"rule 3: version 0", ALL, 4, 1, PUT, 0},
    {"rule 3: version 2", ALL, 4, 1, PUT, 2},
    {"rule 4: format 5", ALL, 5, 1, PUT, 5},
    {"rule 4: format 255", ALL, 5, 1, PUT, 255},
    {"rule 5: dtype 0", ALL, 6, 1, PUT, 0},
    {"rule 5: dtype 11", ALL, 6, 1, PUT, 11},
    {"rule 6: flag bit 1", ALL, 7, 1, PLUS, 2},
    {"rule 6: flag bit 7", ALL, 7, 1, PLUS, 128},
    {"rule 7: reserved, low", ALL, 56, 1, PUT, 1},
    {"rule 7: reserved, high", ALL, 63, 1, PUT, 128},
    {"rule 8: n_elems 2^64 - 1", ALL, 8, 8, PUT, -1},
    {"rule 8: n_elems + 2^32", ALL, 8, 8, PLUS, INT64_C(1) << 32},
    {"rule 9: nnz 2^64 - 1", ALL, 16, 8, PUT, -1},
    {"rule 9: nnz + 2^32", ALL, 16, 8, PLUS, INT64_C(1) << 32},
    {"rule 9: nnz above n_elems", LISTS, 16, 8, PUT, 16385},
    {"rule 10: no elements", LISTS | ON(DENSE), 8, 8, PUT, 0},
    {"rule 11: empty with nnz", ON(EMPTY), 16, 8, PUT, 1},
    {"rule 12: dense with fewer", ON(DENSE), 16, 8, PLUS, -1},
    {"rule 13: dense delta", ON(DENSE), 7, 1, PUT, 1},
    {"rule 14: index_off", ALL, 32, 8, PLUS, 16},
    {"rule 14: index_off, high", ALL, 32, 8, PLUS, INT64_C(1) << 32},
    {"rule 15: meta_off", ALL, 40, 8, PLUS, 16},
    {"rule 15: meta_off, high", ALL, 40, 8, PLUS, INT64_C(1) << 60},
    {"rule 16: values_off", ALL, 48, 8, PLUS, -16},
    {"rule 16: values_off, high", ALL, 48, 8, PLUS, INT64_C(1) << 33},
    {"rule 17: frame_bytes too large", ALL, 24, 8, PLUS, 16},
    {"rule 17: frame_bytes too small", ALL, 24, 8, PLUS, -16},
    {"rule 17: frame_bytes 0", ALL, 24, 8, PUT, 0},
    {"rule 17: frame_bytes, high", ALL, 24, 8, PLUS, INT64_C(1) << 32},
    {"rule 24 or 20: nnz one less", LISTS, 16, 8, PLUS, -1},
    {"rule 24 or 20: nnz one more", LISTS, 16, 8, PLUS, 1},
    {"rule 30: one element more", ALL, 8, 8, PLUS, 1},
    {"rule 30: one element less", ALL, 8, 8, PLUS, -1},
};

static void apply_patch(uint8_t *frame, const struct patch *p)
{
    uint64_t v = 0;
    memcpy(&v, frame + p->off, (size_t)p->width);
    v = p->how == PUT ? (uint64_t)p->value : v + (uint64_t)p->value;
    memcpy(frame + p->off, &v, (size_t)p->width);
}

/* With one broken slice, exactly this slice must be refused. Afterwards it is repaired. */
static void check_broken(const struct subject *s, uint32_t slice, const uint8_t *good, const char *what)
{
    uint8_t *frame = g.encoded + g.offsets[slice];
    uint32_t n_bad = check_decode(s, any_verb(s->dtype), what);
    CHECK(n_bad == 1, "%s, %s: the CPU refuses %u slices, wanted 1: the test is wrong", what,
          spccl_dtype_name(s->dtype), n_bad);
    memcpy(frame, good, g.offsets[slice + 1] - g.offsets[slice]);
}

static void test_header_rules(void)
{
    static uint8_t good[90000];
    struct subject s;
    for (int d = 1; d <= N_DTYPES; d += is_small ? 4 : 1)
        for (int format = 0; format < SPCCL_N_FORMATS; format++) {
            make_subject(&s, (spccl_dtype)d, 5, (spccl_format)format);
            CHECK(check_decode(&s, any_verb(s.dtype), "a well-formed array") == 0, "the CPU refuses it");
            for (size_t i = 0; i < sizeof patches / sizeof *patches; i++) {
                uint32_t slice = (uint32_t)(test_rand() % s.n_slices);
                uint8_t *frame = g.encoded + g.offsets[slice];
                if ((patches[i].formats >> format & 1) == 0)
                    continue;
                memcpy(good, frame, g.offsets[slice + 1] - g.offsets[slice]);
                apply_patch(frame, &patches[i]);
                check_broken(&s, slice, good, patches[i].name);
            }
        }
}

/* Rules 29 and 31: frames that are well formed, but not allowed here. */
static void test_fit(void)
{
    struct subject s;
    for (int d = 1; d <= N_DTYPES; d++)
        for (int format = 0; format < SPCCL_N_FORMATS; format++) {
            uint8_t *frame;
            make_subject(&s, (spccl_dtype)d, 4, (spccl_format)format);
            frame = g.encoded + g.offsets[test_rand() % s.n_slices];
            frame[6] = (uint8_t)(d % N_DTYPES + 1);
            CHECK(check_decode(&s, any_verb(s.dtype), "rule 29: dtype") == 1, "the CPU takes it");
            frame[6] = (uint8_t)d;
            if ((LISTS >> format & 1) == 0 && format != SPCCL_FORMAT_EMPTY)
                continue;
            frame[7] = 1;
            CHECK(check_decode(&s, SPCCL_SET, "rule 31: set of a delta") == 1, "the CPU takes it");
            CHECK(g.status[0] == (uint32_t)-SPCCL_ERR_FRAME, "rule 31: status %u", g.status[0]);
            CHECK(check_decode(&s, SPCCL_OVERWRITE, "a delta") == 0, "the CPU refuses it");
        }
}

/* Rules 19 to 27. A function breaks a rule in frame `f`; false: it finds nothing to break there. */
struct parts {
    uint8_t *f;
    spccl_frame_info i;
    size_t e;
};
static bool pad_dirty(struct parts *p, size_t from, size_t to)
{
    if (from >= to)
        return false;
    p->f[from + test_rand() % (to - from)] = (uint8_t)(1u << test_rand() % 8);
    return true;
}
static bool break_pad_index(struct parts *p)
{
    size_t items = p->i.format == SPCCL_FORMAT_TILE   ? (p->i.n_elems + 255) / 256
                   : p->i.format == SPCCL_FORMAT_PICI ? (p->i.n_elems + 4095) / 4096 * 4
                                                      : p->i.nnz * 4;
    if (p->i.index_off == 0)
        return false;
    return pad_dirty(p, p->i.index_off + items, p->i.meta_off != 0 ? p->i.meta_off : p->i.values_off);
}
static bool break_pad_meta(struct parts *p)
{
    return p->i.format == SPCCL_FORMAT_TILE && pad_dirty(p, p->i.meta_off + p->i.nnz, p->i.values_off);
}
static bool break_pad_values(struct parts *p)
{
    return p->i.values_off != 0 && pad_dirty(p, p->i.values_off + p->i.nnz * p->e, p->i.frame_bytes);
}
static bool break_counts_more(struct parts *p)
{
    return p->i.format == SPCCL_FORMAT_TILE && ++p->f[p->i.index_off] != 0;
}
static bool break_counts_last(struct parts *p)
{
    uint8_t *last = p->f + p->i.index_off + (p->i.n_elems - 1) / 256;
    if (p->i.format != SPCCL_FORMAT_TILE)
        return false;
    (*last)--; /* 0 becomes 255, which is wrong too */
    return true;
}
/* Give an entry the offset of the one before it in its block. Any entry, or one that `every` divides. */
static bool repeat_place(struct parts *p, size_t every)
{
    const uint8_t *counts = p->f + p->i.index_off;
    size_t n = p->i.format == SPCCL_FORMAT_TILE ? p->i.n_elems : 0, from = 0, at = 0, seen = 0;
    for (size_t b = 0; b * 256 < n; from += counts[b++])
        for (size_t k = from + 1; k < from + counts[b]; k++)
            if (k % every == 0 && test_rand() % ++seen == 0)
                at = k;
    p->f[p->i.meta_off + at] = p->f[p->i.meta_off + at - (at != 0)];
    return at != 0;
}
static bool break_offset_order(struct parts *p)
{
    return repeat_place(p, 1);
}
static bool break_offset_group(struct parts *p) /* a warp decodes 32 entries at a time */
{
    return repeat_place(p, 32);
}
static bool break_offset_end(struct parts *p)
{
    size_t in_last = p->i.n_elems % 256, blocks = (p->i.n_elems + 255) / 256;
    if (p->i.format != SPCCL_FORMAT_TILE || in_last == 0 || p->f[p->i.index_off + blocks - 1] == 0)
        return false;
    p->f[p->i.meta_off + p->i.nnz - 1] = (uint8_t)(in_last + test_rand() % (256 - in_last));
    return true;
}
static bool break_prefix(struct parts *p)
{
    size_t tiles = (p->i.n_elems + 4095) / 4096;
    if (p->i.format != SPCCL_FORMAT_PICI)
        return false;
    p->f[p->i.index_off + test_rand() % tiles * 4 + test_rand() % 4] ^= 1;
    return true;
}
static bool flip_bit(struct parts *p, size_t element)
{
    if (p->i.format != SPCCL_FORMAT_PICI)
        return false;
    p->f[p->i.meta_off + (element / 4096 * 64 + element % 64) * 8 + element % 4096 / 64 / 8] ^=
        (uint8_t)(1u << (element % 4096 / 64 % 8));
    return true;
}
static bool break_bit(struct parts *p)
{
    return flip_bit(p, test_rand() % p->i.n_elems);
}
/* Move a bit of the last tile past the end, so that the counts stay right. */
static bool move_bit(struct parts *p, size_t to)
{
    if (p->i.format != SPCCL_FORMAT_PICI || p->i.n_elems % 4096 == 0)
        return false;
    for (size_t i = p->i.n_elems / 4096 * 4096; i < p->i.n_elems; i++)
        if (p->f[p->i.meta_off + (i / 4096 * 64 + i % 64) * 8 + i % 4096 / 64 / 8] >> (i % 4096 / 64 % 8) & 1)
            return flip_bit(p, i) && flip_bit(p, to);
    return false;
}
static bool break_bit_end(struct parts *p)
{
    return move_bit(p, p->i.n_elems);
}
static bool break_bit_last(struct parts *p)
{
    return move_bit(p, (p->i.n_elems + 4095) / 4096 * 4096 - 1);
}
static bool put_index(struct parts *p, size_t at, uint32_t value)
{
    memcpy(p->f + p->i.index_off + at * 4, &value, 4);
    return true;
}
static bool break_coo_twice(struct parts *p)
{
    size_t at = 1 + test_rand() % (p->i.nnz < 2 ? 1 : p->i.nnz - 1);
    if (p->i.format != SPCCL_FORMAT_COO || p->i.nnz < 2)
        return false;
    memcpy(p->f + p->i.index_off + at * 4, p->f + p->i.index_off + (at - 1) * 4, 4);
    return true;
}
static bool break_coo_falls(struct parts *p)
{
    return p->i.format == SPCCL_FORMAT_COO && p->i.nnz >= 2 && put_index(p, p->i.nnz - 1, 0);
}
static bool break_coo_end(struct parts *p)
{
    return p->i.format == SPCCL_FORMAT_COO && p->i.nnz >= 1 &&
           put_index(p, p->i.nnz - 1, (uint32_t)p->i.n_elems);
}
static bool break_coo_far(struct parts *p)
{
    return p->i.format == SPCCL_FORMAT_COO && p->i.nnz >= 1 && put_index(p, p->i.nnz - 1, UINT32_MAX);
}

static const struct {
    const char *name;
    bool (*apply)(struct parts *p);
} breaks[] = {
    {"rule 19: padding after index", break_pad_index},
    {"rule 19: padding after meta", break_pad_meta},
    {"rule 19: padding after values", break_pad_values},
    {"rule 20: a count too high", break_counts_more},
    {"rule 20: last count off", break_counts_last},
    {"rule 21: an offset twice", break_offset_order},
    {"rule 21: an offset twice, 32 entries on", break_offset_group},
    {"rule 22: offset past the end", break_offset_end},
    {"rule 23: prefix", break_prefix},
    {"rule 24: a bit flipped", break_bit},
    {"rule 25: bit just past the end", break_bit_end},
    {"rule 25: last bit of the tile", break_bit_last},
    {"rule 26: an index twice", break_coo_twice},
    {"rule 26: the last index falls", break_coo_falls},
    {"rule 27: index past the end", break_coo_end},
    {"rule 27: index 2^32 - 1", break_coo_far},
};
#define N_BREAKS (sizeof breaks / sizeof *breaks)

/* In 2 of 100 rounds no array has what some rule needs, so rounds go on until each rule was broken. */
static void test_index_rules(void)
{
    static uint8_t good[90000];
    size_t n_done[N_BREAKS] = {0}, n_left = N_BREAKS;
    struct subject s;
    for (int round = 0; round < (is_small ? 1 : 4 * n_rounds) || (n_left != 0 && round < 64); round++)
        for (int d = 1; d <= N_DTYPES; d++)
            for (int format = SPCCL_FORMAT_TILE; format < SPCCL_N_FORMATS; format++) {
                make_subject(&s, (spccl_dtype)d, 3, (spccl_format)format);
                for (size_t b = 0; b < N_BREAKS; b++) {
                    /* rules about the end need the last slice, which is short */
                    uint32_t slice = test_rand() % 2 == 0 ? s.n_slices - 1 : (uint32_t)(test_rand() % 2);
                    struct parts p = {.f = g.encoded + g.offsets[slice], .e = spccl_dtype_bytes(s.dtype)};
                    size_t bytes = g.offsets[slice + 1] - g.offsets[slice];
                    p.i.struct_bytes = sizeof p.i;
                    CHECK_OK(spccl_frame_inspect(p.f, bytes, &p.i));
                    memcpy(good, p.f, bytes);
                    if (breaks[b].apply(&p)) {
                        n_left -= n_done[b]++ == 0;
                        check_broken(&s, slice, good, breaks[b].name);
                    }
                }
            }
    for (size_t b = 0; b < N_BREAKS; b++)
        CHECK(n_done[b] != 0, "%s was never broken", breaks[b].name);
}

/* ---- random ---- */

static void test_random_changes(void)
{
    int rounds = is_small ? 12 : 400 * n_rounds; /* 96 slices, half of them refused */
    struct subject s;
    g.n_accepted = g.n_refused = 0;
    for (int round = 0; round < rounds; round++) {
        make_subject(&s, (spccl_dtype)(1 + test_rand() % N_DTYPES), is_small ? 8 : SLICES_MAX,
                     SPCCL_FORMAT_AUTO);
        for (uint32_t i = 0; i < s.n_slices; i++) {
            uint8_t *frame = g.encoded + g.offsets[i];
            size_t bytes = g.offsets[i + 1] - g.offsets[i];
            for (uint64_t k = test_rand() % 3; k > 0; k--) {
                size_t at = test_rand() % (test_rand() % 3 == 0 ? 64 : bytes);
                frame[at] = (uint8_t)(k == 1 ? frame[at] ^ (1u << test_rand() % 8) : test_rand());
            }
        }
        (void)check_decode(&s, any_verb(s.dtype), "random changes");
    }
    CHECK(g.n_accepted > 9 && g.n_refused > 9, "%zu accepted, %zu refused: the test has too few of one",
          g.n_accepted, g.n_refused);
}

/* Rules 1 and 18, and tables of offsets that point anywhere. */
static void test_offsets(void)
{
    static uint64_t good[SLICES_MAX + 1];
    int rounds = is_small ? 4 : 200 * n_rounds;
    struct subject s;
    for (int round = 0; round < rounds; round++) {
        make_subject(&s, (spccl_dtype)(1 + test_rand() % N_DTYPES), 6, SPCCL_FORMAT_AUTO);
        memcpy(good, g.offsets, sizeof good);
        for (int way = 0; way < 12; way++) {
            uint32_t i = (uint32_t)(test_rand() % (s.n_slices + 1)),
                     j = (uint32_t)(test_rand() % (s.n_slices + 1));
            const uint64_t lies[] = {0,
                                     UINT64_MAX,
                                     g.offsets[i] + 8,
                                     g.offsets[i] + 16,
                                     g.offsets[i] - 16,
                                     s.bytes + 16,
                                     1u << 31,
                                     UINT64_MAX - 15,
                                     g.offsets[j],
                                     test_rand(),
                                     g.offsets[i] ^ (1ull << 63)};
            g.offsets[i] = lies[(size_t)way % (sizeof lies / sizeof *lies)];
            if (way == 11)
                for (uint32_t k = 0; k <= s.n_slices; k++)
                    g.offsets[k] = test_rand() % (s.bytes / 16 + 1) * 16;
            (void)check_decode(&s, any_verb(s.dtype), "an offset that lies");
            memcpy(g.offsets, good, sizeof good);
        }
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"header_rules", test_header_rules},     {"fit", test_fit},         {"index_rules", test_index_rules},
        {"random_changes", test_random_changes}, {"offsets", test_offsets}, {NULL, NULL}};
    cuda_test_start(&argc, argv);
    make_buffers();
    return test_main(cases, argc, argv);
}
