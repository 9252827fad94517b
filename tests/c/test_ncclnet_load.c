/* test_ncclnet_load.c - finding an NCCL net plugin, trying it in a child process, loading it: what the process, its
 * children and its environment are left with. test_ncclnet.c sends messages. */
#include "core/base/clock.h"
#include "test.h"
#include "transport/net/plugin/plugin.h"
#include "transport/net/plugin/plugin_env.h"
#include "transport/net/plugin/plugin_load.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENCE_MS 30000 /* deadline for what must happen, also on a slow machine */

/* ---- finding the file ---- */

static bool finds(const char *ours, const char *nccl, const char *end, const char *why)
{
    sp_plugin_found f;
    setenv("SPCCL_NET_PLUGIN", ours, 1);
    setenv("NCCL_NET_PLUGIN", nccl, 1);
    sp_plugin_find(&f);
    unsetenv("NCCL_NET_PLUGIN");
    if (f.found != (end != NULL) || strstr(f.why, why) == NULL)
        return false;
    return end == NULL ||
           (strlen(f.path) > strlen(end) && strcmp(f.path + strlen(f.path) - strlen(end), end) == 0);
}

/* A library for another machine comes first in the search: the one that can be loaded is found. */
static void test_other_machine(void)
{
    char folder[] = "/tmp/spccl-test-XXXXXX", file[64], path[400];
    unsigned char head[64] = {0x7f, 'E', 'L', 'F', 1, 1, 1, [18] = 3}; /* 32 bits, i386 */
    FILE *f;
    sp_plugin_found found;
    CHECK(mkdtemp(folder) != NULL, "mkdtemp");
    snprintf(file, sizeof file, "%s/libnccl-net-test_8.so", folder);
    f = fopen(file, "wb");
    CHECK(f != NULL && fwrite(head, sizeof head, 1, f) == 1 && fclose(f) == 0, "%s", file);
    snprintf(path, sizeof path, "%s:%s", folder, NET_PLUGIN_FOLDER);
    setenv("LD_LIBRARY_PATH", path, 1);
    setenv("SPCCL_NET_PLUGIN", "test_8", 1);
    sp_plugin_find(&found);
    CHECK(found.found && strncmp(found.path, NET_PLUGIN_FOLDER, strlen(NET_PLUGIN_FOLDER)) == 0, "%s: %s",
          found.path, found.why);
    setenv("SPCCL_NET_PLUGIN", file, 1); /* named by path: it is taken, and loading it says what is wrong */
    sp_plugin_find(&found);
    CHECK(found.found && strcmp(found.path, file) == 0, "%s: %s", found.path, found.why);
    unsetenv("SPCCL_NET_PLUGIN");
    unsetenv("LD_LIBRARY_PATH");
    unlink(file);
    rmdir(folder);
}

static void test_find(void)
{
    char folder[] = "/tmp/spccl-test-XXXXXX", file[64];
    CHECK(mkdtemp(folder) != NULL, "mkdtemp");
    snprintf(file, sizeof file, "%s/libnccl-net.so", folder);
    setenv("LD_LIBRARY_PATH", NET_PLUGIN_FOLDER, 1);
    CHECK(finds("test_8", "", "/libnccl-net-test_8.so", "SPCCL_NET_PLUGIN"), "by name");
    CHECK(finds("", "test_9", "/libnccl-net-test_9.so", "NCCL_NET_PLUGIN"), "NCCL's variable");
    CHECK(finds("test_8", "test_9", "/libnccl-net-test_8.so", "SPCCL_NET_PLUGIN"), "ours first");
    CHECK(finds("libnccl-net-test_8.so", "", "/libnccl-net-test_8.so", "named"), "by file name");
    CHECK(finds(NET_PLUGIN_FOLDER "/libnccl-net-test_8.so", "", "/libnccl-net-test_8.so", "named"),
          "by path");
    CHECK(finds("test_8,test_9", "", "/libnccl-net-test_8.so", "named"), "a list");
    CHECK(finds("no_such", "", NULL, "libnccl-net-no_such.so"), "a name that is not there");
    CHECK(finds("/no/such/file.so", "", NULL, "/no/such/file.so"), "a path that is not there");
    CHECK(finds("none", "test_8", NULL, "SPCCL_NET_PLUGIN=none"), "off");
    if (finds("", "", "/libnccl-net.so", "found")) /* NET_PLUGIN_FOLDER has no file of that name */
        printf("not checked, this host has a libnccl-net.so: what is said if there is none\n");
    else
        CHECK(finds("", "", NULL, "no libnccl-net.so"), "nothing is there");
    setenv("LD_LIBRARY_PATH", folder, 1);
    CHECK(symlink(NET_PLUGIN_FOLDER "/libnccl-net-test_8.so", file) == 0, "symlink");
    CHECK(finds("", "", "/libnccl-net.so", "found"), "without a name");
    unsetenv("LD_LIBRARY_PATH");
    unlink(file);
    rmdir(folder);
}

/* ---- the environment ---- */

extern char **environ;

static bool lists(const sp_plugin_env_changes *c, const char *name)
{
    for (int i = 0; i < c->n; i++)
        if (strcmp(c->names[i], name) == 0)
            return true;
    return false;
}

/* Names may be there twice: the first entry counts, as for getenv. */
static void test_changes_are_found(void)
{
    char kept[] = "TWICE=1", second[] = "TWICE=2", other[] = "TWICE=3", old[] = "CHANGED=1",
         new[] = "CHANGED=2";
    char gone[] = "REMOVED=", added[] = "ADDED=1", prefix[] = "CHANGED_NOT=1", long_name[100];
    char *before[] = {kept, old, gone, second, prefix, NULL},
         *after[] = {prefix, kept, other, new, added, NULL, NULL};
    char **real = environ;
    sp_plugin_env_changes c;
    memset(long_name, 'L', sizeof long_name);
    memcpy(long_name + sizeof long_name - 3, "=1", 3);
    environ = after;
    sp_plugin_env_compare(before, &c);
    CHECK(c.n == 3 && c.n_unlisted == 0 && lists(&c, "CHANGED") && lists(&c, "REMOVED") && lists(&c, "ADDED"),
          "%d names, first %s", c.n, c.names[0]);
    after[5] = long_name;
    sp_plugin_env_compare(before, &c);
    CHECK(c.n == 3 && c.n_unlisted == 1, "a name that is too long: %d, %d", c.n, c.n_unlisted);
    environ = real;
}

static void test_changes_are_put_back(void)
{
    sp_plugin_env_changes c = {.n = 3, .names = {"TEST_ENV_OLD", "TEST_ENV_NEW", "TEST_ENV_GONE"}};
    sp_plugin_env_values values;
    setenv("TEST_ENV_OLD", "old", 1);
    setenv("TEST_ENV_GONE", "", 1);
    unsetenv("TEST_ENV_NEW");
    CHECK_OK(sp_plugin_env_save(&c, &values));
    setenv("TEST_ENV_OLD", "new", 1);
    setenv("TEST_ENV_NEW", "new", 1);
    setenv("TEST_ENV_OURS", "ours", 1); /* by the application, meanwhile */
    unsetenv("TEST_ENV_GONE");
    sp_plugin_env_put_back(&c, &values, "TEST");
    CHECK(getenv("TEST_ENV_OLD") != NULL && strcmp(getenv("TEST_ENV_OLD"), "old") == 0, "not put back");
    CHECK(getenv("TEST_ENV_NEW") == NULL, "not removed");
    CHECK(getenv("TEST_ENV_GONE") != NULL && getenv("TEST_ENV_GONE")[0] == '\0', "not added again");
    CHECK(getenv("TEST_ENV_OURS") != NULL, "the application's own change was undone");
    unsetenv("TEST_ENV_OLD");
    unsetenv("TEST_ENV_GONE");
    unsetenv("TEST_ENV_OURS");
}

/* ---- the child process that tries a plugin ---- */

static const sp_plugin_limits no_limits = {.deadline_ns = SP_NEVER, .call_ns = SP_NEVER};

/* A child of `parent`. -1: it has none. */
static pid_t find_child(pid_t parent)
{
    DIR *d = opendir("/proc");
    const struct dirent *e;
    pid_t found = -1;
    while (found < 0 && d != NULL && (e = readdir(d)) != NULL) {
        char path[300], text[300] = "";
        const char *after_name;
        int ppid = -1;
        FILE *f;
        snprintf(path, sizeof path, "/proc/%s/stat", e->d_name);
        f = e->d_name[0] >= '1' && e->d_name[0] <= '9' ? fopen(path, "r") : NULL;
        if (f == NULL)
            continue;
        after_name = fgets(text, sizeof text, f) != NULL ? strrchr(text, ')') : NULL;
        if (after_name != NULL && sscanf(after_name, ") %*c %d", &ppid) == 1 && ppid == (int)parent)
            found = (pid_t)atoi(e->d_name);
        fclose(f);
    }
    if (d != NULL)
        closedir(d);
    return found;
}

/* A process that tries a plugin which hangs in init is killed: the child that tries it must end too. */
static void test_child_ends_with_parent(void)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    pid_t parent, child = -1, got;
    int status = 0;
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) { /* qemu-user has no such call */
        printf("     orphan: skipped: this process cannot become the child's parent: %s\n", strerror(errno));
        return;
    }
    parent = fork();
    if (parent == 0) {
        sp_plugin p;
        setenv("TEST_NET_HANG", "init", 1);
        (void)sp_plugin_probe(NET_PLUGIN_FOLDER "/libnccl-net-test_8.so", &no_limits, &p);
        _exit(0);
    }
    while ((child = find_child(parent)) < 0 && !sp_deadline_passed(deadline_ns))
        usleep(1000);
    kill(parent, SIGKILL);
    CHECK(waitpid(parent, &status, 0) == parent && child > 0, "no child tried the plugin");
    while ((got = waitpid(child, &status, WNOHANG)) == 0 && !sp_deadline_passed(deadline_ns))
        usleep(1000);
    CHECK(got == child, "the child outlives its parent");
    if (got == 0) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
    }
    prctl(PR_SET_CHILD_SUBREAPER, 0);
}

static void probe_in_process(const char *variable, const char *call, int ignored, const char *words)
{
    pid_t pid = fork();
    int status = 1;
    if (pid == 0) {
        sp_plugin p;
        sigset_t all;
        spccl_status st;
        test_n_failed = 0;
        sigfillset(&all);
        sigprocmask(SIG_BLOCK, &all, NULL); /* as threads of libraries are started */
        signal(SIGCHLD, ignored ? SIG_IGN : SIG_DFL);
        setenv(variable, call, 1);
        st = sp_plugin_probe(NET_PLUGIN_FOLDER "/libnccl-net-test_8.so", &no_limits, &p);
        CHECK((st == SPCCL_OK) == (words == NULL), "%s=%s: %d", variable, call, (int)st);
        CHECK(words == NULL || strstr(spccl_last_error(), words) != NULL, "\"%s\" is not in: %s", words,
              spccl_last_error());
        _exit(test_n_failed != 0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "%s=%s", variable, call);
}

static void test_signals_of_parent(void)
{
    probe_in_process("TEST_NET_CRASH", "init", false, "crashed in init (signal 11)");
    probe_in_process("TEST_NET_CRASH", "devices", true, "crashed in devices (the application took");
    probe_in_process("TEST_NET_DEVICES", "1", true, NULL);
}

/* ---- what a failed try means for the next one ---- */

/* The child hangs in init at the first try, and the deadline ends it. The second try must not return that. */
static void try_again(void)
{
    const char *path = NET_PLUGIN_FOLDER "/libnccl-net-test_8.so";
    sp_plugin_limits short_time = {.deadline_ns = sp_deadline_in_ms(100), .call_ns = SP_NEVER};
    const sp_plugin *p = NULL;
    setenv("TEST_NET_HANG", "init", 1);
    CHECK(sp_plugin_load(path, &short_time, &p) == SPCCL_ERR_TIMEOUT, "%s", spccl_last_error());
    CHECK(strstr(spccl_last_error(), "libnccl-net-test_8.so: the time for loading it ended in ") != NULL,
          "%s", spccl_last_error());
    unsetenv("TEST_NET_HANG");
    CHECK(sp_plugin_load(path, &no_limits, &p) == SPCCL_OK && p != NULL, "%s", spccl_last_error());
}

/* A call that takes longer than a call may is the plugin's fault: the next try returns the same at once. */
static void keep_result(void)
{
    const char *path = NET_PLUGIN_FOLDER "/libnccl-net-test_8.so";
    sp_plugin_limits short_calls = {.deadline_ns = SP_NEVER, .call_ns = 200 * INT64_C(1000000)};
    const sp_plugin *p = NULL;
    char first[300];
    setenv("TEST_NET_HANG", "init", 1);
    CHECK(sp_plugin_load(path, &short_calls, &p) == SPCCL_ERR_UNREACHABLE, "%s", spccl_last_error());
    snprintf(first, sizeof first, "%s", spccl_last_error());
    CHECK(strstr(first, " did not return in 200 ms") != NULL, "%s", first);
    unsetenv("TEST_NET_HANG");
    CHECK(sp_plugin_load(path, &no_limits, &p) == SPCCL_ERR_UNREACHABLE, "tried again");
    CHECK(strcmp(first, spccl_last_error()) == 0, "%s", spccl_last_error());
}

static void in_process(void (*fn)(void))
{
    pid_t pid = fork(); /* plugins are loaded once per process */
    int status = 1;
    if (pid == 0) {
        test_n_failed = 0;
        fn();
        _exit(test_n_failed != 0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "%x", status);
}

static void test_retry(void)
{
    in_process(try_again);
    in_process(keep_result);
}

/* ---- a thread that hangs in the plugin ---- */

/* A process that was stopped sees old calls when it goes on: one look must not condemn them. */
static void test_looks(void)
{
    const sp_plugin plugin = {.name = "Test", .n_devices = 1};
    struct sp_plugin_peer peer = {.base = NULL};
    struct sp_plugin_endpoint ep = {.peers = &peer, .plugin = &plugin, .call_limit_ns = 1000};
    char text[SP_NET_TEXT_CAP];
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    atomic_store(&ep.call_fn, SP_PLUGIN_TEST);
    for (int i = 1; i < 4; i++) { /* an old call each time, but another one */
        atomic_store(&ep.call_since_ns, i);
        CHECK(!sp_plugin_thread_hangs(&ep, text, sizeof text), "call %d: %s", i, text);
        sleep_ms(150);
    }
    while (!sp_plugin_thread_hangs(&ep, text, sizeof text) && !sp_deadline_passed(deadline_ns))
        sleep_ms(1);
    CHECK(strstr(text, "test for rank 0 did not return") != NULL, "a call that hangs: %s", text);
}

/* ---- spccl info ---- */

static void check_info(const char *plugin, const char *value, const char *why)
{
    pid_t pid = fork(); /* what it says is found once per process */
    int status = 1;
    if (pid == 0) {
        const char *got_value, *got_why;
        setenv("SPCCL_NET_PLUGIN", plugin, 1);
        test_n_failed = 0;
        sp_plugin_inform(&got_value, &got_why);
        CHECK(strcmp(got_value, value) == 0 && strstr(got_why, why) != NULL, "%s: %s", got_value, got_why);
        _exit(test_n_failed != 0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "info for %s", plugin);
}

static void test_info(void)
{
    check_info(NET_PLUGIN_FOLDER "/libnccl-net-test_10.so", "in, plugin usable", "v10), 1 device: sock0");
    check_info(NET_PLUGIN_FOLDER "/libnccl-net-test_7.so", "in, plugin not usable", "too old");
    check_info("none", "in, no plugin", "SPCCL_NET_PLUGIN=none");
    check_info("/nowhere/net.so", "in, no plugin", "\"/nowhere/net.so\": there is no such file");
    check_info("nowhere", "in, no plugin",
               "no file libnccl-net-nowhere.so or nowhere in the linker's folders");
}

/* ---- forks of the application ---- */

static sp_plugin_limits long_limits(void)
{
    return (sp_plugin_limits){.deadline_ns = sp_deadline_in_ms(PATIENCE_MS),
                              .call_ns = PATIENCE_MS * INT64_C(1000000)};
}

static void *load_again_and_again(void *stop)
{
    const sp_plugin_limits limits = long_limits();
    const sp_plugin *plugin;
    while (!atomic_load((atomic_bool *)stop))
        CHECK_OK(sp_plugin_load(NET_PLUGIN_FOLDER "/libnccl-net-test_9.so", &limits, &plugin));
    return NULL;
}

/* A fork while another thread looks for a plugin: the child is told at once that it cannot use it. */
static void test_fork_meanwhile(void)
{
    const sp_plugin_limits limits = long_limits();
    const sp_plugin *plugin;
    atomic_bool stop = false;
    pthread_t thread;
    CHECK_OK(sp_plugin_load(NET_PLUGIN_FOLDER "/libnccl-net-test_9.so", &limits, &plugin));
    CHECK(pthread_create(&thread, NULL, load_again_and_again, &stop) == 0, "a thread");
    for (int i = 0; i < 300; i++) {
        int status = -1;
        pid_t pid = fork();
        if (pid == 0) {
            alarm(PATIENCE_MS / 1000); /* ends a child that waits for ever */
            _exit(sp_plugin_load(NET_PLUGIN_FOLDER "/libnccl-net-test_9.so", &limits, &plugin) !=
                  SPCCL_ERR_UNREACHABLE);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0, "child %d: status %x", i, status);
        if (status != 0)
            break;
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"find", test_find},
                                             {"machine", test_other_machine},
                                             {"info", test_info},
                                             {"changes", test_changes_are_found},
                                             {"put_back", test_changes_are_put_back},
                                             {"orphan", test_child_ends_with_parent},
                                             {"signals", test_signals_of_parent},
                                             {"retry", test_retry},
                                             {"looks", test_looks},
                                             {"fork_meanwhile", test_fork_meanwhile},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
