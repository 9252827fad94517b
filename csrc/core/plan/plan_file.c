/* plan_file.c - see plan_file.h. */
#include "core/plan/plan_file.h"

#include "core/base/mem.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct sp_plan_set {
    char *text; /* NULL after sp_plan_set_select */
    size_t bytes;
    uint64_t hash;
    char path[200];
    int n_roots;
    sp_written_plan of[SP_N_COLLS - 1]; /* not of broadcasts */
    sp_written_plan *broadcasts;        /* [n_roots] */
};

uint64_t sp_plan_hash(const void *text, size_t bytes)
{
    const uint8_t *p = text;
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++)
        h = (h ^ p[i]) * 0x100000001b3u;
    return h != 0 ? h : 1;
}

/* ---- a plan's elements ---------------------------------------------------------------------------- */

/* Where the elements of a step's chunk are in the input and in the output. */
static void place_step(const sp_plan_head *h, size_t n_elems, sp_step *s)
{
    int block = s->chunk / h->n_chunks;
    size_t off;
    if (h->coll == SP_ALL_REDUCE || h->coll == SP_BROADCAST) {
        sp_part_range(n_elems, h->n_chunks, s->chunk, &off, &s->n_elems);
        s->src_off = s->dst_off = off;
        return;
    }
    sp_part_range(n_elems, h->n_chunks, s->chunk % h->n_chunks, &off, &s->n_elems);
    s->src_off = s->dst_off = off;
    if (h->coll == SP_REDUCE_SCATTER)
        s->src_off += (size_t)block * n_elems;
    else if (s->kind != SP_STEP_SEND || s->source == SP_SOURCE_OUT)
        s->dst_off += (size_t)block * n_elems;
}

spccl_status sp_plan_place(const sp_plan *read, const sp_plan_head *head, size_t n_elems, sp_plan **out)
{
    size_t n_steps = (size_t)read->n_steps, n_ranks = 0;
    sp_plan *plan;
    int *now; /* [n_steps] index of each step in the new plan */
    for (size_t i = 0; i < n_steps; i++)
        n_ranks += (size_t)(read->steps[i].n_from + read->steps[i].n_to);
    plan = sp_calloc(1, sizeof *plan + n_steps * sizeof(sp_step) + (n_ranks + n_steps) * sizeof(int));
    if (plan == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "plan %s: %zu steps", read->name, n_steps);
    *plan = *read;
    plan->steps = (sp_step *)(plan + 1);
    plan->ranks = (int *)(plan->steps + n_steps);
    plan->n_steps = 0;
    now = plan->ranks + n_ranks;
    if (n_ranks != 0)
        memcpy(plan->ranks, read->ranks, n_ranks * sizeof(int));
    for (size_t i = 0; i < n_steps; i++) {
        sp_step *s = &plan->steps[plan->n_steps];
        *s = read->steps[i];
        place_step(head, n_elems, s);
        now[i] = plan->n_steps;
        plan->n_steps += s->n_elems != 0;
    }
    for (int i = 0; i < plan->n_steps; i++)
        if (plan->steps[i].after >= 0) /* of the same chunk, so it is not left out either */
            plan->steps[i].after = now[plan->steps[i].after];
    *out = plan;
    return SPCCL_OK;
}

/* A sum of one contribution looks like that contribution, but has the accumulator's dtype. So where a plan makes sums
 * that are not finished, any step may get one. */
static void allow_sums(sp_plan *plan)
{
    for (int i = 0; i < plan->n_steps; i++)
        if (plan->steps[i].kind == SP_STEP_REDUCE)
            plan->steps[i].adds_sums = true;
}

spccl_status sp_plan_check_written(const sp_plan_head *h, sp_plan *const *plans, sp_proof *out)
{
    /* One block and the first slice of the next: sched_order.c says why that is enough. */
    int n_slices = h->block_slices + 1;
    sp_plan *placed[SP_PLAN_RANKS_MAX];
    sp_check_args a = {.plans = placed,
                       .world_size = h->n_ranks,
                       .root = h->root,
                       .coll = h->coll,
                       .n_elems = (size_t)h->n_chunks * 64 * (size_t)n_slices,
                       .n_chunks = h->n_chunks,
                       .n_slices = n_slices,
                       .queue_cap = 1,
                       .fixed_order = true,
                       .fault = SPCCL_ERR_SETTING};
    spccl_status st = SPCCL_OK;
    int n = 0;
    while (st == SPCCL_OK && n < h->n_ranks) {
        st = sp_plan_place(plans[n], h, a.n_elems, &placed[n]);
        n += st == SPCCL_OK;
    }
    if (st == SPCCL_OK)
        st = sp_plan_check(&a, out);
    for (int rank = 0; st == SPCCL_OK && out->sends_sums && rank < h->n_ranks; rank++)
        allow_sums(plans[rank]);
    while (n > 0)
        sp_plan_destroy(placed[--n]);
    return st;
}

/* ---- files ---------------------------------------------------------------------------------------- */

static spccl_status read_file(FILE *f, sp_plan_set *set)
{
    size_t cap = 1 << 16;
    for (;;) {
        char *more = realloc(set->text, cap);
        if (more == NULL)
            return SP_FAIL(SPCCL_ERR_NOMEM, "plan file %s: %zu bytes", set->path, cap);
        set->text = more;
        set->bytes += fread(set->text + set->bytes, 1, cap - set->bytes, f);
        if (ferror(f) != 0)
            return SP_FAIL_ERRNO(SPCCL_ERR_SETTING, "plan file %s", set->path);
        if (set->bytes < cap)
            return SPCCL_OK;
        if (cap > SP_PLAN_FILE_BYTES_MAX)
            return SP_FAIL(SPCCL_ERR_SETTING, "plan file %s: it has more than %zu bytes", set->path,
                           SP_PLAN_FILE_BYTES_MAX);
        cap *= 2;
    }
}

spccl_status sp_plan_set_read(const char *path, sp_plan_set **out)
{
    sp_plan_set *set = sp_calloc(1, sizeof *set);
    sp_plan_reader reader;
    int fd;
    FILE *f;
    spccl_status st;
    if (set == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "plan file %s", path);
    snprintf(set->path, sizeof set->path, "%s", path);
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO without a writer is an empty file */
    f = fd >= 0 ? fdopen(fd, "rb") : NULL;
    if (f == NULL) {
        if (fd >= 0)
            close(fd);
        sp_free(set);
        return SP_FAIL_ERRNO(SPCCL_ERR_SETTING, "plan file %s (SPCCL_SCHEDULE=file:PATH)", path);
    }
    st = read_file(f, set);
    fclose(f);
    if (st == SPCCL_OK)
        st = sp_plan_text_open(set->text, set->bytes, &reader);
    if (st != SPCCL_OK) {
        sp_plan_set_destroy(set);
        return st;
    }
    set->hash = sp_plan_hash(set->text, set->bytes);
    *out = set;
    return SPCCL_OK;
}

void sp_plan_set_destroy(sp_plan_set *set)
{
    if (set == NULL)
        return;
    for (int i = 0; i < SP_N_COLLS - 1; i++)
        sp_plan_destroy(set->of[i].plan);
    for (int i = 0; i < set->n_roots; i++)
        sp_plan_destroy(set->broadcasts[i].plan);
    sp_free(set->broadcasts);
    free(set->text);
    sp_free(set);
}

uint64_t sp_plan_set_hash(const sp_plan_set *set)
{
    return set->hash;
}

const char *sp_plan_set_name(const sp_plan_set *set)
{
    const char *last = strrchr(set->path, '/');
    return last != NULL ? last + 1 : set->path;
}

static bool fits(const sp_plan_head *h, int world_size, const sp_hosts *hosts)
{
    if (h->n_ranks != world_size)
        return false;
    if (h->n_hosts == 0 || hosts == NULL)
        return h->n_hosts <= 1;
    for (int r = 0; r < world_size; r++)
        if (hosts->host_of[r] != r / h->per_host)
            return false;
    return true;
}

static sp_written_plan *entry_of(const sp_plan_set *set, sp_coll coll, int root)
{
    _Static_assert(SP_BROADCAST == SP_N_COLLS - 1, "the other collectives have one plan each");
    return (sp_written_plan *)(coll == SP_BROADCAST ? &set->broadcasts[root] : &set->of[coll]);
}

/* Read, check and keep a plan that fits the group. */
static spccl_status keep_plan(sp_plan_reader *r, const sp_plan_head *h, int rank, const sp_hosts *hosts,
                              sp_written_plan *e)
{
    sp_plan *plans[SP_PLAN_RANKS_MAX];
    sp_proof proof;
    spccl_status st;
    if (e->plan != NULL && (e->head.n_hosts == 0) == (h->n_hosts == 0))
        return SP_FAIL(SPCCL_ERR_SETTING, "plans of lines %d and %d are for the same %s and ranks",
                       e->head.line, h->line, sp_coll_name(h->coll));
    if (e->plan != NULL && h->n_hosts == 0)
        return SPCCL_OK; /* exact hosts count before any */
    SP_TRY(sp_plan_text_steps(r, h, plans));
    st = sp_plan_check_written(h, plans, &proof);
    if (st == SPCCL_OK) {
        sp_plan_destroy(e->plan);
        *e = (sp_written_plan){.head = *h, .proof = proof, .plan = plans[rank]};
        sp_plan_find_owners(h, plans, hosts, &e->owners);
        plans[rank] = NULL;
    }
    for (int i = 0; i < h->n_ranks; i++)
        sp_plan_destroy(plans[i]);
    return st;
}

static spccl_status keep_plans(sp_plan_set *set, int rank, int world_size, const sp_hosts *hosts)
{
    sp_plan_reader r;
    sp_plan_head h;
    bool found = true;
    SP_TRY(sp_plan_text_open(set->text, set->bytes, &r));
    while (found) {
        SP_TRY(sp_plan_text_next(&r, &h, &found));
        if (found && fits(&h, world_size, hosts))
            SP_TRY(keep_plan(&r, &h, rank, hosts, entry_of(set, h.coll, h.root)));
    }
    return SPCCL_OK;
}

/* GPUs of a group relay results, or they do not: if one plan relays, they refuse those that send results directly. */
static void refuse_direct(sp_plan_set *set)
{
    const sp_written_plan *relayed = NULL;
    sp_written_plan *direct[SP_N_COLLS + SP_PLAN_RANKS_MAX];
    int n_direct = 0;
    for (int i = 0; i < SP_N_COLLS - 1 + set->n_roots; i++) {
        sp_written_plan *e = i < SP_N_COLLS - 1 ? &set->of[i] : &set->broadcasts[i - (SP_N_COLLS - 1)];
        if (e->plan == NULL || e->owners.why_not[0] != '\0')
            continue;
        if (e->owners.results == SP_RESULTS_RELAYED)
            relayed = relayed != NULL ? relayed : e;
        else if (e->owners.results == SP_RESULTS_DIRECT)
            direct[n_direct++] = e;
    }
    for (int i = 0; relayed != NULL && i < n_direct; i++)
        snprintf(direct[i]->owners.why_not, sizeof direct[i]->owners.why_not,
                 "owners send results directly; %s (%s) relays them, and GPUs of a group do one or the other",
                 relayed->head.name, sp_coll_name(relayed->head.coll));
}

spccl_status sp_plan_set_select(sp_plan_set *set, int rank, int world_size, const sp_hosts *hosts)
{
    char cause[600];
    spccl_status st;
    set->broadcasts = sp_calloc((size_t)world_size, sizeof *set->broadcasts);
    if (set->broadcasts == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "broadcasts of %d ranks", world_size);
    set->n_roots = world_size;
    st = keep_plans(set, rank, world_size, hosts);
    if (st == SPCCL_OK)
        refuse_direct(set);
    free(set->text);
    set->text = NULL;
    if (st != SPCCL_ERR_SETTING)
        return st;
    snprintf(cause, sizeof cause, "%s", spccl_last_error());
    return SP_FAIL(st, "rank %d: %s: %s", rank, set->path, cause);
}

const sp_written_plan *sp_plan_set_find(const sp_plan_set *set, sp_coll coll, int root)
{
    const sp_written_plan *e = entry_of(set, coll, root);
    return e->plan != NULL ? e : NULL;
}

void sp_plan_set_each(const sp_plan_set *set, void (*fn)(void *ctx, const sp_written_plan *plan), void *ctx)
{
    for (int coll = 0; coll < SP_N_COLLS; coll++)
        for (int root = 0; root < (coll == SP_BROADCAST ? set->n_roots : 1); root++) {
            const sp_written_plan *e = sp_plan_set_find(set, (sp_coll)coll, root);
            if (e != NULL)
                fn(ctx, e);
        }
}
