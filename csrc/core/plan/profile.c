/* profile.c - see profile.h. */
#include "core/plan/profile.h"

#include "core/base/dtype.h"
#include "core/format/format.h"
#include "core/plan/plan_file.h"
#include "core/plan/plan_words.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD "spccl-profile"
#define VERSION 1
#define SLICE_BYTES_MAX (1u << 24)

static spccl_status bad(int line, const char *what)
{
    return SP_FAIL(SPCCL_ERR_SETTING, "line %d: %s", line, what);
}

/* The next word of the line is KEY=VALUE: give the value. */
static bool next_value(sp_plan_reader *r, const char *key, sp_word *value)
{
    sp_word w;
    return sp_word_next(r, &w) && sp_word_key(&w, key, value);
}

static bool to_u64(const sp_word *w, uint64_t max, uint64_t *out)
{
    uint64_t x = 0;
    if (w->n == 0 || w->n > 19)
        return false;
    for (size_t i = 0; i < w->n; i++) {
        if (w->p[i] < '0' || w->p[i] > '9')
            return false;
        x = x * 10 + (uint64_t)(w->p[i] - '0');
    }
    *out = x;
    return x <= max;
}

static bool next_number(sp_plan_reader *r, const char *key, uint64_t max, uint64_t *out)
{
    sp_word w;
    return next_value(r, key, &w) && to_u64(&w, max, out);
}

static bool to_coll(const sp_word *w, sp_coll *out)
{
    for (int i = 0; i < SP_N_COLLS; i++)
        if (sp_word_is(w, sp_coll_name((sp_coll)i))) {
            *out = (sp_coll)i;
            return true;
        }
    return false;
}

static bool to_dtype(const sp_word *w, uint8_t *out)
{
    for (int i = 1; i < SP_N_DTYPES; i++)
        if (sp_word_is(w, sp_dtype_name((spccl_dtype)i))) {
            *out = (uint8_t)i;
            return true;
        }
    return false;
}

/* A schedule that adds in rank order: no other one may be chosen. */
static bool to_schedule(const sp_word *w, sp_schedule *out)
{
    for (int i = 0; i < SP_N_SCHEDULES; i++)
        if (sp_word_is(w, sp_schedule_name((sp_schedule)i)) &&
            sp_schedule_adds_in_rank_order((sp_schedule)i)) {
            *out = (sp_schedule)i;
            return true;
        }
    return false;
}

/* "1/64": the largest density of the range. */
static bool to_class(const sp_word *w, uint8_t *out)
{
    sp_word n = {.p = w->p + 2, .n = w->n - 2};
    uint64_t x = 0;
    if (w->n < 3 || w->p[0] != '1' || w->p[1] != '/' || !to_u64(&n, 1u << (SP_TUNER_CLASSES - 1), &x))
        return false;
    for (uint8_t c = 0; c < SP_TUNER_CLASSES; c++)
        if (x == 1u << c) {
            *out = c;
            return true;
        }
    return false;
}

/* The ratio, in thousandths: a number of ours, not of the locale. */
static bool to_ratio(const sp_word *w, double *out)
{
    sp_word n = {.p = w->p + 2, .n = w->n - 2};
    uint64_t x = 0;
    if (w->n != 5 || w->p[1] != '.' || (w->p[0] != '0' && w->p[0] != '1') || !to_u64(&n, 999, &x))
        return false;
    *out = (double)(w->p[0] - '0') + (double)x / 1000;
    return true;
}

static spccl_status parse_best(sp_plan_reader *r, sp_profile_line *l)
{
    uint64_t ranks, hosts, per_host, slice;
    sp_word w;
    if (!next_value(r, "coll", &w) || !to_coll(&w, &l->key.coll))
        return bad(r->line, "wanted coll= and a collective");
    if (!next_value(r, "dtype", &w) || !to_dtype(&w, &l->key.dtype))
        return bad(r->line, "wanted dtype= and a dtype");
    if (!next_number(r, "ranks", 4096, &ranks) || !next_number(r, "hosts", ranks, &hosts) ||
        !next_number(r, "per-host", ranks, &per_host) || ranks < 2 || hosts == 0 || per_host == 0)
        return bad(r->line, "wanted ranks=, hosts= and per-host=, with 2 to 4096 ranks");
    if (!next_number(r, "elems", UINT64_MAX / 16, &l->key.n_elems) || l->key.n_elems == 0)
        return bad(r->line, "wanted elems= and a number");
    if (!next_value(r, "density", &w) || !to_class(&w, &l->key.density_class))
        return bad(r->line, "wanted density= and a power of two: 1/1 to 1/2048");
    if (!next_value(r, "schedule", &w) || !to_schedule(&w, &l->best.schedule) ||
        !sp_schedule_has(l->best.schedule, l->key.coll))
        return bad(r->line, "wanted schedule= and direct, oneshot or relayed, which this collective has");
    if (!next_number(r, "slice", SLICE_BYTES_MAX / sp_dtype_bytes((spccl_dtype)l->key.dtype), &slice) ||
        slice == 0 || slice % SP_PICI_TILE_ELEMS != 0)
        return bad(r->line, "wanted slice= and a multiple of 4096 elements, at most 16 MiB");
    if (!next_value(r, "time", &w) || !to_ratio(&w, &l->ratio))
        return bad(r->line, "wanted time= and a number such as 0.912");
    if (sp_word_next(r, &w))
        return bad(r->line, "nothing more was expected");
    l->n_ranks = (uint16_t)ranks;
    l->n_hosts = (uint16_t)hosts;
    l->per_host = (uint16_t)per_host;
    l->best.slice_elems = (uint32_t)slice;
    return SPCCL_OK;
}

/* The second line. `at`: behind its first word. */
static spccl_status check_machine(sp_plan_reader *r, const char *machine)
{
    const char *end = r->at;
    size_t n;
    while (r->at < r->end && *r->at == ' ')
        r->at++;
    for (end = r->at; end < r->end && *end != '\n'; end++)
        ;
    n = (size_t)(end - r->at);
    if (n != strlen(machine) || memcmp(r->at, machine, n) != 0)
        return SP_FAIL(SPCCL_ERR_SETTING,
                       "it was made on another machine, or by another version: %.*s; here: %s",
                       (int)(n < 200 ? n : 200), r->at, machine);
    r->at = end;
    return SPCCL_OK;
}

spccl_status sp_profile_parse(const char *text, size_t bytes, const char *machine, sp_profile *out)
{
    sp_plan_reader r = {.at = text, .end = text + bytes, .line = 1};
    sp_word w;
    uint64_t version = 0;
    *out = (sp_profile){0};
    if (bytes > SP_PROFILE_BYTES_MAX)
        return SP_FAIL(SPCCL_ERR_SETTING, "it has more than %d bytes", SP_PROFILE_BYTES_MAX);
    if (!sp_word_line(&r, &w) || !sp_word_is(&w, HEAD) || !sp_word_next(&r, &w) ||
        !to_u64(&w, 1000, &version))
        return SP_FAIL(SPCCL_ERR_SETTING, "it does not begin with \"%s %d\"", HEAD, VERSION);
    if (version != VERSION)
        return SP_FAIL(SPCCL_ERR_SETTING, "its text has version %d, this library reads version %d",
                       (int)version, VERSION);
    if (sp_word_next(&r, &w) || !sp_word_line(&r, &w) || !sp_word_is(&w, "machine"))
        return bad(r.line, "wanted \"machine\"");
    SP_TRY(check_machine(&r, machine));
    while (sp_word_line(&r, &w)) {
        sp_profile_line l = {0};
        if (!sp_word_is(&w, "best"))
            return bad(r.line, "wanted \"best\"");
        SP_TRY(parse_best(&r, &l));
        sp_profile_put(out, &l);
    }
    return SPCCL_OK;
}

size_t sp_profile_print(const sp_profile *p, const char *machine, char *text, size_t cap)
{
    int n = snprintf(text, cap, HEAD " %d\nmachine %s\n", VERSION, machine);
    size_t used = n > 0 ? (size_t)n : 0;
    for (int i = 0; i < p->n && used < cap; i++) {
        const sp_profile_line *l = &p->lines[i];
        int thousandths = (int)(l->ratio * 1000 + 0.5);
        thousandths = thousandths > 1999 ? 1999 : thousandths;
        n = snprintf(text + used, cap - used,
                     "best coll=%s dtype=%s ranks=%d hosts=%d per-host=%d elems=%" PRIu64
                     " density=1/%u schedule=%s slice=%u time=%d.%03d\n",
                     sp_coll_name(l->key.coll), sp_dtype_name((spccl_dtype)l->key.dtype), l->n_ranks,
                     l->n_hosts, l->per_host, l->key.n_elems, 1u << l->key.density_class,
                     sp_schedule_name(l->best.schedule), l->best.slice_elems, thousandths / 1000,
                     thousandths % 1000);
        used += n > 0 ? (size_t)n : 0;
    }
    return used < cap ? used : cap - 1;
}

static bool same_but_size(const sp_profile_line *a, const sp_profile_line *b)
{
    return a->key.coll == b->key.coll && a->key.dtype == b->key.dtype &&
           a->key.density_class == b->key.density_class && a->n_ranks == b->n_ranks &&
           a->n_hosts == b->n_hosts && a->per_host == b->per_host;
}

const sp_profile_line *sp_profile_find(const sp_profile *p, const sp_profile_line *like)
{
    const sp_profile_line *best = NULL;
    double least = 2; /* how many times the elements of the other */
    for (int i = 0; i < p->n; i++) {
        const sp_profile_line *l = &p->lines[i];
        double a = (double)l->key.n_elems, b = (double)like->key.n_elems;
        double ratio = a < b ? b / a : a / b;
        if (same_but_size(l, like) &&
            (ratio < least || (ratio == least && (best == NULL || l->key.n_elems < best->key.n_elems)))) {
            best = l;
            least = ratio;
        }
    }
    return best;
}

void sp_profile_hash(const sp_profile *p, int n_ranks, uint64_t hashes[SP_PROFILE_HASHES])
{
    memset(hashes, 0, SP_PROFILE_HASHES * sizeof *hashes);
    for (int i = 0; i < p->n; i++) {
        const sp_profile_line *l = &p->lines[i];
        const uint64_t words[] = {(uint64_t)l->key.coll,
                                  l->key.dtype,
                                  l->key.density_class,
                                  l->key.n_elems,
                                  l->n_hosts,
                                  l->per_host,
                                  (uint64_t)l->best.schedule,
                                  l->best.slice_elems};
        if (l->n_ranks == n_ranks) /* the sum has no order */
            hashes[sp_profile_hash_at(l->n_hosts, n_ranks)] += sp_plan_hash(words, sizeof words);
    }
}

void sp_profile_put(sp_profile *p, const sp_profile_line *line)
{
    int i = 0;
    while (i < p->n && !(same_but_size(&p->lines[i], line) && p->lines[i].key.n_elems == line->key.n_elems))
        i++;
    if (i == SP_PROFILE_LINES) {
        memmove(p->lines, p->lines + 1, sizeof p->lines - sizeof p->lines[0]);
        p->n--;
        i--;
    }
    p->n += i == p->n;
    p->lines[i] = *line;
}
