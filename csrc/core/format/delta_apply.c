/* delta_apply.c - spccl_delta_check, spccl_delta_apply and spccl_delta_undo on the host. Each goes through the frames
 * slice by slice: sp_delta_read_slice lists the changes, and then each place takes those that lie in its box. */
#include "core/base/mem.h"
#include "core/format/delta.h"

typedef unsigned long long ull;

/* ---- arguments ---- */

struct job {
    const char *call; /* "delta_check", for texts */
    const spccl_delta_target *target;
    size_t number; /* of the target */
    sp_delta_frame frame;
    uint64_t first; /* place of element 0 of the slice in its tensor */
    uint8_t *old;   /* old values of this slice, packed; NULL: not kept */
    uint64_t sum_change;
    sp_delta_changes changes;
    /* Of each change of the slice, for check: its element lay in a box already, with these bits. */
    uint8_t is_seen[SP_DELTA_SLICE_ELEMS];
    uint64_t seen[SP_DELTA_SLICE_ELEMS];
};

#define REFUSE_AT(status, call, number, text, ...)                                                           \
    SP_FAIL(status, "%s: targets[%zu]: " text, call, number, __VA_ARGS__)
#define REFUSE(status, text, ...) REFUSE_AT(status, j->call, j->number, text, __VA_ARGS__)

static spccl_status check_place(const char *call, size_t target, const spccl_delta_target *t, size_t number)
{
    const spccl_delta_place *p = &t->places[number];
    const size_t e = sp_dtype_bytes(t->dtype);
    size_t extent;

    if (p->n_rows == 0 || p->n_cols == 0)
        return SPCCL_OK;
    if (p->dst == NULL)
        return REFUSE_AT(SPCCL_ERR_ARG, call, target, "places[%zu].dst is NULL", number);
    if (p->col_first > p->row_elems || p->n_cols > p->row_elems - p->col_first)
        return REFUSE_AT(SPCCL_ERR_ARG, call, target,
                         "places[%zu]: columns %llu + %llu, wanted at most row_elems %llu", number,
                         (ull)p->col_first, (ull)p->n_cols, (ull)p->row_elems);
    if (p->n_rows > 1 && p->dst_row_elems < p->n_cols)
        return REFUSE_AT(SPCCL_ERR_ARG, call, target,
                         "places[%zu]: dst_row_elems %llu, wanted at least n_cols %llu", number,
                         (ull)p->dst_row_elems, (ull)p->n_cols);
    if (p->row_first + p->n_rows < p->n_rows ||
        !sp_mul_size(p->row_first + p->n_rows, p->row_elems, &extent) ||
        !sp_mul_size(p->n_rows - 1, p->dst_row_elems, &extent) || !sp_add_size(extent, p->n_cols, &extent) ||
        !sp_mul_size(extent, e, &extent))
        return REFUSE_AT(SPCCL_ERR_ARG, call, target, "places[%zu]: its size overflows", number);
    if (sp_overlap(p->dst, extent, t->frame, t->frame_bytes))
        return REFUSE_AT(SPCCL_ERR_ALIAS, call, target, "places[%zu] (%zu bytes) and the frame overlap",
                         number, extent);
    return SPCCL_OK;
}

spccl_status sp_delta_check_target(const char *call, size_t number, const spccl_delta_target *t)
{
    if (!sp_dtype_ok(t->dtype))
        return REFUSE_AT(SPCCL_ERR_DTYPE, call, number, "dtype %d, wanted 1..%d", (int)t->dtype,
                         SP_N_DTYPES - 1);
    if (t->frame == NULL || (t->n_places != 0 && t->places == NULL) || t->reserved != 0)
        return REFUSE_AT(SPCCL_ERR_ARG, call, number, "%s",
                         t->reserved != 0   ? "reserved is not 0"
                         : t->frame == NULL ? "frame is NULL"
                                            : "places is NULL");
    if (t->n_elems > UINT64_MAX - t->first)
        return REFUSE_AT(SPCCL_ERR_ARG, call, number, "first %llu + n_elems %llu overflow", (ull)t->first,
                         (ull)t->n_elems);
    for (size_t p = 0; p < t->n_places; p++)
        SP_TRY(check_place(call, number, t, p));
    return SPCCL_OK;
}

/* Check the arguments, and header and table of the frame, which becomes j->frame. */
static spccl_status open_target(struct job *j, const spccl_delta_target *t)
{
    spccl_status st;

    j->target = t;
    SP_TRY(sp_delta_check_target(j->call, j->number, t));
    st = sp_delta_read_header(t->frame, t->frame_bytes, &j->frame);
    if (st != SPCCL_OK)
        return REFUSE(st, "%s", spccl_last_error());
    if (j->frame.frame_bytes != t->frame_bytes)
        return REFUSE(SPCCL_ERR_FRAME, "%zu bytes, of which the frame has %llu", t->frame_bytes,
                      (ull)j->frame.frame_bytes);
    if (j->frame.dtype != t->dtype || j->frame.n_elems != t->n_elems)
        return REFUSE(SPCCL_ERR_FRAME, "the frame has %llu elements of %s, wanted %llu of %s",
                      (ull)j->frame.n_elems, sp_dtype_name(j->frame.dtype), (ull)t->n_elems,
                      sp_dtype_name(t->dtype));
    return SPCCL_OK;
}

/* ---- places ---- */

/* Which changes of a slice may lie in a box, and how to find where. Elements of a box of whole rows, or of one row, lie
 * one after the other: no row is computed. */
struct box {
    const spccl_delta_place *p;
    uint64_t begin, end; /* elements of the tensor, from the first row of the box to its last */
    bool is_flat;
};

static struct box box_of(const spccl_delta_place *p)
{
    struct box b = {.p = p, .begin = p->row_first * p->row_elems};
    b.end = b.begin + p->n_rows * p->row_elems;
    if (p->n_rows == 0 || p->n_cols == 0)
        b.end = b.begin;
    if (p->n_rows == 1) {
        b.begin += p->col_first;
        b.end = b.begin + p->n_cols;
    }
    b.is_flat = p->n_rows == 1 || (p->n_cols == p->row_elems && p->dst_row_elems == p->row_elems);
    return b;
}

/* The first change of the slice whose element is `i` or later. */
static uint32_t first_change(const struct job *j, uint64_t i)
{
    uint32_t low = 0, high = j->changes.n;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (j->first + j->changes.place[middle] < i)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Where element i of the tensor lies, in elements behind dst; UINT64_MAX: not in the box. i rises from call to call;
 * *row is the row of the last one, and *row_end the element behind it. */
static inline uint64_t element_at(const struct box *b, uint64_t i, uint64_t *row, uint64_t *row_end)
{
    const spccl_delta_place *p = b->p;
    uint64_t col;
    if (b->is_flat)
        return i - b->begin;
    if (i >= *row_end) {
        *row = i / p->row_elems;
        *row_end = (*row + 1) * p->row_elems;
    }
    col = i - (*row_end - p->row_elems);
    if (col - p->col_first >= p->n_cols)
        return UINT64_MAX;
    return (*row - p->row_first) * p->dst_row_elems + col - p->col_first;
}

/* Changes are far apart: the lines of this many changes are on their way from memory. */
#define AHEAD 32u

/* Runs BODY for each change k of the slice in box b. `at` is the address of its element, of TYPE. */
#define EACH_CHANGE(TYPE, BODY)                                                                              \
    uint64_t row = 0, row_end = 0;                                                                           \
    for (uint32_t k = first_change(j, b->begin), end = first_change(j, b->end); k < end; k++) {              \
        uint64_t to = element_at(b, j->first + j->changes.place[k], &row, &row_end);                         \
        uint8_t *at;                                                                                         \
        if (b->is_flat && k + AHEAD < end)                                                                   \
            __builtin_prefetch((uint8_t *)b->p->dst +                                                        \
                                   (j->first + j->changes.place[k + AHEAD] - b->begin) * sizeof(TYPE),       \
                               1);                                                                           \
        if (to == UINT64_MAX)                                                                                \
            continue;                                                                                        \
        at = (uint8_t *)b->p->dst + to * sizeof(TYPE);                                                       \
        BODY                                                                                                 \
    }

#define OPERATIONS(NAME, TYPE)                                                                               \
    /* Look at what lies there now. */                                                                       \
    static spccl_status look_##NAME(struct job *j, const struct box *b)                                      \
    {                                                                                                        \
        const sp_delta_changes *c = &j->changes;                                                             \
        EACH_CHANGE(TYPE, {                                                                                  \
            TYPE bits;                                                                                       \
            memcpy(&bits, at, sizeof bits);                                                                  \
            if (j->is_seen[k] && j->seen[k] != bits)                                                         \
                return REFUSE(SPCCL_ERR_FRAME,                                                               \
                              "element %llu has other bits in places[%zu] than in a place before: the "      \
                              "receiver is not in step with itself",                                         \
                              (ull)(j->first + c->place[k]), (size_t)(b->p - j->target->places));            \
            if (!j->is_seen[k]) {                                                                            \
                uint64_t i = j->first + c->place[k];                                                         \
                uint64_t now = (TYPE)(c->is_added[k] ? bits + c->value[k] : c->value[k]);                    \
                j->sum_change +=                                                                             \
                    sp_delta_hash(j->target->key, i, now) - sp_delta_hash(j->target->key, i, bits);          \
                j->is_seen[k] = 1;                                                                           \
                j->seen[k] = bits;                                                                           \
                if (j->old != NULL)                                                                          \
                    memcpy(j->old + k * sizeof bits, &bits, sizeof bits);                                    \
            }                                                                                                \
        })                                                                                                   \
        return SPCCL_OK;                                                                                     \
    }                                                                                                        \
    static spccl_status apply_##NAME(struct job *j, const struct box *b)                                     \
    {                                                                                                        \
        const sp_delta_changes *c = &j->changes;                                                             \
        EACH_CHANGE(TYPE, {                                                                                  \
            TYPE bits;                                                                                       \
            memcpy(&bits, at, sizeof bits);                                                                  \
            bits = (TYPE)(c->is_added[k] ? bits + c->value[k] : c->value[k]);                                \
            memcpy(at, &bits, sizeof bits);                                                                  \
        })                                                                                                   \
        return SPCCL_OK;                                                                                     \
    }                                                                                                        \
    static spccl_status undo_##NAME(struct job *j, const struct box *b)                                      \
    {                                                                                                        \
        EACH_CHANGE(TYPE, { memcpy(at, j->old + k * sizeof(TYPE), sizeof(TYPE)); })                          \
        return SPCCL_OK;                                                                                     \
    }
OPERATIONS(u8, uint8_t)
OPERATIONS(u16, uint16_t)
OPERATIONS(u32, uint32_t)
OPERATIONS(u64, uint64_t)

enum operation { LOOK, APPLY, UNDO };
typedef spccl_status operation_fn(struct job *, const struct box *);
static operation_fn *const operations[3][9] = {
    [LOOK] = {[1] = look_u8, [2] = look_u16, [4] = look_u32, [8] = look_u64},
    [APPLY] = {[1] = apply_u8, [2] = apply_u16, [4] = apply_u32, [8] = apply_u64},
    [UNDO] = {[1] = undo_u8, [2] = undo_u16, [4] = undo_u32, [8] = undo_u64},
};

/* Read slice s, and do the operation at all places. old: of this slice, or NULL, with space for `left` values. */
static spccl_status run_slice(struct job *j, uint64_t s, enum operation what, uint8_t *old, uint64_t left)
{
    const spccl_delta_target *t = j->target;
    spccl_status st = sp_delta_read_slice(&j->frame, s, &j->changes);

    if (st != SPCCL_OK)
        return REFUSE(st, "%s", spccl_last_error());
    if (j->changes.n > left)
        return REFUSE(SPCCL_ERR_FORMAT, "the counts exceed nnz %llu: the frame changed meanwhile",
                      (ull)j->frame.nnz);
    j->first = t->first + s * SP_DELTA_SLICE_ELEMS;
    j->old = old;
    if (what == LOOK) {
        memset(j->is_seen, 0, j->changes.n);
        if (old != NULL)
            memset(old, 0, j->changes.n * j->frame.elem_bytes); /* of elements that lie nowhere */
    }
    for (size_t p = 0; p < t->n_places; p++) {
        struct box b = box_of(&t->places[p]);
        SP_TRY(operations[what][j->frame.elem_bytes](j, &b));
    }
    return SPCCL_OK;
}

static uint64_t old_bytes_of(const sp_delta_frame *f)
{
    return sp_align_up(f->nnz * f->elem_bytes, SP_DELTA_ALIGN);
}

/* Bytes of the old values of j's target, of `left`. Someone else may have written to the frame since open_all. */
static spccl_status take_old(const struct job *j, size_t left, size_t *out)
{
    *out = old_bytes_of(&j->frame);
    if (*out > left)
        return REFUSE(SPCCL_ERR_FORMAT, "%zu bytes of old values, of %zu: the frame changed meanwhile", *out,
                      left);
    return SPCCL_OK;
}

/* All slices of a target. old: its old values, or NULL. */
static spccl_status run_target(struct job *j, enum operation what, uint8_t *old)
{
    const uint32_t e = j->frame.elem_bytes;
    uint64_t n = 0;

    j->sum_change = 0;
    for (uint64_t s = 0; s < j->frame.n_slices; s++) {
        SP_TRY(run_slice(j, s, what, old != NULL ? old + n * e : NULL, j->frame.nnz - n));
        n += j->changes.n;
    }
    return SPCCL_OK;
}

/* ---- the public functions ---- */

/* Check arguments and headers of all targets. out_old_bytes: of all old values. */
static spccl_status open_all(struct job *j, const spccl_delta_target *targets, size_t n_targets,
                             size_t *out_old_bytes)
{
    size_t bytes = 0;
    for (j->number = 0; j->number < n_targets; j->number++) {
        SP_TRY(open_target(j, &targets[j->number]));
        bytes += old_bytes_of(&j->frame);
    }
    *out_old_bytes = bytes;
    return SPCCL_OK;
}

static spccl_status create_job(const char *call, const spccl_delta_target *targets, size_t n_targets,
                               struct job **out)
{
    struct job *j = NULL;
    if (targets == NULL && n_targets != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: targets is NULL", call);
    j = sp_alloc64(sp_align_up(sizeof *j, 64));
    if (j == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%s: %zu bytes of scratch", call, sizeof *j);
    j->call = call;
    *out = j;
    return SPCCL_OK;
}

spccl_status spccl_delta_check(const spccl_delta_target *targets, size_t n_targets, void *old, size_t old_cap,
                               uint64_t *sum_changes, size_t *out_old_bytes)
{
    uint8_t *to = old;
    size_t bytes, left, mine;
    spccl_status st;
    struct job *j = NULL;

    SP_TRY(create_job("delta_check", targets, n_targets, &j));
    SP_TRY_TO(done, st, open_all(j, targets, n_targets, &bytes));
    if (old != NULL && bytes > old_cap) {
        st = SP_FAIL(SPCCL_ERR_DST_SMALL, "delta_check: old_cap %zu, wanted %zu", old_cap, bytes);
        goto done;
    }
    left = bytes;
    for (j->number = 0; j->number < n_targets; j->number++, left -= mine) {
        SP_TRY_TO(done, st, open_target(j, &targets[j->number]));
        SP_TRY_TO(done, st, take_old(j, left, &mine));
        SP_TRY_TO(done, st, run_target(j, LOOK, to));
        if (to != NULL) {
            size_t used = j->frame.nnz * j->frame.elem_bytes;
            memset(to + used, 0, mine - used);
            to += mine;
        }
        if (sum_changes != NULL)
            sum_changes[j->number] = j->sum_change;
    }
    if (out_old_bytes != NULL)
        *out_old_bytes = bytes;
done:
    sp_free(j);
    return st;
}

spccl_status spccl_delta_apply(const spccl_delta_target *targets, size_t n_targets)
{
    spccl_status st;
    size_t bytes;
    struct job *j = NULL;

    SP_TRY(create_job("delta_apply", targets, n_targets, &j));
    SP_TRY_TO(done, st, open_all(j, targets, n_targets, &bytes));
    for (j->number = 0; j->number < n_targets; j->number++) {
        SP_TRY_TO(done, st, open_target(j, &targets[j->number]));
        SP_TRY_TO(done, st, run_target(j, APPLY, NULL));
    }
done:
    sp_free(j);
    return st;
}

spccl_status spccl_delta_undo(const spccl_delta_target *targets, size_t n_targets, const void *old,
                              size_t old_bytes)
{
    uint8_t *from = (uint8_t *)(uintptr_t)old; /* only read */
    size_t bytes, left, mine;
    spccl_status st;
    struct job *j = NULL;

    SP_TRY(create_job("delta_undo", targets, n_targets, &j));
    SP_TRY_TO(done, st, open_all(j, targets, n_targets, &bytes));
    if ((old == NULL && bytes != 0) || old_bytes != bytes) {
        st = SP_FAIL(SPCCL_ERR_ARG, "delta_undo: old_bytes %zu%s, wanted the %zu of spccl_delta_check",
                     old_bytes, old == NULL ? " at NULL" : "", bytes);
        goto done;
    }
    left = bytes;
    for (j->number = 0; j->number < n_targets; j->number++, left -= mine) {
        SP_TRY_TO(done, st, open_target(j, &targets[j->number]));
        SP_TRY_TO(done, st, take_old(j, left, &mine));
        SP_TRY_TO(done, st, run_target(j, UNDO, from));
        from += mine;
    }
done:
    sp_free(j);
    return st;
}
