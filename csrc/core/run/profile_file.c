/* profile_file.c - see profile_file.h. */
#include "core/run/profile_file.h"

#include "core/base/cores.h"
#include "core/base/env.h"
#include "core/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

struct sp_profile_file {
    char path[400], machine[SP_MACHINE_CAP];
    bool usable;        /* it was read, or does not exist: this group may write it */
    bool others_differ; /* another rank has another profile */
    sp_profile profile;
};

/* The model of the CPU, from /proc/cpuinfo: "AMD_EPYC_7R13". Arm has numbers instead. */
static void cpu_model(char *out, size_t cap)
{
    static const char *const keys[] = {"model name", "CPU part"};
    char line[300];
    FILE *f = fopen("/proc/cpuinfo", "re");
    snprintf(out, cap, "unknown");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        const char *value = strchr(line, ':');
        if (value == NULL ||
            (strncmp(line, keys[0], strlen(keys[0])) != 0 && strncmp(line, keys[1], strlen(keys[1])) != 0))
            continue;
        value += 1 + strspn(value + 1, " \t");
        snprintf(out, cap, "%.*s", (int)strcspn(value, "\n"), value);
        break;
    }
    if (f != NULL)
        fclose(f);
    for (char *c = out; *c != '\0'; c++)
        if (*c <= ' ' || *c == '#' || *c > '~')
            *c = '_';
}

/* What a profile depends on. */
static void describe_machine(const char *kernels, char machine[SP_MACHINE_CAP])
{
    char cpu[120];
    cpu_model(cpu, sizeof cpu);
    snprintf(machine, SP_MACHINE_CAP, "version=%s cpu=%s cores=%u kernels=%s transports=%.120s",
             spccl_version(), cpu, sp_usable_cores(), kernels, sp_env_text(SP_ENV_TRANSPORTS));
}

/* Read and parse. *exists: there is a file. Errors: SETTING. */
static spccl_status read_profile(const char *path, const char *machine, bool *exists, sp_profile *out)
{
    char *text;
    ssize_t n = 0, bytes = 0;
    spccl_status st = SPCCL_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    *exists = fd >= 0 || errno != ENOENT;
    *out = (sp_profile){0};
    if (fd < 0)
        return *exists ? SP_FAIL_ERRNO(SPCCL_ERR_SETTING, "it cannot be read") : SPCCL_OK;
    text = sp_alloc64(SP_PROFILE_BYTES_MAX + 1);
    if (text == NULL)
        st = SP_FAIL(SPCCL_ERR_NOMEM, "no memory for its text");
    while (st == SPCCL_OK && bytes <= SP_PROFILE_BYTES_MAX &&
           (n = read(fd, text + bytes, (size_t)(SP_PROFILE_BYTES_MAX + 1 - bytes))) > 0)
        bytes += n;
    if (st == SPCCL_OK && n < 0)
        st = SP_FAIL_ERRNO(SPCCL_ERR_SETTING, "it cannot be read");
    close(fd);
    if (st == SPCCL_OK)
        st = sp_profile_parse(text, (size_t)bytes, machine, out);
    sp_free(text);
    if (st != SPCCL_OK)
        *out = (sp_profile){0};
    return st;
}

spccl_status sp_profile_file_open(const spccl_comm *comm, const char *path, sp_profile_file **out)
{
    sp_profile_file *f;
    bool exists;
    if (strlen(path) >= sizeof f->path)
        return SP_FAIL(SPCCL_ERR_SETTING, "SPCCL_SCHEDULE=tune:PATH: the path has more than %zu bytes",
                       sizeof f->path - 1);
    f = sp_calloc(1, sizeof *f);
    if (f == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "profile: %zu bytes", sizeof *f);
    snprintf(f->path, sizeof f->path, "%s", path);
    describe_machine(comm->kernels->name, f->machine);
    f->usable = read_profile(path, f->machine, &exists, &f->profile) == SPCCL_OK;
    if (!f->usable)
        sp_log(SP_LOG_WARN, comm->rank,
               "profile %s (SPCCL_SCHEDULE) is not used, and group \"%s\" tunes without it: %s", path,
               comm->name, spccl_last_error());
    else
        sp_log(SP_LOG_INFO, comm->rank, "profile %s: %d lines%s", path, f->profile.n,
               exists ? "" : ", as there is no file yet");
    *out = f;
    return SPCCL_OK;
}

void sp_profile_file_close(sp_profile_file *f)
{
    sp_free(f);
}

void sp_profile_file_hash(const sp_profile_file *f, int n_ranks, uint64_t hashes[SP_PROFILE_HASHES])
{
    static const sp_profile none;
    sp_profile_hash(f != NULL && f->usable ? &f->profile : &none, n_ranks, hashes);
}

const sp_profile *sp_profile_file_use(spccl_comm *comm)
{
    sp_profile_file *f = comm->profile;
    int other = comm->world_size > 1 ? comm->links.other_profile : -1;
    if (other >= 0 && comm->tunes) {
        sp_log(
            SP_LOG_WARN, comm->rank,
            "group \"%s\" uses no profile: rank %d has another one than this rank: give all ranks the same "
            "file with SPCCL_SCHEDULE=tune:PATH",
            comm->name, other);
        if (f != NULL)
            f->others_differ = true;
    }
    return f != NULL && f->usable && !f->others_differ ? &f->profile : NULL;
}

/* Write the text to a file beside it, then rename that: a reader finds a whole profile. */
static spccl_status replace_file(const char *path, const char *text, size_t bytes)
{
    char beside[460];
    bool ok;
    int fd;
    snprintf(beside, sizeof beside, "%s.XXXXXX", path); /* other groups and hosts may write theirs now */
    fd = mkostemp(beside, O_CLOEXEC);
    if (fd < 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "%s", beside);
    ok = write(fd, text, bytes) == (ssize_t)bytes && fchmod(fd, 0644) == 0;
    ok = close(fd) == 0 && ok;
    ok = ok && rename(beside, path) == 0;
    if (!ok) {
        spccl_status st = SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "%s", path);
        unlink(beside);
        return st;
    }
    return SPCCL_OK;
}

static bool is_first_of_host(const spccl_comm *comm)
{
    const sp_hosts *h = comm->links.hosts;
    int first = 0;
    while (h != NULL && h->host_of[first] != h->host_of[comm->rank])
        first++;
    return first == comm->rank;
}

void sp_profile_file_save(spccl_comm *comm)
{
    const sp_tuner *t = comm->exec.chooser->tuner;
    sp_profile_file *f = comm->profile;
    sp_profile now;
    bool exists;
    char *text;
    if (f == NULL || !f->usable || f->others_differ || t == NULL || t->n_settled == 0 ||
        !is_first_of_host(comm) || sp_comm_broken(comm) != SPCCL_OK)
        return; /* ranks of a broken group may have ended different calls, and learnt different things */
    /* Other groups may have written it since. */
    if (read_profile(f->path, f->machine, &exists, &now) != SPCCL_OK)
        now = f->profile;
    sp_chooser_save(comm->exec.chooser, &now);
    text = sp_alloc64(SP_PROFILE_BYTES_MAX);
    if (text == NULL ||
        replace_file(f->path, text, sp_profile_print(&now, f->machine, text, SP_PROFILE_BYTES_MAX)) !=
            SPCCL_OK)
        sp_log(SP_LOG_WARN, comm->rank, "what group \"%s\" has learnt was not saved: %s", comm->name,
               text == NULL ? "no memory" : spccl_last_error());
    sp_free(text);
}

void sp_profile_file_describe(const char *path, char *text, size_t cap)
{
    char machine[SP_MACHINE_CAP];
    const sp_kernels *kernels;
    sp_profile *p = sp_calloc(1, sizeof *p);
    bool exists;
    if (p == NULL || sp_kernels_pick(&kernels) != SPCCL_OK) {
        snprintf(text, cap, "%s: not read", path);
        sp_free(p);
        return;
    }
    describe_machine(kernels->name, machine);
    if (read_profile(path, machine, &exists, p) != SPCCL_OK)
        snprintf(text, cap, "%s is not used: %s", path, spccl_last_error());
    else
        snprintf(text, cap, "%s: %d kinds of calls%s", path, p->n, exists ? "" : ", no file yet");
    sp_free(p);
}
