/* test_settings.c - a bad value of an SPCCL_* variable or of an option is never ignored: it is an error, or a
 * line in the log where no error can be returned. */
#include "core/base/cores.h"
#include "core/base/env.h"
#include "core/base/log.h"
#include "core/plan/tune_coll.h"
#include "core/run/comm.h"
#include "ranks.h"

#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

static bool names(const char *text, const char *name, const char *value)
{
    return strstr(text, name) != NULL && strstr(text, value) != NULL;
}

/* Make a group of one rank. Returns the status. */
static spccl_status make_group(const spccl_config *config)
{
    spccl_comm *comm = NULL;
    spccl_status st = spccl_comm_create(NULL, 0, 1, config, &comm);
    CHECK((st == SPCCL_OK) == (comm != NULL), "status %d, comm %p", (int)st, (void *)comm);
    CHECK_OK(spccl_comm_destroy(comm));
    return st;
}

static void refused(const char *name, const char *value)
{
    spccl_status st;
    setenv(name, value, 1);
    st = make_group(NULL);
    CHECK(st == SPCCL_ERR_SETTING && names(spccl_last_error(), name, value), "%s=%s: %s: %s", name, value,
          spccl_status_name(st), st != SPCCL_OK ? spccl_last_error() : "");
    unsetenv(name);
}

/* Addresses are not checked here but when a rank listens: see test_addresses. Any text names a host, or
 * a device or a plugin that is not there. */
static bool is_free_text(sp_env_id id)
{
    return id == SP_ENV_TCP_ADDR || id == SP_ENV_RENDEZVOUS_ADDR || id == SP_ENV_HOST_ID ||
           id == SP_ENV_IB_DEVICE || id == SP_ENV_NET_PLUGIN;
}

static void test_every_variable(void)
{
    static const char *const no_numbers[] = {"many", "1.5", "-1", "99999999999999999999", "12X"};
    for (int i = 0; i < SP_N_ENV; i++) {
        const sp_env_var *v = sp_env_describe((sp_env_id)i);
        if (is_free_text((sp_env_id)i))
            continue;
        refused(v->name, "loud");
        for (size_t k = 0; v->max != 0 && k < sizeof no_numbers / sizeof *no_numbers; k++)
            refused(v->name, no_numbers[k]);
        setenv(v->name, v->default_text, 1);
        CHECK_OK(make_group(NULL));
        setenv(v->name, "", 1); /* as if it were not set */
        CHECK_OK(make_group(NULL));
        unsetenv(v->name);
    }
}

/* Every word that a help text names is accepted, and no part of a word is. */
static void test_choices(void)
{
    for (int i = 0; i < SP_N_ENV; i++) {
        const sp_env_var *v = sp_env_describe((sp_env_id)i);
        char words[128], *at = words, *word;
        if (v->choices == NULL || i == SP_ENV_CPU_ISA) /* the ISAs depend on the machine */
            continue;
        snprintf(words, sizeof words, "%s", v->choices);
        while ((word = strsep(&at, ", ")) != NULL) {
            if (word[0] == '\0')
                continue;
            if (strcmp(word, "file:PATH") == 0) { /* any text after the colon, and there is no such file */
                refused(v->name, word);
                continue;
            }
            setenv(v->name, word, 1);
            CHECK_OK(make_group(NULL));
            if (strcmp(word, "tune:PATH") == 0) /* likewise; no file yet is no error */
                snprintf(word, sizeof "tune:x", "tune:x");
            word[strlen(word) - 1] = '\0';
            refused(v->name, word[0] != '\0' ? word : "?");
        }
        unsetenv(v->name);
    }
    refused("SPCCL_TRANSPORTS", "shm,carrier-pigeon");
}

static void nothing(struct rank_ctx *c)
{
    (void)c;
}

static void test_addresses(void)
{
    struct rank_ctx ctx[2];
    spccl_config config = SPCCL_CONFIG_INIT;
    spccl_unique_id id;
    config.transports = "tcp";
    config.timeout_ms = 20000;
    setenv("SPCCL_TCP_ADDR", "nowhere", 1);
    run_ranks(2, &config, nothing, NULL, ctx);
    for (int r = 0; r < 2; r++)
        CHECK(ctx[r].created != SPCCL_OK && names(ctx[r].error, "SPCCL_TCP_ADDR", "nowhere"), "%d %s",
              (int)ctx[r].created, ctx[r].error);
    unsetenv("SPCCL_TCP_ADDR");
    setenv("SPCCL_RENDEZVOUS_ADDR", "nowhere", 1);
    CHECK(spccl_get_unique_id(&id) != SPCCL_OK &&
              names(spccl_last_error(), "SPCCL_RENDEZVOUS_ADDR", "nowhere"),
          "%s", spccl_last_error());
    unsetenv("SPCCL_RENDEZVOUS_ADDR");
}

/* What a child process that calls `body` writes to stderr. */
static const char *stderr_of(void (*body)(void))
{
    static char text[2000];
    size_t used = 0;
    ssize_t n;
    int fds[2];
    pid_t child;
    CHECK(pipe(fds) == 0, "pipe");
    fflush(stdout);
    if ((child = fork()) == 0) {
        dup2(fds[1], STDERR_FILENO);
        body();
        _exit(0);
    }
    close(fds[1]);
    while ((n = read(fds[0], text + used, sizeof text - 1 - used)) > 0)
        used += (size_t)n;
    text[used] = '\0';
    close(fds[0]);
    CHECK(waitpid(child, NULL, 0) == child, "waitpid");
    return text;
}

static void log_loudly(void)
{
    setenv("SPCCL_LOG", "loud", 1);
    sp_log(SP_LOG_INFO, 3, "not shown");
    sp_log(SP_LOG_WARN, 3, "a warning");
}

/* The log cannot return an error, so a bad SPCCL_LOG gives a line in the log. */
static void test_log_level(void)
{
    const char *text = stderr_of(log_loudly);
    CHECK(names(text, "SPCCL_LOG=\"loud\"", "off, error, warn, info") && strstr(text, "a warning") != NULL &&
              strstr(text, "not shown") == NULL,
          "\"%s\"", text);
}

#define LOOK_TWICE "TEST_SETTINGS_LOOK_TWICE"

static void warn_twice(void)
{
    setenv("SPCCL_LOG", "warn", 1);
    setenv("SPCCL_FORMT", "dense", 1);
    setenv("SPCCL_FORMAT", "dense", 1);
    setenv("SPCCL_SPIN_US", "30", 1);
    setenv("SPCCL_TRACE", "0", 1);
    setenv("SPCCL_ORDER", "group", 1);
    setenv("SPCCL_TEST_SEED", "1", 1);
    setenv(LOOK_TWICE, "1", 1);
    execl("/proc/self/exe", "test_settings", NULL); /* it calls look_twice */
}

static void look_twice(void)
{
    (void)sp_log_on(SP_LOG_WARN);
    sp_env_warn_names();
    sp_env_warn_names();
    _exit(0);
}

static bool warned_once(const char *text, const char *name, const char *why)
{
    const char *first = strstr(text, name);
    return first != NULL && strstr(first + 1, name) == NULL && strstr(first, why) != NULL;
}

/* A variable whose name is misspelt, old or retired gets one line, whatever number of groups the process makes. */
static void test_names(void)
{
    const char *text = stderr_of(warn_twice);
    CHECK(warned_once(text, "SPCCL_FORMT", "spccl info") &&
              warned_once(text, "SPCCL_SPIN_US", "is now SPCCL_DEBUG_SPIN_US") &&
              warned_once(text, "SPCCL_TRACE", "has no effect"),
          "\"%s\"", text);
    CHECK(strstr(text, "SPCCL_FORMAT,") == NULL && strstr(text, "SPCCL_ORDER") == NULL &&
              strstr(text, "SPCCL_TEST") == NULL,
          "\"%s\"", text);
}

/* An old name counts where the new one is unset, and is the name in the error. */
static void test_old_names(void)
{
    int64_t n = 0;
    for (int i = SP_ENV_CPU_ISA; i < SP_N_ENV; i++) { /* the new name would win */
        unsetenv(sp_env_describe((sp_env_id)i)->name);
        refused(sp_env_describe((sp_env_id)i)->old_name, "loud");
    }
    setenv("SPCCL_SPIN_US", "30", 1);
    CHECK(sp_env_number(SP_ENV_SPIN_US, &n) == SPCCL_OK && n == 30, "old name: %lld", (long long)n);
    setenv("SPCCL_DEBUG_SPIN_US", "40", 1);
    CHECK(sp_env_number(SP_ENV_SPIN_US, &n) == SPCCL_OK && n == 40, "both names: %lld", (long long)n);
    unsetenv("SPCCL_SPIN_US");
    unsetenv("SPCCL_DEBUG_SPIN_US");
    setenv("SPCCL_CUDA_BETWEEN_HOSTS", "0", 1);
    CHECK(strcmp(sp_env_text(SP_ENV_CUDA_ROUTE), "one-host") == 0, "0: %s", sp_env_text(SP_ENV_CUDA_ROUTE));
    setenv("SPCCL_CUDA_BETWEEN_HOSTS", "1", 1);
    CHECK(strcmp(sp_env_text(SP_ENV_CUDA_ROUTE), "spccl") == 0, "1: %s", sp_env_text(SP_ENV_CUDA_ROUTE));
    refused("SPCCL_CUDA_BETWEEN_HOSTS", "2");
    refused("SPCCL_CUDA_BETWEEN_HOSTS", "nccl"); /* a word of the new name alone */
    refused("SPCCL_CUDA_ROUTE", "1");
}

/* ---- options ---- */

static void refused_config(const char *field, spccl_config config)
{
    spccl_status st = make_group(&config);
    CHECK((st == SPCCL_ERR_ARG || st == SPCCL_ERR_SETTING) && strstr(spccl_last_error(), field) != NULL,
          "%s: %s: %s", field, spccl_status_name(st), st != SPCCL_OK ? spccl_last_error() : "");
}

#define REFUSED(text, assignment)                                                                            \
    do {                                                                                                     \
        spccl_config c = SPCCL_CONFIG_INIT;                                                                  \
        c.assignment;                                                                                        \
        refused_config(text, c);                                                                             \
    } while (0)

static void test_config(void)
{
    spccl_config ring = SPCCL_CONFIG_INIT;
    REFUSED("timeout_ms", timeout_ms = -1);
    REFUSED("carrier-pigeon", transports = "carrier-pigeon");
    REFUSED("slice", slice_bytes = 12);
    REFUSED("n_sockets", n_sockets = 17);
    REFUSED("format", format = SPCCL_FORMAT_EMPTY);
    REFUSED("rings", schedule = "rings");
    ring.schedule = "ring";
    CHECK_OK(make_group(&ring));
}

/* Bad arguments are refused before the rank connects. */
static void test_init_rank(void)
{
    spccl_config c = SPCCL_CONFIG_INIT;
    spccl_unique_id id = {{0}};
    spccl_comm *comm = NULL;
    c.timeout_ms = -1;
    CHECK(spccl_comm_init_rank(&id, 0, 2, &c, &comm) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "timeout_ms") != NULL,
          "%s", spccl_last_error());
    c = (spccl_config)SPCCL_CONFIG_INIT;
    CHECK(spccl_comm_init_rank(&id, 2, 2, &c, &comm) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "rank 2") != NULL,
          "%s", spccl_last_error());
    CHECK(comm == NULL, "out was touched");
}

static void count_hosts(struct rank_ctx *ctx)
{
    int want = *(const int *)ctx->arg,
        got = ctx->comm->links.hosts == NULL ? 1 : ctx->comm->links.hosts->n_hosts;
    CHECK(got == want, "rank %d: %d hosts, wanted %d", ctx->rank, got, want);
}

/* config.host_id names a host; SPCCL_HOST_ID, which is the same for all ranks here, wins. */
static void test_host_id(void)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_host host;
    uint8_t a[SP_HOST_ID_BYTES], b[SP_HOST_ID_BYTES], none[SP_HOST_ID_BYTES];
    int n_hosts = 3;
    test_ranks_per_host = 1;
    run_ranks(3, NULL, count_hosts, &n_hosts, ctx);
    setenv("SPCCL_HOST_ID", "one", 1);
    n_hosts = 1;
    run_ranks(3, NULL, count_hosts, &n_hosts, ctx);
    CHECK_OK(spccl_get_host("a", &host));
    CHECK_OK(sp_host_identity("one", a));
    CHECK(memcmp(a, host.bytes, sizeof a) == 0, "SPCCL_HOST_ID does not win");
    unsetenv("SPCCL_HOST_ID");
    CHECK(spccl_get_host("a", NULL) == SPCCL_ERR_ARG, "out is NULL");
    CHECK_OK(spccl_get_host("a", &host));
    test_ranks_per_host = 0;
    CHECK_OK(sp_host_identity("a", a));
    CHECK(memcmp(a, host.bytes, sizeof a) == 0, "a public identity is another one");
    CHECK_OK(sp_host_identity("b", b));
    CHECK_OK(sp_host_identity("", none));
    CHECK(memcmp(a, b, sizeof a) != 0 && memcmp(a, none, sizeof a) != 0, "two names give one identity");
    CHECK(sp_host_same_kernel(a, b) && sp_host_same_kernel(a, none), "one kernel has two identities");
    CHECK_OK(sp_host_identity("a", b));
    CHECK(memcmp(a, b, sizeof a) == 0, "one name gives two identities");
}

static void test_queue_bytes(void)
{
    static const char *const bad[] = {"1", "4096", "65535", "100000", "3145728"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refused("SPCCL_DEBUG_QUEUE_BYTES", bad[i]);
    for (int n = 1; n <= 4096; n++) {
        size_t bytes = sp_tune_queue_bytes(n), slice = sp_tune_slice_bytes(bytes);
        CHECK((bytes & (bytes - 1)) == 0 && bytes >= 8 * slice && slice >= SP_SLICE_BYTES_MIN,
              "%d ranks: %zu, %zu", n, bytes, slice);
        CHECK(n > 12 || bytes == (size_t)1 << 20, "%d ranks: %zu", n, bytes);
        CHECK(n > 48 || 2 * SP_N_QUEUES * bytes * (size_t)n <= (size_t)48 << 20, "%d ranks: %zu", n, bytes);
    }
}

/* The limit of a container, in whole cores. */
static void test_cores(void)
{
    static const struct {
        const char *text;
        uint32_t cores;
    } limits[] = {{"max 100000\n", 0},
                  {"400000 100000\n", 4},
                  {"350000 100000", 4},
                  {"50000 100000", 1},
                  {"100000 0", 0},
                  {"100000", 0},
                  {"", 0},
                  {"x 100000", 0}};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
        CHECK(sp_cores_of_cpu_max(limits[i].text) == limits[i].cores, "cpu.max \"%s\": %u cores, wanted %u",
              limits[i].text, sp_cores_of_cpu_max(limits[i].text), limits[i].cores);
    CHECK(sp_usable_cores() >= 1 && sp_usable_cores() <= (uint32_t)sysconf(_SC_NPROCESSORS_CONF), "%u cores",
          sp_usable_cores());
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"log_level",
         test_log_level}, /* first: SPCCL_LOG is read once, and unknown names are warned of once */
        {"names", test_names},
        {"old_names", test_old_names},
        {"every_variable", test_every_variable},
        {"choices", test_choices},
        {"addresses", test_addresses},

        {"config", test_config},
        {"init_rank", test_init_rank},
        {"host_id", test_host_id},
        {"queue_bytes", test_queue_bytes},
        {"cores", test_cores},
        {NULL, NULL}};
    if (getenv(LOOK_TWICE) != NULL)
        look_twice();
    setenv("SPCCL_LOG", "off", 0);
    return test_main(cases, argc, argv);
}
