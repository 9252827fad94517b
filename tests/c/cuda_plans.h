/* cuda_plans.h - plan files for tests of GPU collectives: chunks with any owners, or every rank adds all. All steps of a
 * rank take turns, chunk by chunk. */
#ifndef SP_CUDA_PLANS_H
#define SP_CUDA_PLANS_H

#include "cuda_cases.h"

#include <unistd.h>

struct owned {
    int n_ranks, per_host; /* per_host 0: any hosts, and results go directly; else relays pass them on */
    int n_chunks;
    bool one_hop;   /* all_reduce: every rank adds all chunks */
    bool own_last;  /* not in rank order, so no GPU runs it */
    int owners[64]; /* by chunk */
    int n_steps;    /* of this rank, so far */
    FILE *f;
};

static inline void write_step(struct owned *p, const char *what, int chunk)
{
    p->n_steps++;
    fprintf(p->f, "%s chunk=%d", what, chunk);
}

/* " to=1,2@queue": all ranks for which `gets` is set; nothing if there is none. */
static inline void write_ranks(const struct owned *p, const char *field, uint64_t set, const char *queue)
{
    if (set == 0)
        return;
    fprintf(p->f, " %s=", field);
    for (int r = 0; r < p->n_ranks; r++)
        if ((set >> r & 1) != 0)
            fprintf(p->f, "%d%s", r, set >> r == 1 ? "@" : ",");
    fprintf(p->f, "%s", queue);
}

static inline uint64_t all_but(const struct owned *p, int rank)
{
    return (UINT64_MAX >> (64 - p->n_ranks)) & ~(UINT64_C(1) << rank);
}

/* From whom `rank` takes the result of `owner`. */
static inline int result_from(const struct owned *p, int owner, int rank)
{
    int relay = p->per_host == 0 ? rank : rank / p->per_host * p->per_host + owner % p->per_host;
    return p->per_host == 0 || rank / p->per_host == owner / p->per_host || relay == rank ? owner : relay;
}

static inline uint64_t results_to(const struct owned *p, int owner, int rank, int root)
{
    uint64_t set = 0;
    for (int r = 0; r < p->n_ranks; r++)
        if (r != owner && r != root && result_from(p, owner, r) == rank)
            set |= UINT64_C(1) << r;
    return set;
}

static inline void write_sum(struct owned *p, int rank, int chunk, int owner, bool has_results)
{
    uint64_t others = all_but(p, rank);
    bool everywhere = p->one_hop && has_results;
    if (everywhere || rank != owner) {
        write_step(p, "send", chunk);
        fprintf(p->f, " src=in turn=0");
        write_ranks(p, "to", everywhere ? others : UINT64_C(1) << owner, "input\n");
    }
    if (everywhere || rank == owner) {
        write_step(p, "reduce", chunk);
        write_ranks(p, "from", others, "input");
        fprintf(p->f, " own=in at=%d out turn=0", p->own_last ? p->n_ranks - 1 : rank);
        if (everywhere)
            fprintf(p->f, " after=%d", p->n_steps - 2);
        else if (has_results)
            write_ranks(p, "to", results_to(p, owner, rank, -1), "result");
        fprintf(p->f, "\n");
    }
}

/* In a broadcast an owner takes the chunk from the root. */
static inline void write_result(struct owned *p, int rank, int chunk, int owner, int from, int root)
{
    write_step(p, "recv", chunk);
    write_ranks(p, "from", UINT64_C(1) << from, rank == owner ? "input" : "result");
    fprintf(p->f, " out turn=0");
    write_ranks(p, "to", results_to(p, owner, rank, root), "result");
    fprintf(p->f, "\n");
}

static inline void write_chunk(struct owned *p, enum coll coll, int rank, int chunk, int root)
{
    bool blocks = coll == ALL_GATHER || coll == REDUCE_SCATTER;
    int owner = blocks ? chunk : coll == BROADCAST && p->per_host != 0 ? root : p->owners[chunk];
    if (coll == ALL_REDUCE || coll == REDUCE_SCATTER)
        write_sum(p, rank, chunk, owner, coll == ALL_REDUCE);
    if (coll == BROADCAST && rank == root) {
        write_step(p, "send", chunk);
        fprintf(p->f, " src=in turn=0");
        write_ranks(p, "to", owner == root ? results_to(p, root, root, root) : UINT64_C(1) << owner,
                    owner == root ? "result\n" : "input\n");
    } else if (coll == BROADCAST && rank == owner) {
        write_result(p, rank, chunk, owner, root, root);
    } else if (coll == ALL_GATHER && rank == owner) {
        write_step(p, "copy", chunk);
        fprintf(p->f, "\n");
        write_step(p, "send", chunk);
        fprintf(p->f, " src=in turn=0");
        write_ranks(p, "to", results_to(p, owner, rank, -1), "result\n");
    } else if (rank != owner && coll != REDUCE_SCATTER && !(p->one_hop && coll == ALL_REDUCE)) {
        write_result(p, rank, chunk, owner, result_from(p, owner, rank), coll == BROADCAST ? root : -1);
    }
}

static inline void write_owned_plan(struct owned *p, enum coll coll, int root)
{
    bool blocks = coll == ALL_GATHER || coll == REDUCE_SCATTER;
    fprintf(p->f, "plan %s owned ranks=%d hosts=", coll_names[coll], p->n_ranks);
    if (p->per_host == 0)
        fprintf(p->f, "any");
    else
        fprintf(p->f, "%dx%d", p->n_ranks / p->per_host, p->per_host);
    fprintf(p->f, " chunks=%d block=1 slots=0", blocks ? 1 : p->n_chunks);
    if (coll == BROADCAST)
        fprintf(p->f, " root=%d", root);
    for (int r = 0; r < p->n_ranks; r++) {
        fprintf(p->f, "\nrank %d\n", r);
        p->n_steps = 0;
        for (int c = 0; c < (blocks ? p->n_ranks : p->n_chunks); c++)
            write_chunk(p, coll, r, c, root);
    }
}

/* Write a file of plans for all collectives and roots. Returns the value of SPCCL_SCHEDULE. */
static inline const char *write_owned(struct owned *p)
{
    static char setting[64];
    snprintf(setting, sizeof setting, "file:/tmp/spccl_test_owned_%d", (int)getpid());
    p->f = fopen(setting + 5, "w");
    CHECK(p->f != NULL, "%s", setting);
    if (p->f == NULL)
        return setting;
    fprintf(p->f, "spccl-plan 1\n");
    for (int coll = 0; coll < N_COLLS; coll++)
        for (int root = 0; root < (coll == BROADCAST ? p->n_ranks : 1); root++)
            write_owned_plan(p, (enum coll)coll, root);
    fprintf(p->f, "end\n");
    CHECK(fclose(p->f) == 0, "%s", setting);
    return setting;
}

/* Chunks of any owners: some ranks have none, some several, which takes as many launches. */
static inline void run_owned(int n_hosts, struct owned p, struct group g)
{
    uint64_t rng = test_rand();
    for (int c = 0; c < p.n_chunks; c++)
        p.owners[c] = (int)rand_below(&rng, (uint32_t)p.n_ranks);
    g.n_ranks = p.n_ranks;
    g.schedule = write_owned(&p);
    test_ranks_per_host = n_hosts > 1 ? p.n_ranks / n_hosts : 0;
    run_group(&g);
    test_ranks_per_host = 0;
    unlink(g.schedule + 5);
}

#endif
