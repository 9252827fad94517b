/* plugin_load.c - see plugin_load.h. */
#include "transport/net/plugin/plugin_load.h"

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "transport/common/forks.h"
#include "transport/net/plugin/plugin_env.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define PLUGINS_MAX 8 /* of one process */
#define END_MS 1000   /* a killed child gets this long to end */
#define LEVEL_WARN 2  /* NCCL's log levels */

/* What a child reports, in memory that it shares with this process. */
struct report {
    atomic_int step;  /* the last enum step that began */
    atomic_bool done; /* the rest is valid */
    spccl_status status;
    char text[SP_NET_TEXT_CAP];
    sp_plugin plugin;
    sp_plugin_env_changes changes; /* that loading made in the environment */
};
enum step { STEP_NONE, STEP_DLOPEN, STEP_INIT, STEP_DEVICES, STEP_PROPERTIES, STEP_FINALIZE };
static const char *const step_names[] = {"its start", "dlopen",        "init",
                                         "devices",   "getProperties", "finalize"};

/* ---- the lock ---- */

/* A fork waits for it, so no caller holds the lock of another guard. A child refuses the parent's plugins. */
static sp_fork_guard guard = {.lock = PTHREAD_MUTEX_INITIALIZER};

void sp_plugin_lock(void)
{
    (void)sp_fork_watch_static(&guard, NULL, NULL); /* it fails only where no endpoint can be opened */
    pthread_mutex_lock(&guard.lock);
}

void sp_plugin_unlock(void)
{
    pthread_mutex_unlock(&guard.lock);
}

/* ---- the logger that plugins get ---- */

/* Plugins pass wrong arguments at times, so a text is formatted only if it is asked for (SPCCL_LOG=debug). The
 * format of the last warning is kept as it is, as a part of error texts. */
static char last_warning[160];

static void logger(int level, unsigned long subsystems, const char *where, int line, const char *fmt, ...)
{
    char text[400];
    va_list args;
    (void)subsystems;
    if (fmt == NULL)
        return;
    if (level == LEVEL_WARN) {
        sp_plugin_lock();
        snprintf(last_warning, sizeof last_warning, "%s", fmt);
        sp_plugin_unlock();
    }
    if (!sp_log_on(SP_LOG_DEBUG))
        return;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    sp_log(SP_LOG_DEBUG, -1, "net plugin, %s:%d: %s", where != NULL ? where : "?", line, text);
}

/* The kept warning as a clause, or "". */
static void take_warning(char out[SP_NET_TEXT_CAP])
{
    sp_plugin_lock();
    out[0] = '\0';
    if (last_warning[0] != '\0')
        snprintf(out, SP_NET_TEXT_CAP, "; its last warning: %s", last_warning);
    last_warning[0] = '\0';
    sp_plugin_unlock();
}

const char *sp_plugin_file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* ---- opening: in the child, and again in this process ---- */

static spccl_status call_failed(const char *path, enum step step, int result)
{
    char warning[SP_NET_TEXT_CAP];
    take_warning(warning);
    return SP_FAIL(SPCCL_ERR_UNREACHABLE, "NCCL net plugin %.60s: %s returned %d (%s)%.90s",
                   sp_plugin_file_name(path), step_names[step], result, sp_plugin_result_text(result),
                   warning);
}

static spccl_status find_table(const char *path, void *library, sp_plugin *p)
{
    const char *missing;
    char symbol[40];
    for (p->version = SP_PLUGIN_VERSION_MAX; p->version >= SP_PLUGIN_VERSION_MIN; p->version--) {
        snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", p->version);
        p->table = dlsym(library, symbol);
        if (p->table != NULL)
            break;
    }
    if (p->table == NULL)
        return SP_FAIL(
            SPCCL_ERR_UNREACHABLE,
            "NCCL net plugin %.60s: it exports none of ncclNetPlugin_v%d to v%d: too old or too new",
            sp_plugin_file_name(path), SP_PLUGIN_VERSION_MIN, SP_PLUGIN_VERSION_MAX);
    if (!sp_plugin_complete(p->table, &missing))
        return SP_FAIL(SPCCL_ERR_UNREACHABLE, "NCCL net plugin %.60s: its table v%d has no %s",
                       sp_plugin_file_name(path), p->version, missing);
    return SPCCL_OK;
}

/* Keep the fastest devices: a slow one, such as that of the management network, would hold up the others. */
static void choose_devices(sp_plugin *p)
{
    int most = 0;
    for (int i = 0; i < p->n_devices; i++)
        most = p->devices[i].speed_mbps > most ? p->devices[i].speed_mbps : most;
    for (int i = 0; i < p->n_devices; i++)
        if (p->devices[i].speed_mbps == most)
            p->used[p->n_used++] = i;
}

static spccl_status ask_devices(const char *path, struct report *r)
{
    sp_plugin *p = &r->plugin;
    int n = 0, result;
    atomic_store(&r->step, STEP_DEVICES);
    result = sp_plugin_devices(p, &n);
    if (result != 0)
        return call_failed(path, STEP_DEVICES, result);
    if (n <= 0) {
        char warning[SP_NET_TEXT_CAP];
        take_warning(warning);
        atomic_store(&r->step, STEP_FINALIZE);
        (void)sp_plugin_finalize(p);
        return SP_FAIL(SPCCL_ERR_UNREACHABLE, "NCCL net plugin %.60s: it found no device%.90s",
                       sp_plugin_file_name(path), warning);
    }
    atomic_store(&r->step, STEP_PROPERTIES);
    p->n_devices = n < SP_PLUGIN_DEVICES_MAX ? n : SP_PLUGIN_DEVICES_MAX;
    for (int i = 0; i < p->n_devices; i++) {
        result = sp_plugin_get_device(p, i, &p->devices[i]);
        if (result != 0)
            return call_failed(path, STEP_PROPERTIES, result);
    }
    choose_devices(p);
    return SPCCL_OK;
}

static spccl_status open_plugin(const char *path, struct report *r)
{
    sp_plugin *p = &r->plugin;
    void *library;
    int result;
    snprintf(p->path, sizeof p->path, "%s", path);
    atomic_store(&r->step, STEP_DLOPEN);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return SP_FAIL(SPCCL_ERR_UNREACHABLE, "NCCL net plugin: %.170s", dlerror());
    SP_TRY(find_table(path, library, p));
    atomic_store(&r->step, STEP_INIT);
    result = sp_plugin_init(p, logger);
    if (result != 0)
        return call_failed(path, STEP_INIT, result);
    snprintf(p->name, sizeof p->name, "%s", p->table->name != NULL ? p->table->name : "without name");
    return ask_devices(path, r);
}

/* ---- the child ---- */

static spccl_status try_plugin(const char *path, struct report *r)
{
    char **before = sp_plugin_env_copy();
    if (before == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "memory for a copy of the environment, to try NCCL net plugin %s",
                       path);
    SP_TRY(open_plugin(path, r));
    sp_plugin_env_compare(before, &r->changes);
    return SPCCL_OK;
}

/* The fork copied what belongs to other threads of the parent: signals that are blocked or have handlers. */
static void begin_child(pid_t parent)
{
    static const int defaults[] = {SIGSEGV, SIGBUS,  SIGFPE, SIGILL, SIGABRT,
                                   SIGINT,  SIGTERM, SIGHUP, SIGQUIT};
    struct rlimit none = {0, 0};
    sigset_t empty;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent)
        _exit(1); /* else a plugin that hangs would keep the child for ever */
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++)
        signal(defaults[i], SIG_DFL); /* no report of a crash that is expected */
    sigemptyset(&empty);
    sigprocmask(SIG_SETMASK, &empty, NULL);
    (void)setrlimit(RLIMIT_CORE, &none);
}

static void run_child(const char *path, struct report *r, pid_t parent)
{
    begin_child(parent);
    r->status = try_plugin(path, r);
    snprintf(r->text, sizeof r->text, "%s", r->status == SPCCL_OK ? "" : spccl_last_error());
    atomic_store(&r->done, true);
    _exit(0);
}

/* How the child ended. */
struct ending {
    bool ended;
    bool known; /* `status` is valid: the application has not waited for the child in our place */
    int status;
    bool hangs; /* it has not ended, and one call took longer than it may */
};

static void look_at_child(pid_t pid, struct ending *e)
{
    pid_t got = e->ended ? 0 : waitpid(pid, &e->status, WNOHANG);
    e->known = e->known || got == pid;
    e->ended = e->ended || got == pid || (got < 0 && errno == ECHILD);
}

/* End a child that has reported, or that took too long. A process in an uninterruptible sleep, in a driver say, does
 * not end: it is left behind. */
static void end_child(pid_t pid, const char *path)
{
    struct ending e = {.ended = false};
    int64_t deadline_ns = sp_deadline_in_ms(END_MS);
    look_at_child(pid, &e); /* after its end the number may be another process's */
    if (!e.ended)
        kill(pid, SIGKILL);
    while (!e.ended && !sp_deadline_passed(deadline_ns)) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        look_at_child(pid, &e);
    }
    if (!e.ended)
        sp_log(SP_LOG_WARN, -1,
               "NCCL net plugin %s: process %ld, which tried it, is left behind: it did not end in %d ms "
               "after SIGKILL",
               path, (long)pid, END_MS);
}

/* Wait for the child's report, its end without one, or a call that hangs. */
static struct ending wait_for_report(pid_t pid, struct report *r, const sp_plugin_limits *limits)
{
    struct ending e = {.ended = false};
    int64_t since_ns = sp_now_ns();
    int step = STEP_NONE;
    while (!atomic_load(&r->done) && !e.ended && !e.hangs && !sp_deadline_passed(limits->deadline_ns)) {
        if (atomic_load(&r->step) != step) {
            step = atomic_load(&r->step);
            since_ns = sp_now_ns();
        }
        e.hangs = step != STEP_NONE && sp_now_ns() - since_ns > limits->call_ns;
        look_at_child(pid, &e);
        if (!e.ended)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return e;
}

static spccl_status not_in_time(const char *path, struct report *r, const struct ending *e, int64_t call_ns)
{
    const char *step = step_names[atomic_load(&r->step)];
    if (e->hangs)
        return SP_FAIL(SPCCL_ERR_UNREACHABLE, "NCCL net plugin %.60s: %s did not return in %lld ms",
                       sp_plugin_file_name(path), step, (long long)call_ns / 1000000);
    return SP_FAIL(SPCCL_ERR_TIMEOUT, "NCCL net plugin %.60s: the time for loading it ended in %s",
                   sp_plugin_file_name(path), step);
}

static spccl_status crashed(const char *path, struct report *r, const struct ending *e)
{
    char how[80] = "the application took its exit status";
    if (e->known)
        snprintf(how, sizeof how, "%s %d", WIFSIGNALED(e->status) ? "signal" : "exit code",
                 WIFSIGNALED(e->status) ? WTERMSIG(e->status) : WEXITSTATUS(e->status));
    return SP_FAIL(SPCCL_ERR_UNREACHABLE, "NCCL net plugin %.60s: it crashed in %s (%s)",
                   sp_plugin_file_name(path), step_names[atomic_load(&r->step)], how);
}

static spccl_status probe(const char *path, const sp_plugin_limits *limits, sp_plugin *out,
                          sp_plugin_env_changes *changes)
{
    struct report *r = mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    spccl_status st = SPCCL_OK;
    pid_t pid, parent = getpid();
    if (r == MAP_FAILED)
        return SP_FAIL_ERRNO(SPCCL_ERR_NOMEM, "memory to try an NCCL net plugin");
    pid = fork();
    if (pid == 0)
        run_child(path, r, parent);
    if (pid < 0) {
        st = SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "fork, to try NCCL net plugin %s", path);
    } else {
        struct ending e = wait_for_report(pid, r, limits);
        if (!e.ended)
            end_child(pid, path);
        if (atomic_load(&r->done)) {
            *out = r->plugin;
            *changes = r->changes;
            out->table = NULL;
            out->context = NULL;
            st = r->status == SPCCL_OK ? SPCCL_OK : SP_FAIL(r->status, "%s", r->text);
        } else if (e.ended) {
            st = crashed(path, r, &e);
        } else {
            st = not_in_time(path, r, &e, limits->call_ns);
        }
    }
    munmap(r, sizeof *r);
    return st;
}

spccl_status sp_plugin_probe(const char *path, const sp_plugin_limits *limits, sp_plugin *out)
{
    sp_plugin_env_changes changes;
    return probe(path, limits, out, &changes);
}

/* ---- once per process ---- */

struct loaded {
    char path[SP_PLUGIN_PATH_CAP];
    /* OPEN: the last try failed for a reason that may pass, such as a fork that failed; the next call tries again */
    enum { LOADING = 1, READY, FAILED, OPEN } state;
    pid_t pid; /* of the process that loaded it */
    struct report report;
};
static struct loaded *plugins[PLUGINS_MAX];
static int n_plugins;

/* The entry of that path; *is_mine: this thread must load the plugin. NULL: the table is full. */
static struct loaded *entry_of(const char *path, bool *is_mine)
{
    struct loaded *l = NULL;
    *is_mine = false;
    sp_plugin_lock();
    for (int i = 0; i < n_plugins && l == NULL; i++)
        if (strcmp(plugins[i]->path, path) == 0)
            l = plugins[i];
    if (l == NULL && n_plugins < PLUGINS_MAX && (l = sp_calloc(1, sizeof *l)) != NULL) {
        snprintf(l->path, sizeof l->path, "%s", path);
        l->state = OPEN;
        l->pid = getpid();
        plugins[n_plugins++] = l;
    }
    if (l != NULL && l->state == OPEN && l->pid == getpid()) {
        l->state = LOADING;
        *is_mine = true;
    }
    sp_plugin_unlock();
    return l;
}

static spccl_status probe_and_open(struct loaded *l, const sp_plugin_limits *limits)
{
    sp_plugin tried = {.version = 0};
    sp_plugin_env_changes changes;
    sp_plugin_env_values values;
    spccl_status st;
    SP_TRY(probe(l->path, limits, &tried, &changes));
    SP_TRY(sp_plugin_env_save(&changes, &values));
    st = open_plugin(l->path, &l->report);
    sp_plugin_env_put_back(&changes, &values, l->path);
    return st;
}

/* Only UNREACHABLE says something about the plugin. */
static void load_now(struct loaded *l, const sp_plugin_limits *limits)
{
    char text[300];
    spccl_status st = probe_and_open(l, limits);
    if (st == SPCCL_OK) {
        sp_plugin_list_devices(&l->report.plugin, text, sizeof text);
        sp_log(SP_LOG_INFO, -1, "NCCL net %s", text);
    }
    sp_plugin_lock();
    snprintf(l->report.text, sizeof l->report.text, "%s", st == SPCCL_OK ? "" : spccl_last_error());
    l->report.status = st;
    l->state = st == SPCCL_OK ? READY : st == SPCCL_ERR_UNREACHABLE ? FAILED : OPEN;
    sp_plugin_unlock();
}

/* Wait until no thread loads the plugin. Returns what the last try returned. */
static spccl_status result_of(struct loaded *l, int64_t deadline_ns)
{
    char text[sizeof l->report.text];
    spccl_status st = SPCCL_AGAIN;
    while (st == SPCCL_AGAIN) {
        sp_plugin_lock();
        if (l->state != LOADING) {
            st = l->report.status;
            snprintf(text, sizeof text, "%s", l->report.text);
        }
        sp_plugin_unlock();
        if (st == SPCCL_AGAIN && sp_deadline_passed(deadline_ns))
            return SP_FAIL(SPCCL_ERR_TIMEOUT, "NCCL net plugin %s: another group of this process waits in %s",
                           l->path, step_names[atomic_load(&l->report.step)]);
        if (st == SPCCL_AGAIN)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return st == SPCCL_OK ? SPCCL_OK : SP_FAIL(st, "%s", text);
}

spccl_status sp_plugin_load(const char *path, const sp_plugin_limits *limits, const sp_plugin **out)
{
    bool is_mine;
    struct loaded *l = entry_of(path, &is_mine);
    if (l == NULL)
        return SP_FAIL(SPCCL_ERR_UNREACHABLE, "NCCL net plugin %s: more than %d plugins in one process", path,
                       PLUGINS_MAX);
    if (l->pid != getpid())
        return SP_FAIL(
            SPCCL_ERR_UNREACHABLE,
            "NCCL net plugin %s: this process is a child of fork, and its parent had loaded the plugin",
            path);
    if (is_mine)
        load_now(l, limits);
    SP_TRY(result_of(l, limits->deadline_ns));
    *out = &l->report.plugin;
    return SPCCL_OK;
}

void sp_plugin_list_devices(const sp_plugin *p, char *out, size_t cap)
{
    int n = snprintf(out, cap, "plugin %s (%s, v%d), %d device%s:", p->name, p->path, p->version,
                     p->n_devices, p->n_devices == 1 ? "" : "s");
    for (int i = 0; i < p->n_used && n > 0 && (size_t)n < cap; i++) {
        const sp_plugin_device *c = &p->devices[p->used[i]];
        n += snprintf(out + n, cap - (size_t)n, "%s %s", i != 0 ? "," : "", c->name);
        if (c->speed_mbps != 0 && n > 0 && (size_t)n < cap)
            n += snprintf(out + n, cap - (size_t)n, " (%d Mbit/s)", c->speed_mbps);
    }
}
