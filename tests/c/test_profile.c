/* test_profile.c - profiles of the tuner (profile.h): what is wrong with a text; the hashes that ranks compare; files of groups of two ranks
 * (profile_file.h). test_tuner.c has what the tuner takes from them. */
#include "captured_log.h"
#include "core/run/comm.h"
#include "core/run/profile_file.h"
#include "ranks.h"

#include <stdbool.h>
#include <sys/stat.h>

#define MACHINE "version=0 cpu=test"

static sp_profile_line line_of(uint16_t n_ranks, uint16_t n_hosts, uint32_t slice_elems)
{
    return (sp_profile_line){.key = {SP_ALL_REDUCE, SPCCL_FLOAT32, 3, 1000},
                             .n_ranks = n_ranks,
                             .n_hosts = n_hosts,
                             .per_host = (uint16_t)(n_ranks / n_hosts),
                             .best = {SP_SCHED_DIRECT, slice_elems},
                             .ratio = 0.9};
}

/* What groups of another shape have learnt changes no hash that this group compares; the order of lines does not either. */
static void test_profile_hash(void)
{
    static sp_profile a, b;
    uint64_t x[SP_PROFILE_HASHES], y[SP_PROFILE_HASHES];
    sp_profile_line of_world = line_of(8, 4, 4096), of_host = line_of(8, 1, 4096), others[2];
    others[0] = line_of(4, 1, 4096);
    others[1] = line_of(8, 8, 8192);
    sp_profile_put(&a, &of_world);
    sp_profile_put(&a, &of_host);
    sp_profile_put(&b, &others[0]);
    sp_profile_put(&b, &others[1]);
    sp_profile_put(&b, &of_host);
    sp_profile_put(&b, &of_world);
    b.lines[3].ratio = 0.5;
    sp_profile_hash(&a, 8, x);
    sp_profile_hash(&b, 8, y);
    CHECK(x[0] == y[0] && x[1] != y[1] && x[2] == y[2] && x[0] != 0 && x[1] == 0 && x[2] != 0, "hashes");
    b.lines[3].best.slice_elems = 8192;
    sp_profile_hash(&b, 8, y);
    CHECK(x[0] == y[0] && x[2] != y[2], "another choice on 4 hosts");
    for (int i = 0; i < 2; i++) { /* two lines are equally near */
        a.n = 0;
        of_world.key.n_elems = i == 0 ? 1000 : 4000;
        sp_profile_put(&a, &of_world);
        of_world.key.n_elems = i == 0 ? 4000 : 1000;
        sp_profile_put(&a, &of_world);
        of_world.key.n_elems = 2000;
        CHECK(sp_profile_find(&a, &of_world)->key.n_elems == 1000, "order %d", i);
    }
}

#define HEAD "spccl-profile 1\nmachine " MACHINE "\n"
#define BEST "best coll=all_reduce dtype=float32 ranks=4 hosts=1 per-host=4 elems=1000 density=1/64 "

static void test_bad_profiles(void)
{
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"", "does not begin with"},
        {"spccl-plans 1\n", "does not begin with"},
        {"spccl-profile 2\nmachine " MACHINE "\n", "version 2, this library reads version 1"},
        {"spccl-profile 1\n", "line 2: wanted \"machine\""},
        {"spccl-profile 1\nmachine version=0 cpu=other\n",
         "another machine, or by another version: version=0 cpu=other"},
        {HEAD "worst\n", "line 3: wanted \"best\""},
        {HEAD "best coll=all_to_all\n", "line 3: wanted coll="},
        {HEAD "best coll=all_reduce dtype=float33\n", "line 3: wanted dtype="},
        {HEAD "best coll=all_reduce dtype=float32 ranks=1 hosts=1 per-host=1\n", "2 to 4096 ranks"},
        {HEAD "best coll=all_reduce dtype=float32 ranks=4 hosts=5 per-host=1\n", "2 to 4096 ranks"},
        {HEAD "best coll=all_reduce dtype=float32 ranks=4 hosts=1 per-host=4 elems=0\n", "wanted elems="},
        {HEAD "best coll=all_reduce dtype=float32 ranks=4 hosts=1 per-host=4 elems=99999999999999999999\n",
         "wanted elems="},
        {HEAD "best coll=all_reduce dtype=float32 ranks=4 hosts=1 per-host=4 elems=9 density=1/3\n",
         "power of two"},
        {HEAD BEST "schedule=ring slice=32768 time=0.900\n",
         "line 3: wanted schedule="}, /* not in rank order */
        {HEAD "best coll=all_gather dtype=float32 ranks=4 hosts=1 per-host=4 elems=9 density=1/1 "
              "schedule=oneshot\n",
         "which this collective has"},
        {HEAD BEST "schedule=direct slice=100 time=0.900\n", "multiple of 4096"},
        {HEAD BEST "schedule=direct slice=8388608 time=0.900\n", "at most 16 MiB"},
        {HEAD BEST "schedule=direct slice=32768 time=fast\n", "wanted time="},
        {HEAD BEST "schedule=direct slice=32768\n", "wanted time="},
        {HEAD BEST "schedule=direct slice=32768 time=0.900 more\n", "nothing more"},
    };
    static sp_profile p;
    static char large[SP_PROFILE_BYTES_MAX + 1];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK_FAILS(sp_profile_parse(cases[i].text, strlen(cases[i].text), MACHINE, &p), SPCCL_ERR_SETTING,
                    cases[i].error);
    CHECK_FAILS(sp_profile_parse(large, sizeof large, MACHINE, &p), SPCCL_ERR_SETTING,
                "more than 65536 bytes");
    CHECK_OK(sp_profile_parse(HEAD "\n# a comment\n", strlen(HEAD) + 13, MACHINE, &p));
}

/* ---- files: groups of two ranks ---- */

static char folder[200], path_of[2][260], schedule_of[2][280];

static void write_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    CHECK(f != NULL && fputs(text, f) >= 0 && fclose(f) == 0, "%s", path);
}

static void set_profile(const struct rank_ctx *c, spccl_config *config)
{
    snprintf(schedule_of[c->rank], sizeof schedule_of[0], "tune:%s", path_of[c->rank]);
    config->schedule = schedule_of[c->rank];
}

static void few_calls(struct rank_ctx *c)
{
    static float buf[2][300000];
    for (int i = 0; i < 40; i++)
        CHECK_OK(
            spccl_all_reduce(c->comm, buf[c->rank], buf[c->rank], 300000, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    /* As if the trials had ended: what is to be saved. */
    for (int i = 0; i < SP_TUNER_CELLS && *(bool *)c->arg; i++) {
        sp_tuner *t = c->comm->exec.chooser->tuner;
        if (!t->cells[i].used || t->cells[i].state != SP_TUNE_TRYING)
            continue;
        t->cells[i].state = SP_TUNE_SETTLED;
        t->cells[i].usual = t->cells[i].n_arms - 1;
        t->cells[i].ratio = 0.5;
        t->n_settled++;
    }
}

static void run_two(bool learns, char *log, size_t cap, struct rank_ctx ctx[2])
{
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = 60000;
    config.transports = "inproc";
    test_rank_config = set_profile;
    begin_log();
    run_ranks(2, &config, few_calls, &learns, ctx);
    end_log(log, cap);
    test_rank_config = NULL;
    CHECK(ctx[0].created == SPCCL_OK && ctx[1].created == SPCCL_OK, "%s; %s", ctx[0].error, ctx[1].error);
}

static size_t read_text(const char *path, char *text, size_t cap)
{
    FILE *f = fopen(path, "r");
    size_t n = f != NULL ? fread(text, 1, cap - 1, f) : 0;
    if (f != NULL)
        fclose(f);
    text[n] = '\0';
    return n;
}

static void test_files(void)
{
    struct rank_ctx ctx[RANKS_CAP];
    char log[4000], text[4000], other[4010];
    snprintf(folder, sizeof folder, "/tmp/spccl-tuner-%d-XXXXXX", (int)getpid());
    CHECK(mkdtemp(folder) != NULL, "%s", folder);
    for (int r = 0; r < 2; r++)
        snprintf(path_of[r], sizeof path_of[0], "%s/profile", folder);
    run_two(true, log, sizeof log, ctx); /* there is no file yet */
    CHECK(log[0] == '\0', "%s", log);
    CHECK(read_text(path_of[0], text, sizeof text) != 0 && strstr(text, "\nbest coll=all_reduce") != NULL,
          "%s", text);
    run_two(false, log, sizeof log, ctx); /* loaded; nothing is learnt, nothing is written */
    CHECK(log[0] == '\0', "%s", log);

    snprintf(path_of[1], sizeof path_of[0], "%s/other", folder); /* what another group has learnt too */
    snprintf(other, sizeof other,
             "%.3800sbest coll=all_reduce dtype=float32 ranks=3 hosts=1 per-host=3 elems=7 density=1/8 "
             "schedule=direct slice=4096 time=0.900\n",
             text);
    write_text(path_of[1], other);
    run_two(false, log, sizeof log, ctx);
    CHECK(log[0] == '\0', "%s", log);
    unlink(path_of[1]);

    run_two(true, log, sizeof log, ctx); /* only rank 0 has the file */
    CHECK(strstr(log, "uses no profile: rank 1 has another one") != NULL &&
              strstr(log, "uses no profile: rank 0 has another one") != NULL,
          "%s", log);
    CHECK(read_text(path_of[1], other, sizeof other) == 0, "it was written");

    snprintf(other, sizeof other, "spccl-profile 1\nmachine of another%s",
             strchr(strchr(text, '\n') + 1, '\n')); /* another machine */
    for (int r = 0; r < 2; r++) {
        snprintf(path_of[r], sizeof path_of[0], "%s/other", folder);
        write_text(path_of[r], other);
    }
    run_two(true, log, sizeof log, ctx);
    CHECK(strstr(log, "is not used, and group \"world\" tunes without it: it was made on another machine") !=
              NULL,
          "%s", log);
    read_text(path_of[0], text, sizeof text);
    CHECK(strcmp(text, other) == 0, "a profile that could not be used was written over");

    for (int r = 0; r < 2; r++)
        snprintf(path_of[r], sizeof path_of[0], "%s", folder); /* a folder */
    run_two(true, log, sizeof log, ctx);
    CHECK(strstr(log, "it cannot be read") != NULL, "%s", log);
    for (int r = 0; r < 2; r++)
        snprintf(path_of[r], sizeof path_of[0], "%s/none/profile", folder);
    run_two(true, log, sizeof log, ctx);
    CHECK(strstr(log, "was not saved: ") != NULL, "%s", log);
    snprintf(path_of[0], sizeof path_of[0], "%s/other", folder);
    unlink(path_of[0]);
    snprintf(path_of[0], sizeof path_of[0], "%s/profile", folder);
    unlink(path_of[0]);
    CHECK(rmdir(folder) == 0, "something is left in %s", folder);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"profile_hash", test_profile_hash},
        {"bad_profiles", test_bad_profiles},
        {"files", test_files},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
