/* plan_text.h - reads the text of plan files (docs/SCHEDULES.md). The text is not trusted: every number has a bound, and
 * memory is asked for only as steps are read. A plan that is read is not checked yet: sp_plan_check.
 * Errors of all functions: SETTING (the text names the line), NOMEM. */
#ifndef SP_PLAN_TEXT_H
#define SP_PLAN_TEXT_H

#include "core/plan/sched.h"

#define SP_PLAN_VERSION 1
#define SP_PLAN_FILE_BYTES_MAX ((size_t)64 << 20)
#define SP_PLAN_RANKS_MAX 64    /* sets of ranks have 64 bits */
#define SP_PLAN_CHUNKS_MAX 1024 /* of the array, or of one block: a message names its chunk in 16 bits */
#define SP_PLAN_STEPS_MAX 32768 /* of all ranks of a plan */
#define SP_PLAN_RANK_STEPS_MAX 4096
#define SP_PLAN_KEPT_MAX 128 /* slices that a rank keeps: slots times block */
#define SP_PLAN_BLOCK_MAX 16

/* A line "plan ...". */
typedef struct sp_plan_head {
    sp_coll coll;
    char name[32];
    int n_ranks;
    int n_hosts, per_host; /* n_hosts 0: any hosts */
    int n_chunks;
    int block_slices, n_slots;
    int root; /* of a broadcast */
    int line;
} sp_plan_head;

typedef struct sp_plan_reader {
    const char *at, *end;
    int line; /* of the line that `at` is on */
} sp_plan_reader;

/* Check the first line. The text stays the caller's. */
spccl_status sp_plan_text_open(const char *text, size_t bytes, sp_plan_reader *out);
/* Go to the next plan. *found is false at the end of the file. */
spccl_status sp_plan_text_next(sp_plan_reader *r, sp_plan_head *head, bool *found);
/* Read the steps of the plan whose head was just read. plans [head->n_ranks]: the caller destroys each. Their steps have
 * chunks, but no elements yet: sp_plan_place (plan_file.h). */
spccl_status sp_plan_text_steps(sp_plan_reader *r, const sp_plan_head *head, sp_plan **plans);

#endif
