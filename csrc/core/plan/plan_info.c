/* plan_info.c - spccl_plan_check: the check of plan files for the command and for programs. */
#include "core/base/abi.h"
#include "core/base/mem.h"
#include "core/plan/plan_file.h"
#include "spccl_experimental.h"

#include <stdio.h>
#include <string.h>

/* Say what GPUs cannot do of a plan that is right. */
static spccl_status look_for_gpus(const sp_plan_head *h, sp_plan *const *plans, spccl_plan_info *info)
{
    static const char *const results[] = {
        [SP_RESULTS_NONE] = "none", [SP_RESULTS_DIRECT] = "direct", [SP_RESULTS_RELAYED] = "relayed"};
    int host_of[SP_PLAN_RANKS_MAX];
    sp_hosts *hosts = NULL;
    sp_owners owners;
    for (int r = 0; r < h->n_ranks; r++)
        host_of[r] = h->n_hosts > 1 ? r / h->per_host : 0;
    SP_TRY(sp_hosts_create(host_of, h->n_ranks, &hosts));
    sp_plan_find_owners(h, plans, hosts, &owners);
    sp_free(hosts);
    _Static_assert(sizeof info->no_gpus == sizeof owners.why_not, "the same text");
    memcpy(info->no_gpus, owners.why_not, sizeof owners.why_not);
    if (owners.why_not[0] == '\0')
        snprintf(info->gpu_results, sizeof info->gpu_results, "%s", results[owners.results]);
    return SPCCL_OK;
}

/* Read and check the plan whose head was just read. */
static spccl_status check_plan(sp_plan_reader *r, const sp_plan_head *h, spccl_plan_info *info)
{
    sp_plan *plans[SP_PLAN_RANKS_MAX];
    sp_proof proof = {0};
    spccl_status st;
    SP_TRY(sp_plan_text_steps(r, h, plans));
    st = sp_plan_check_written(h, plans, &proof);
    if (st == SPCCL_OK)
        st = look_for_gpus(h, plans, info);
    for (int i = 0; i < h->n_ranks; i++) {
        info->n_steps = plans[i]->n_steps > info->n_steps ? plans[i]->n_steps : info->n_steps;
        sp_plan_destroy(plans[i]);
    }
    memcpy(info->name, h->name, sizeof info->name);
    info->collective = sp_coll_name(h->coll);
    info->n_ranks = h->n_ranks;
    info->n_hosts = h->n_hosts;
    info->root = h->root;
    info->n_chunks = h->n_chunks;
    info->rank_order = proof.rank_order;
    info->sends_sums = proof.sends_sums;
    info->n_hops = proof.n_hops;
    info->kept_slices = h->n_slots * h->block_slices;
    info->chunks_sent = proof.chunks_sent_max;
    info->n_messages = proof.n_messages;
    info->line = (uint64_t)h->line;
    return st;
}

spccl_status spccl_plan_check(const void *text, size_t bytes, size_t i, spccl_plan_info *out)
{
    spccl_plan_info info = {0};
    sp_plan_reader r;
    sp_plan_head h = {0};
    bool found = false;
    if (text == NULL || out == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_plan_check: %s is NULL", text == NULL ? "text" : "out");
    info.hash = sp_plan_hash(text, bytes);
    SP_TRY(sp_plan_text_open(text, bytes, &r));
    for (size_t at = 0; at <= i; at++) {
        SP_TRY(sp_plan_text_next(&r, &h, &found));
        if (!found)
            return SP_FAIL(SPCCL_ERR_ARG, "spccl_plan_check: no plan %zu: the text has %zu", i, at);
    }
    SP_TRY(check_plan(&r, &h, &info));
    return sp_result_copy("spccl_plan_info", &info, sizeof info, out);
}
