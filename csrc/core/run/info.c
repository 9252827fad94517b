/* info.c - spccl_info and spccl_version: the kernels, transports, schedules and parts of this build, and every
 * setting. */
#include "core/base/abi.h"
#include "core/base/env.h"
#include "core/contract/transport.h"
#include "core/format/kernel_table.h"
#include "core/plan/tune_coll.h"
#include "core/run/exec.h"
#include "core/run/gpu_part.h"
#include "core/run/profile_file.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *why;
} transport_why[] = {
    {"inproc", "ranks that are threads of one process"},
    {"shm", "processes of one host: shared memory without a name, so that none is left behind"},
};

static bool kernel_entry(size_t i, spccl_info_entry *out)
{
    const sp_kernels *chosen = NULL;
    sp_kernels_info k;
    if (!sp_kernels_describe(i, &k))
        return false;
    *out = (spccl_info_entry){
        .kind = "kernels", .name = k.name, .value = k.usable ? "in" : "absent", .why = k.why};
    if (sp_kernels_pick(&chosen) == SPCCL_OK && k.usable && chosen->name == k.name)
        out->value = "in, chosen";
    return true;
}

static bool transport_entry(size_t i, spccl_info_entry *out)
{
    for (size_t j = 0; j <= i; j++)
        if (sp_transports[j] == NULL)
            return false;
    *out = (spccl_info_entry){.kind = "transport", .name = sp_transports[i]->name, .value = "in", .why = ""};
    if (sp_transports[i]->inform != NULL)
        sp_transports[i]->inform(&out->value, &out->why);
    for (size_t j = 0; j < sizeof transport_why / sizeof transport_why[0]; j++)
        if (strcmp(transport_why[j].name, out->name) == 0)
            out->why = transport_why[j].why;
    return true;
}

static char memory_text[96];

static void write_memory_text(void)
{
    size_t few = 4 * sp_tune_queue_bytes(2), many = 31 * 4 * sp_tune_queue_bytes(32);
    snprintf(memory_text, sizeof memory_text, "%zuM per peer, %zuM per rank at 32 ranks", few >> 20,
             many >> 20);
}

/* Two queues, each with a ring to send and one to receive. */
static spccl_info_entry memory_entry(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, write_memory_text);
    return (spccl_info_entry){
        .kind = "part",
        .name = "queue memory",
        .value = memory_text,
        .why =
            "between hosts, with default SPCCL_DEBUG_QUEUE_BYTES: held by tcp; registered by ib and ncclnet"};
}

static spccl_info_entry order_entry(void)
{
    return (spccl_info_entry){.kind = "part",
                              .name = "transport of a pair",
                              .value = sp_env_text(SP_ENV_TRANSPORTS),
                              .why =
                                  "the first that reaches the peer; in the default order a later one whose "
                                  "known rate is more than twice as high is taken instead"};
}

_Static_assert(SP_PLAN_KEPT_MAX == 128 && SP_EXEC_ACTIVE_MAX == 8, "the text below, and docs/SCHEDULES.md");

/* Which file SPCCL_SCHEDULE names. Groups read it when they are made. */
static spccl_info_entry plans_entry(void)
{
    const char *text = sp_env_text(SP_ENV_SCHEDULE);
    bool is_file = strncmp(text, SP_TUNE_FILE, strlen(SP_TUNE_FILE)) == 0;
    return (spccl_info_entry){
        .kind = "schedule",
        .name = "file",
        .value = is_file ? text + strlen(SP_TUNE_FILE) : "in",
        .why =
            is_file
                ? "SPCCL_SCHEDULE; collectives and groups that it has no plan for take the automatic choice "
                  "(spccl_comm_describe_schedule, which says of each plan whether GPUs can run it); a call "
                  "keeps at most 128 slices: 32 MiB of float32, 80 "
                  "MiB of "
                  "one-byte elements; a group works on at most 8 calls at a time"
                : "plans from a text file: only if SPCCL_SCHEDULE=file:PATH or spccl_config.schedule names "
                  "it"};
}

/* Whether groups of this process tune, and the profile. */
static spccl_info_entry tuner_entry(void)
{
    static _Thread_local char profile_text[600];
    const char *text = sp_env_text(SP_ENV_SCHEDULE), *path = text + strlen(SP_TUNE_PROFILE);
    spccl_info_entry e = {
        .kind = "schedule",
        .name = "tuner",
        .value = "off",
        .why = "SPCCL_SCHEDULE=tune: some calls try another candidate or slice size, and times of "
               "calls correct the choice; saved: tune:PATH"};
    if (strncmp(text, SP_TUNE_PROFILE, strlen(SP_TUNE_PROFILE)) == 0) {
        e.value = "on, with a profile";
        sp_profile_file_describe(path, profile_text, sizeof profile_text);
        e.why = profile_text;
    } else if (strcmp(text, SP_TUNE_ON) == 0) {
        e.value = "on";
    }
    return e;
}

static bool schedule_entry(size_t i, spccl_info_entry *out)
{
    const char *forced = sp_env_text(SP_ENV_SCHEDULE);
    if (i == SP_SCHED_FILE + 1) {
        *out = tuner_entry();
        return true;
    }
    if (i == SP_SCHED_FILE) {
        *out = plans_entry();
        return true;
    }
    *out = (spccl_info_entry){.kind = "schedule", .name = sp_schedule_name((sp_schedule)i), .value = "in"};
    if (sp_schedule_adds_in_rank_order((sp_schedule)i)) {
        out->value = "in, candidate";
        out->why = "adds in rank order; the candidate of least cost is taken (spccl_comm_describe_schedule)";
    } else {
        out->why = "adds in an order of its own: only if SPCCL_SCHEDULE or spccl_config.schedule names it";
    }
    if (strcmp(forced, out->name) == 0) {
        out->value = "in, forced";
        out->why = "SPCCL_SCHEDULE";
    }
    return true;
}

static bool part_entry(size_t i, spccl_info_entry *out)
{
    if (i == 0)
        sp_gpu_part_here.describe(out);
    else if (i == 1)
        sp_gpu_part_here.describe_memory(out);
    else
        *out = i == 2 ? memory_entry() : order_entry();
    return true;
}

static bool direct_entry(size_t i, spccl_info_entry *out)
{
    return sp_gpu_part_here.describe_direct(i, out);
}

static bool setting_entry(size_t i, spccl_info_entry *out)
{
    const sp_env_var *v = sp_env_describe((sp_env_id)i);
    *out = (spccl_info_entry){.kind = i < SP_ENV_CPU_ISA ? "setting" : "debug",
                              .name = v->name,
                              .value = sp_env_text((sp_env_id)i),
                              .why = v->help};
    return true;
}

/* The lists, in order. n: their length; 0: it ends where `entry` returns false. */
static const struct {
    bool (*entry)(size_t i, spccl_info_entry *out);
    size_t n;
} lists[] = {{kernel_entry, 0}, {transport_entry, 0}, {schedule_entry, SP_SCHED_FILE + 2},
             {part_entry, 4},   {direct_entry, 0},    {setting_entry, SP_N_ENV}};

/* Entry `i` of all lists. False if i is past the last. */
static bool find_entry(size_t i, spccl_info_entry *out)
{
    for (size_t k = 0; k < sizeof lists / sizeof *lists; k++) {
        size_t n = lists[k].n;
        spccl_info_entry e;
        while (lists[k].n == 0 && lists[k].entry(n, &e))
            n++;
        if (i < n)
            return lists[k].entry(i, out);
        i -= n;
    }
    return false;
}

spccl_status spccl_info(size_t i, spccl_info_entry *out)
{
    spccl_info_entry e;
    if (!find_entry(i, &e))
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_info: no entry %zu: it is past the last", i);
    return sp_result_copy("spccl_info_entry", &e, sizeof e, out);
}

const char *spccl_version(void)
{
    return SPCCL_VERSION_TEXT;
}
