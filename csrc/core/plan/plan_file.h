/* plan_file.h - the plans of a file that one group uses (docs/SCHEDULES.md). Reading, hash, choice by ranks and hosts, and
 * the check are here; plan_text.h has the text. */
#ifndef SP_PLAN_FILE_H
#define SP_PLAN_FILE_H

#include "core/plan/plan_owners.h"

/* One plan of the group. It is checked. */
typedef struct sp_written_plan {
    sp_plan_head head;
    sp_proof proof;
    sp_owners owners;
    sp_plan *plan; /* of this rank; NULL: the file has none */
} sp_written_plan;

typedef struct sp_plan_set sp_plan_set;

/* Read a file into memory, and check its first line. Errors: SETTING, NOMEM. */
spccl_status sp_plan_set_read(const char *path, sp_plan_set **out);
void sp_plan_set_destroy(sp_plan_set *set); /* accepts NULL */
/* FNV-1a of the bytes of a text; never 0. */
uint64_t sp_plan_hash(const void *text, size_t bytes);
/* That of the file. */
uint64_t sp_plan_set_hash(const sp_plan_set *set);
/* The path without folders. */
const char *sp_plan_set_name(const sp_plan_set *set);
/* Check every plan that fits these ranks and hosts, keep this rank's steps, and free the text. hosts NULL: one host.
 * Errors: SETTING (the text names file, plan, rank, step), NOMEM. */
spccl_status sp_plan_set_select(sp_plan_set *set, int rank, int world_size, const sp_hosts *hosts);
/* NULL: the file has no plan for this collective. root: of a broadcast. */
const sp_written_plan *sp_plan_set_find(const sp_plan_set *set, sp_coll coll, int root);
/* Call fn for each plan. */
void sp_plan_set_each(const sp_plan_set *set, void (*fn)(void *ctx, const sp_written_plan *plan), void *ctx);

/* Check a plan that was read, and note which of its steps may get sums. Errors: SETTING, NOMEM. */
spccl_status sp_plan_check_written(const sp_plan_head *head, sp_plan *const *plans, sp_proof *out);
/* Make the plan for n_elems: steps get elements, and those of empty chunks are left out. Errors: NOMEM. */
spccl_status sp_plan_place(const sp_plan *read, const sp_plan_head *head, size_t n_elems, sp_plan **out);

#endif
