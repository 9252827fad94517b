/* plan_text.c - see plan_text.h. docs/SCHEDULES.md has the grammar. */
#include "core/plan/plan_text.h"

#include "core/base/mem.h"
#include "core/plan/plan_words.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define NOTHING (-1)

/* ---- heads ---------------------------------------------------------------------------------------- */

spccl_status sp_plan_text_open(const char *text, size_t bytes, sp_plan_reader *out)
{
    sp_plan_reader r = {text, text + bytes, 1};
    sp_word w, version;
    int n = -1;
    if (bytes > SP_PLAN_FILE_BYTES_MAX)
        return SP_FAIL(SPCCL_ERR_SETTING, "plan file: it has %zu bytes, wanted at most %zu", bytes,
                       SP_PLAN_FILE_BYTES_MAX);
    if (!sp_word_line(&r, &w) || !sp_word_is(&w, "spccl-plan") || !sp_word_next(&r, &version))
        return sp_word_bad(r.line, "it does not begin with \"spccl-plan %d\"", SP_PLAN_VERSION);
    w = version;
    if (!sp_word_number(&w, 0, 1 << 20, &n) || w.n != 0 || n != SP_PLAN_VERSION)
        return sp_word_bad(r.line, "version %.*s, this spccl reads %d: compile the schedule again",
                           SP_WORD_SHOWN(version), SP_PLAN_VERSION);
    SP_TRY(sp_word_end(&r));
    *out = r;
    return SPCCL_OK;
}

static spccl_status read_shape(const sp_plan_reader *r, sp_word value, sp_plan_head *h)
{
    sp_word w = value;
    h->n_hosts = h->per_host = 0;
    if (sp_word_is(&w, "any"))
        return SPCCL_OK;
    if (sp_word_number(&w, 1, SP_PLAN_RANKS_MAX, &h->n_hosts) && w.n > 1 && w.p[0] == 'x') {
        w = (sp_word){w.p + 1, w.n - 1};
        if (sp_word_number(&w, 1, SP_PLAN_RANKS_MAX, &h->per_host) && w.n == 0)
            return SPCCL_OK;
    }
    return sp_word_bad(r->line, "hosts=%.*s: wanted any, or 2x4 for 2 hosts of 4 ranks",
                       SP_WORD_SHOWN(value));
}

static spccl_status read_names(sp_plan_reader *r, sp_plan_head *h)
{
    sp_word coll = {"", 0}, name = {"", 0};
    if (!sp_word_next(r, &coll) || !sp_word_next(r, &name))
        return sp_word_bad(r->line, "wanted \"plan COLLECTIVE NAME ...\"");
    h->coll = SP_N_COLLS;
    for (int i = 0; i < SP_N_COLLS; i++)
        if (sp_word_is(&coll, sp_coll_name((sp_coll)i)))
            h->coll = (sp_coll)i;
    if (h->coll == SP_N_COLLS)
        return sp_word_bad(r->line, "no collective is called \"%.*s\"", SP_WORD_SHOWN(coll));
    if (name.n >= sizeof h->name || memchr(name.p, '=', name.n) != NULL)
        return sp_word_bad(r->line, "the name \"%.*s\": wanted at most %zu characters, none of them =",
                           SP_WORD_SHOWN(name), sizeof h->name - 1);
    for (size_t i = 0; i < name.n; i++)
        if (name.p[i] < '!' || name.p[i] > '~')
            return sp_word_bad(r->line, "a name has characters that are not printable ASCII");
    memcpy(h->name, name.p, name.n);
    return SPCCL_OK;
}

/* Do the numbers of a head fit each other? */
static spccl_status check_head(const sp_plan_reader *r, const sp_plan_head *h)
{
    if (h->n_ranks == NOTHING || h->n_hosts == NOTHING || h->n_chunks == NOTHING)
        return sp_word_bad(r->line, "plan %s lacks ranks=, hosts= or chunks=", h->name);
    if (h->n_hosts != 0 && h->n_hosts * h->per_host != h->n_ranks)
        return sp_word_bad(r->line, "plan %s: %d hosts of %d ranks are not %d ranks", h->name, h->n_hosts,
                           h->per_host, h->n_ranks);
    if ((h->coll == SP_BROADCAST) != (h->root != NOTHING) || h->root >= h->n_ranks)
        return sp_word_bad(
            r->line, "plan %s: a broadcast has root=R below ranks=, other collectives have none", h->name);
    if (h->n_ranks > SP_PLAN_RANKS_MAX)
        return sp_word_bad(r->line,
                           "plan %s has %d ranks: the check has sets of %d ranks, so plans have 1 to %d",
                           h->name, h->n_ranks, SP_PLAN_RANKS_MAX, SP_PLAN_RANKS_MAX);
    if (h->n_slots * h->block_slices > SP_PLAN_KEPT_MAX)
        return sp_word_bad(
            r->line,
            "plan %s keeps %d slices (slots times block), wanted at most %d: more than the queues have",
            h->name, h->n_slots * h->block_slices, SP_PLAN_KEPT_MAX);
    return SPCCL_OK;
}

static spccl_status read_head(sp_plan_reader *r, sp_plan_head *h)
{
    sp_word w, v;
    *h = (sp_plan_head){.n_ranks = NOTHING,
                        .n_hosts = NOTHING,
                        .n_chunks = NOTHING,
                        .root = NOTHING,
                        .block_slices = 1,
                        .line = r->line};
    SP_TRY(read_names(r, h));
    while (sp_word_next(r, &w)) {
        if (sp_word_key(&w, "ranks", &v)) {
            SP_TRY(sp_word_value(r, v, "ranks", 1, 1 << 20, &h->n_ranks));
        } else if (sp_word_key(&w, "hosts", &v)) {
            SP_TRY(read_shape(r, v, h));
        } else if (sp_word_key(&w, "chunks", &v)) {
            SP_TRY(sp_word_value(r, v, "chunks", 1, SP_PLAN_CHUNKS_MAX, &h->n_chunks));
        } else if (sp_word_key(&w, "block", &v)) {
            SP_TRY(sp_word_value(r, v, "block", 1, SP_PLAN_BLOCK_MAX, &h->block_slices));
        } else if (sp_word_key(&w, "slots", &v)) {
            SP_TRY(sp_word_value(r, v, "slots", 0, 1 << 20, &h->n_slots));
        } else if (sp_word_key(&w, "root", &v)) {
            SP_TRY(sp_word_value(r, v, "root", 0, SP_PLAN_RANKS_MAX - 1, &h->root));
        } else {
            return sp_word_bad(r->line, "a plan has no \"%.*s\"", SP_WORD_SHOWN(w));
        }
    }
    return check_head(r, h);
}

spccl_status sp_plan_text_next(sp_plan_reader *r, sp_plan_head *head, bool *found)
{
    static const char *const of_steps[] = {"rank", "send", "recv", "reduce", "copy"};
    sp_word w;
    while (sp_word_line(r, &w)) {
        bool is_step = false;
        if (sp_word_is(&w, "plan")) {
            *found = true;
            return read_head(r, head);
        }
        if (sp_word_is(&w, "end")) {
            *found = false;
            SP_TRY(sp_word_end(r));
            return sp_word_line(r, &w) ? sp_word_bad(r->line, "something follows \"end\"") : SPCCL_OK;
        }
        for (size_t i = 0; i < sizeof of_steps / sizeof *of_steps; i++)
            is_step = is_step || sp_word_is(&w, of_steps[i]);
        if (!is_step)
            return sp_word_bad(r->line, "a line begins with \"%.*s\"", SP_WORD_SHOWN(w));
        sp_word_skip_line(r); /* a step of a plan that is skipped */
    }
    return sp_word_bad(r->line, "the file ends before \"end\": it is cut off");
}

/* ---- steps ---------------------------------------------------------------------------------------- */

/* Steps of one rank, as they are read. */
typedef struct rank_steps {
    const sp_plan_head *head;
    sp_plan_reader *r;
    int rank;
    sp_step *steps;
    int n_steps, steps_cap;
    int *ranks;
    int n_ranks, ranks_cap;
} rank_steps;

static spccl_status bad_step(const rank_steps *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static spccl_status bad_step(const rank_steps *b, const char *fmt, ...)
{
    char text[300];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return SP_FAIL(SPCCL_ERR_SETTING, "plan %s, rank %d, step %d (of the plan in line %d): %s", b->head->name,
                   b->rank, b->n_steps, b->head->line, text);
}

/* Make room for one more element. */
static spccl_status reserve(void **array, int n, int *cap, size_t elem_bytes)
{
    int more = *cap != 0 ? 2 * *cap : 64;
    void *p;
    if (n < *cap)
        return SPCCL_OK;
    p = sp_calloc((size_t)more, elem_bytes);
    if (p == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "plan file: %d steps", more);
    if (n != 0)
        memcpy(p, *array, (size_t)n * elem_bytes);
    sp_free(*array);
    *array = p;
    *cap = more;
    return SPCCL_OK;
}

/* "0,1,2@input". Appends the ranks. */
static spccl_status read_ranks(rank_steps *b, sp_word value, int *first, int *n, int *queue)
{
    sp_word w = value;
    uint64_t seen = 0;
    int rank = 0;
    *first = b->n_ranks;
    for (;;) {
        if (!sp_word_number(&w, 0, b->head->n_ranks - 1, &rank) || rank == b->rank)
            return bad_step(b, "\"%.*s\": wanted other ranks, 0 to %d, and a queue, as in 1,2@input",
                            SP_WORD_SHOWN(value), b->head->n_ranks - 1);
        if ((seen >> rank & 1) != 0)
            return bad_step(b, "\"%.*s\" has rank %d twice", SP_WORD_SHOWN(value), rank);
        seen |= UINT64_C(1) << rank;
        SP_TRY(reserve((void **)&b->ranks, b->n_ranks, &b->ranks_cap, sizeof *b->ranks));
        b->ranks[b->n_ranks++] = rank;
        if (w.n == 0 || w.p[0] != ',')
            break;
        w = (sp_word){w.p + 1, w.n - 1};
    }
    *n = b->n_ranks - *first;
    *queue = SP_QUEUE_RESULT;
    if (sp_word_is(&w, "@input"))
        *queue = SP_QUEUE_INPUT;
    else if (!sp_word_is(&w, "@result"))
        return bad_step(b, "\"%.*s\": wanted @input or @result after the ranks", SP_WORD_SHOWN(value));
    return SPCCL_OK;
}

/* in, out, or slotN. What a slot holds depends on its writer: settle_slots. */
static spccl_status read_source(rank_steps *b, sp_word value, sp_step *s)
{
    sp_word w = value;
    if (sp_word_is(&w, "in")) {
        s->source = SP_SOURCE_IN;
        return SPCCL_OK;
    }
    if (sp_word_is(&w, "out") && s->kind == SP_STEP_SEND) {
        s->source = SP_SOURCE_OUT;
        return SPCCL_OK;
    }
    s->source = SP_SOURCE_KEPT_SUM;
    if (w.n > 4 && memcmp(w.p, "slot", 4) == 0) {
        w = (sp_word){w.p + 4, w.n - 4};
        if (sp_word_number(&w, 0, b->head->n_slots - 1, &s->source_slot) && w.n == 0)
            return SPCCL_OK;
    }
    return bad_step(b, "\"%.*s\": wanted in, %sor slot0 to slot%d", SP_WORD_SHOWN(value),
                    s->kind == SP_STEP_SEND ? "out, " : "", b->head->n_slots - 1);
}

/* What a line of a step says, besides the step itself. */
typedef struct said {
    bool source, at, out, chunk;
} said;

static spccl_status read_field(rank_steps *b, const sp_word *w, sp_step *s, said *has)
{
    int per_block = b->head->n_chunks, n_chunks = per_block;
    sp_word v;
    if (b->head->coll == SP_ALL_GATHER || b->head->coll == SP_REDUCE_SCATTER)
        n_chunks *= b->head->n_ranks;
    if (sp_word_key(w, "chunk", &v)) {
        has->chunk = true;
        return sp_word_value(b->r, v, "chunk", 0, n_chunks - 1, &s->chunk);
    }
    if (sp_word_key(w, "from", &v) && s->n_from == 0 &&
        (s->kind == SP_STEP_RECV || s->kind == SP_STEP_REDUCE))
        return read_ranks(b, v, &s->from, &s->n_from, &s->queue_in);
    if (sp_word_key(w, "to", &v) && s->n_to == 0 && s->kind != SP_STEP_COPY)
        return read_ranks(b, v, &s->to, &s->n_to, &s->queue_out);
    if ((sp_word_key(w, "src", &v) && s->kind == SP_STEP_SEND) ||
        (sp_word_key(w, "own", &v) && s->kind == SP_STEP_REDUCE)) {
        has->source = true;
        return read_source(b, v, s);
    }
    if (sp_word_key(w, "at", &v) && s->kind == SP_STEP_REDUCE) {
        has->at = true;
        return sp_word_value(b->r, v, "at", 0, SP_PLAN_RANKS_MAX, &s->own_before);
    }
    if (sp_word_key(w, "keep", &v) && (s->kind == SP_STEP_RECV || s->kind == SP_STEP_REDUCE)) {
        s->keeps = true;
        return sp_word_value(b->r, v, "keep", 0, b->head->n_slots - 1, &s->keep_slot);
    }
    if (sp_word_key(w, "after", &v))
        return sp_word_value(b->r, v, "after", 0, SP_PLAN_RANK_STEPS_MAX - 1, &s->after);
    if (sp_word_key(w, "turn", &v))
        return sp_word_value(b->r, v, "turn", 0, SP_PLAN_RANK_STEPS_MAX - 1, &s->turn);
    if (sp_word_is(w, "out") && (s->kind == SP_STEP_RECV || s->kind == SP_STEP_REDUCE)) {
        has->out = true;
        return SPCCL_OK;
    }
    return bad_step(b, "it has \"%.*s\"", SP_WORD_SHOWN(*w));
}

/* Does the step belong to its collective? A chunk of a block is input, or output, only of the rank whose block it is. */
static spccl_status check_place(const rank_steps *b, const sp_step *s, bool writes, bool reads_input)
{
    sp_coll coll = b->head->coll;
    bool own_block = s->chunk / b->head->n_chunks == b->rank;
    bool sums = coll == SP_ALL_REDUCE || coll == SP_REDUCE_SCATTER;
    if (s->kind == SP_STEP_COPY && (coll != SP_ALL_GATHER || !own_block))
        return bad_step(b, "a copy is for the own block of an all_gather");
    if (s->kind == SP_STEP_REDUCE && !sums)
        return bad_step(b, "%s has no sums", sp_coll_name(coll));
    if (s->kind == SP_STEP_RECV && coll == SP_REDUCE_SCATTER)
        return bad_step(b, "in a reduce_scatter the owner of a block adds: reduce, not recv");
    if (s->kind == SP_STEP_RECV && coll == SP_ALL_GATHER && own_block)
        return bad_step(b, "a rank has its own block: copy, not recv");
    if (reads_input &&
        ((coll == SP_ALL_GATHER && !own_block) || (coll == SP_BROADCAST && b->rank != b->head->root)))
        return bad_step(b, "chunk %d is not in the input of rank %d", s->chunk, b->rank);
    if (writes &&
        ((coll == SP_REDUCE_SCATTER && !own_block) || (coll == SP_BROADCAST && b->rank == b->head->root)))
        return bad_step(b, "chunk %d is not in the output of rank %d", s->chunk, b->rank);
    return SPCCL_OK;
}

static spccl_status check_step(const rank_steps *b, sp_step *s, const said *has)
{
    bool is_reduce = s->kind == SP_STEP_REDUCE, is_send = s->kind == SP_STEP_SEND;
    if (!has->chunk)
        return bad_step(b, "it has no chunk=");
    if (is_send && (!has->source || s->n_to == 0))
        return bad_step(b, "a send has src= and to=");
    if (s->kind == SP_STEP_RECV && (s->n_from != 1 || !has->out))
        return bad_step(b, "a recv has one rank in from=, and out");
    if (is_reduce && (has->source != has->at || (s->n_from == 0 && !has->source)))
        return bad_step(b, "a reduce adds something: from=, or own= with at=");
    if (is_reduce && has->at && s->own_before > s->n_from)
        return bad_step(b, "at=%d: it has %d senders", s->own_before, s->n_from);
    if (is_reduce && has->out && s->keeps)
        return bad_step(b, "a result is in the output: later steps send it with src=out");
    if (is_reduce && !has->out && !s->keeps && s->n_to == 0)
        return bad_step(b, "its sum goes nowhere: out, keep= or to=");
    s->gives_sum = is_reduce && !has->out;
    s->part = s->chunk;
    if (s->source != SP_SOURCE_IN && s->after < 0)
        return bad_step(b, "it reads what another step wrote, so it has after=");
    return check_place(b, s, s->kind != SP_STEP_SEND && !s->gives_sum,
                       s->source == SP_SOURCE_IN && (is_send || has->at));
}

static spccl_status read_step(rank_steps *b, sp_step_kind kind)
{
    said has = {0};
    sp_word w;
    sp_step *s;
    SP_TRY(reserve((void **)&b->steps, b->n_steps, &b->steps_cap, sizeof *b->steps));
    s = &b->steps[b->n_steps];
    *s = (sp_step){.kind = kind, .after = NOTHING, .turn = SP_NO_TURN, .own_before = NOTHING};
    while (sp_word_next(b->r, &w))
        SP_TRY(read_field(b, &w, s, &has));
    SP_TRY(check_step(b, s, &has));
    b->n_steps++;
    return SPCCL_OK;
}

/* True if the step adds the contributions of all ranks, in rank order. */
static bool adds_contributions(const rank_steps *b, const sp_step *s)
{
    if (s->n_from != b->head->n_ranks - 1 || s->source != SP_SOURCE_IN || s->own_before != b->rank)
        return false;
    for (int i = 1; i < s->n_from; i++)
        if (b->ranks[s->from + i] < b->ranks[s->from + i - 1])
            return false;
    return true;
}

/* All steps of a rank are read: settle what refers to other steps. */
static spccl_status settle(rank_steps *b, int *n_turns)
{
    int n_steps = b->n_steps;
    *n_turns = 0;
    for (b->n_steps = 0; b->n_steps < n_steps; b->n_steps++) { /* bad_step names that step */
        sp_step *s = &b->steps[b->n_steps], *writer;
        if (s->after >= n_steps || s->after == b->n_steps || s->turn >= n_steps)
            return bad_step(b, "after=%d, turn=%d: the rank has %d steps", s->after, s->turn, n_steps);
        *n_turns = s->turn >= *n_turns ? s->turn + 1 : *n_turns;
        s->adds_sums = s->kind == SP_STEP_REDUCE && !adds_contributions(b, s);
        if (s->source != SP_SOURCE_KEPT_SUM)
            continue;
        writer = &b->steps[s->after];
        if (!writer->keeps || writer->keep_slot != s->source_slot)
            return bad_step(b, "it reads slot %d, which step %d does not write", s->source_slot, s->after);
        writer->n_readers++;
        if (writer->kind != SP_STEP_RECV)
            continue;
        if (s->kind == SP_STEP_REDUCE)
            return bad_step(b, "it adds a result that step %d received", s->after);
        s->source = SP_SOURCE_KEPT_MESSAGE;
    }
    for (b->n_steps = 0; b->n_steps < n_steps; b->n_steps++)
        if (b->steps[b->n_steps].keeps && b->steps[b->n_steps].n_readers == 0)
            return bad_step(b, "no step reads what it keeps");
    return SPCCL_OK;
}

/* The plan of one rank, in one block of memory. */
static spccl_status make_plan(rank_steps *b, sp_plan **out)
{
    size_t steps_bytes = (size_t)b->n_steps * sizeof(sp_step), ranks_bytes = (size_t)b->n_ranks * sizeof(int);
    int n_turns;
    sp_plan *plan;
    SP_TRY(settle(b, &n_turns));
    plan = sp_calloc(1, sizeof *plan + steps_bytes + ranks_bytes + sizeof b->head->name);
    if (plan == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "plan %s: %d steps", b->head->name, b->n_steps);
    *plan = (sp_plan){.rank = b->rank,
                      .world_size = b->head->n_ranks,
                      .n_steps = b->n_steps,
                      .n_turns = n_turns,
                      .block_slices = b->head->block_slices,
                      .n_slots = b->head->n_slots,
                      .steps = (sp_step *)(plan + 1)};
    plan->ranks = (int *)(plan->steps + b->n_steps);
    plan->name = (char *)(plan->ranks + b->n_ranks);
    if (b->n_steps != 0)
        memcpy(plan->steps, b->steps, steps_bytes);
    if (b->n_ranks != 0)
        memcpy(plan->ranks, b->ranks, ranks_bytes);
    memcpy(plan->ranks + b->n_ranks, b->head->name, sizeof b->head->name);
    *out = plan;
    return SPCCL_OK;
}

/* Read the steps up to the next line that is none: it stays unread. */
static spccl_status read_rank(rank_steps *b, int *n_left)
{
    static const char *const kinds[] = {"send", "recv", "reduce", "copy"}; /* sp_step_kind */
    sp_word w;
    for (;;) {
        sp_plan_reader before = *b->r;
        int kind = 0;
        if (!sp_word_line(b->r, &w))
            return SPCCL_OK;
        while (kind < 4 && !sp_word_is(&w, kinds[kind]))
            kind++;
        if (kind == 4) {
            *b->r = before;
            return SPCCL_OK;
        }
        if (b->n_steps == SP_PLAN_RANK_STEPS_MAX || --*n_left < 0)
            return bad_step(b, "too many: wanted at most %d steps a rank, and %d a plan",
                            SP_PLAN_RANK_STEPS_MAX, SP_PLAN_STEPS_MAX);
        SP_TRY(read_step(b, (sp_step_kind)kind));
    }
}

spccl_status sp_plan_text_steps(sp_plan_reader *r, const sp_plan_head *head, sp_plan **plans)
{
    rank_steps b = {.head = head, .r = r};
    int n_left = SP_PLAN_STEPS_MAX, n_made = 0;
    spccl_status st = SPCCL_OK;
    while (st == SPCCL_OK && b.rank < head->n_ranks) {
        sp_word w, v;
        int rank = -1;
        b.n_steps = b.n_ranks = 0;
        if (!sp_word_line(r, &w) || !sp_word_is(&w, "rank") || !sp_word_next(r, &v) ||
            !sp_word_number(&v, 0, SP_PLAN_RANKS_MAX, &rank) || v.n != 0 || rank != b.rank)
            st = sp_word_bad(r->line, "plan %s: wanted \"rank %d\"", head->name, b.rank);
        if (st == SPCCL_OK)
            st = sp_word_end(r);
        if (st == SPCCL_OK)
            st = read_rank(&b, &n_left);
        if (st == SPCCL_OK)
            st = make_plan(&b, &plans[b.rank]);
        if (st == SPCCL_OK)
            n_made = ++b.rank;
    }
    sp_free(b.steps);
    sp_free(b.ranks);
    while (st != SPCCL_OK && n_made > 0)
        sp_plan_destroy(plans[--n_made]);
    return st;
}
