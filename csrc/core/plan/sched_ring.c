/* sched_ring.c - the ring of Hough et al. (SpCCL, sections IV and V). Each rank receives from the rank before it and
 * sends to the one after it, host by host. The sum for a rank's shard starts at the rank after it. Each rank on the
 * way adds its own values and encodes the sum again; the shard's owner adds last. In an all-gather, and in the second
 * half of an all-reduce, the messages go round the ring unchanged.
 *
 * The order of additions is not rank order, so this schedule runs only when it is asked for. docs/ALGORITHMS.md has
 * the steps and bytes.
 *
 * A step either takes a message or sends one, so that a message which waits for space does not hold up those behind
 * it. All takes of a rank have one order, and so have all its sends, the same on all ranks but for the shards. Then
 * space for one message per queue is enough: docs/ALGORITHMS.md, "Why no rank waits for ever". */
#include "core/plan/sched_build.h"

#define TAKES 0 /* turns */
#define SENDS 1
/* Slices on the way between a rank's takes and its sends. With fewer, a link is idle while its two ranks encode and
 * decode. */
#define BLOCK_SLICES 4

typedef struct ring {
    sp_plan_builder *b;
    const sp_plan_args *a;
    int at; /* this rank's place in the ring */
} ring;

static int rank_at(const ring *r, int place)
{
    int n = r->a->world_size, i = (place % n + n) % n;
    return r->a->hosts != NULL ? r->a->hosts->ranks[i] : i;
}

static ring ring_of(sp_plan_builder *b, const sp_plan_args *a)
{
    const sp_hosts *h = a->hosts;
    return (ring){
        .b = b, .a = a, .at = h != NULL ? h->first[h->host_of[a->rank]] + h->place[a->rank] : a->rank};
}

/* The elements of the shard of `owner` in the whole array. */
static void shard_of(const ring *r, int owner, size_t *off, size_t *len)
{
    *off = (size_t)owner * r->a->n_elems;
    *len = r->a->n_elems;
    if (r->a->coll == SP_ALL_REDUCE)
        sp_part_range(r->a->n_elems, r->a->world_size, owner, off, len);
}

/* Append a step that receives the shard of `owner`. NULL if the shard is empty. */
static sp_step *take(ring *r, sp_step_kind kind, int owner, int queue)
{
    size_t off, len;
    sp_step *s;
    shard_of(r, owner, &off, &len);
    s = sp_plan_add(r->b, kind, owner, off, off, len);
    if (s == NULL)
        return NULL;
    sp_step_from(r->b, s, queue, rank_at(r, r->at - 1));
    s->turn = TAKES;
    s->own_before = 1; /* this rank's values come last */
    return s;
}

/* Append a step that sends the shard of `owner`, after the step before it if `after_last`. */
static sp_step *send(ring *r, sp_source source, int owner, int queue, bool after_last)
{
    size_t off, len;
    sp_step *s;
    shard_of(r, owner, &off, &len);
    s = sp_plan_add(r->b, SP_STEP_SEND, owner, off, off, len);
    if (s == NULL)
        return NULL;
    sp_step_to(r->b, s, queue, rank_at(r, r->at + 1));
    s->turn = SENDS;
    s->source = source;
    s->after = after_last ? r->b->plan->n_steps - 2 : -1;
    return s;
}

static sp_hop hop_of(const ring *r)
{
    const sp_hosts *h = r->a->hosts;
    int next = rank_at(r, r->at + 1);
    return h != NULL && h->host_of[next] != h->host_of[r->a->rank] ? SP_HOP_BETWEEN_HOSTS : SP_HOP_IN_HOST;
}

/* Returns the step that completes this rank's own shard; NULL if the shard is empty. */
static sp_step *reduce_scatter(ring *r)
{
    sp_step *s = send(r, SP_SOURCE_IN, rank_at(r, r->at - 1), SP_QUEUE_INPUT, false);
    if (s != NULL)
        s->hop = hop_of(r);
    for (int i = 2; i < r->a->world_size; i++) {
        int owner = rank_at(r, r->at - i);
        s = take(r, SP_STEP_REDUCE, owner, SP_QUEUE_INPUT);
        if (s == NULL)
            continue;
        s->adds_sums = s->gives_sum = s->keeps = true;
        send(r, SP_SOURCE_KEPT_SUM, owner, SP_QUEUE_INPUT, true)->hop = hop_of(r);
    }
    s = take(r, SP_STEP_REDUCE, r->a->rank, SP_QUEUE_INPUT);
    if (s == NULL)
        return NULL;
    s->adds_sums = true;
    if (r->a->coll == SP_REDUCE_SCATTER)
        s->dst_off = 0;
    return s;
}

/* Receive the shards of all others, and pass on those that the next rank does not have. */
static void pass_results(ring *r)
{
    for (int i = 1; i < r->a->world_size; i++) {
        int owner = rank_at(r, r->at - i);
        sp_step *s = take(r, SP_STEP_RECV, owner, SP_QUEUE_RESULT);
        if (s == NULL || i == r->a->world_size - 1)
            continue;
        s->keeps = true;
        send(r, SP_SOURCE_KEPT_MESSAGE, owner, SP_QUEUE_RESULT, true);
    }
}

static void all_gather(ring *r)
{
    sp_step *s = send(r, SP_SOURCE_IN, r->a->rank, SP_QUEUE_RESULT, false);
    s->src_off = 0;
    pass_results(r);
    sp_plan_add(r->b, SP_STEP_COPY, r->a->rank, 0, (size_t)r->a->rank * r->a->n_elems, r->a->n_elems);
}

bool sp_sched_ring(sp_plan_builder *b, const sp_plan_args *a)
{
    ring r = ring_of(b, a);
    if (a->n_elems == 0 || a->world_size == 1)
        return sp_sched_direct(b, a);
    b->plan->n_turns = 2;
    b->plan->block_slices = BLOCK_SLICES;
    if (a->coll == SP_ALL_GATHER) {
        all_gather(&r);
        return true;
    }
    if (reduce_scatter(&r) != NULL && a->coll == SP_ALL_REDUCE)
        send(&r, SP_SOURCE_OUT, a->rank, SP_QUEUE_RESULT, true)->hop = SP_HOP_GATHER;
    if (a->coll == SP_ALL_REDUCE)
        pass_results(&r);
    return true;
}
