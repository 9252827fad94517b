/* plugin_find.c - where the file of an NCCL net plugin is. See plugin_load.h. The order is NCCL's: the name's
 * libnccl-net-NAME.so, then NAME itself; without a name libnccl-net.so. The folders are the dynamic linker's. */
#include "core/base/env.h"
#include "transport/net/plugin/plugin_load.h"

#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEFAULT_FILE "libnccl-net.so"
#define LINKER_CACHE "/etc/ld.so.cache"
#define FOLDERS                                                                                              \
    "/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu:/lib/aarch64-linux-gnu:/usr/lib/aarch64-linux-gnu:"     \
    "/lib64:/usr/lib64:/lib:/usr/lib:/usr/local/lib"

static bool read_start(const char *path, void *out, size_t bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool done = fd >= 0 && read(fd, out, bytes) == (ssize_t)bytes;
    if (fd >= 0)
        close(fd);
    return done;
}

static bool is_file(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 && S_ISREG(s.st_mode) && access(path, R_OK) == 0;
}

/* False for a library of another word size or machine: a folder of the linker may hold libraries of several. What is
 * no ELF file counts as usable: loading it gives an error that names it. */
static bool is_for_this_machine(const char *path)
{
    Elf64_Ehdr self = {0}, head = {0}; /* the first 20 bytes are the same in Elf32_Ehdr */
    bool read_both = read_start("/proc/self/exe", &self, 20) && read_start(path, &head, 20);
    if (!read_both || memcmp(head.e_ident, ELFMAG, SELFMAG) != 0)
        return true;
    return head.e_ident[EI_CLASS] == self.e_ident[EI_CLASS] && head.e_machine == self.e_machine;
}

/* Look for `file` in a list of folders with colons. */
static bool find_in(const char *folders, const char *file, char out[SP_PLUGIN_PATH_CAP])
{
    for (const char *at = folders; at != NULL && *at != '\0';) {
        size_t n = strcspn(at, ":");
        if (n != 0 && snprintf(out, SP_PLUGIN_PATH_CAP, "%.*s/%s", (int)n, at, file) < SP_PLUGIN_PATH_CAP &&
            is_file(out) && is_for_this_machine(out))
            return true;
        at += n + (at[n] == ':');
    }
    return false;
}

/* The linker's cache holds the path of every library as text: search it for one that ends in "/FILE". */
static bool find_in_cache(const char *file, char out[SP_PLUGIN_PATH_CAP])
{
    size_t n_file = strlen(file) + 1; /* with the NUL */
    struct stat s;
    char *text;
    bool found = false;
    int fd = open(LINKER_CACHE, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    text = fstat(fd, &s) == 0 && s.st_size > 0 ? mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_PRIVATE, fd, 0)
                                               : MAP_FAILED;
    close(fd);
    if (text == MAP_FAILED)
        return false;
    for (char *at = text, *end = text + s.st_size;
         !found && (at = memmem(at, (size_t)(end - at), file, n_file)) != NULL; at++) {
        const char *first = at;
        while (first > text && first[-1] != '\0')
            first--;
        found = at > text && at[-1] == '/' && first[0] == '/' &&
                (size_t)(at - first) + n_file <= SP_PLUGIN_PATH_CAP;
        if (found)
            memcpy(out, first, (size_t)(at - first) + n_file);
        found = found && is_file(out) && is_for_this_machine(out);
    }
    munmap(text, (size_t)s.st_size);
    return found;
}

static bool find_file(const char *file, char out[SP_PLUGIN_PATH_CAP])
{
    if (strchr(file, '/') != NULL)
        return snprintf(out, SP_PLUGIN_PATH_CAP, "%s", file) < SP_PLUGIN_PATH_CAP && is_file(out);
    return find_in(getenv("LD_LIBRARY_PATH"), file, out) || find_in_cache(file, out) ||
           find_in(FOLDERS, file, out);
}

static void find_named(const char *variable, const char *text, sp_plugin_found *out)
{
    char name[SP_PLUGIN_PATH_CAP / 2], file[SP_PLUGIN_PATH_CAP];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(text, ","), text); /* a list: the first */
    out->named = true;
    snprintf(file, sizeof file, "libnccl-net-%s.so", name);
    out->found = (strchr(name, '/') == NULL && find_file(file, out->path)) || find_file(name, out->path);
    if (out->found)
        snprintf(out->why, sizeof out->why, "named by %s", variable);
    else if (strchr(name, '/') != NULL)
        snprintf(out->why, sizeof out->why, "%s=\"%.60s\": there is no such file that this process may read",
                 variable, text);
    else
        snprintf(out->why, sizeof out->why,
                 "%s=\"%.60s\": no file libnccl-net-%.30s.so or %.30s in the linker's folders", variable,
                 text, name, name);
}

void sp_plugin_find(sp_plugin_found *out)
{
    const char *ours = sp_env_text(SP_ENV_NET_PLUGIN), *nccl = getenv("NCCL_NET_PLUGIN");
    const char *text = ours[0] != '\0' || nccl == NULL ? ours : nccl;
    const char *variable = ours[0] != '\0' ? "SPCCL_NET_PLUGIN" : "NCCL_NET_PLUGIN";
    *out = (sp_plugin_found){0};
    if (strcmp(text, "none") == 0) {
        snprintf(out->why, sizeof out->why, "off: %s=none", variable);
    } else if (text[0] != '\0') {
        find_named(variable, text, out);
    } else {
        out->found = find_file(DEFAULT_FILE, out->path);
        snprintf(out->why, sizeof out->why, "%s",
                 out->found ? "found in the linker's folders"
                            : "no " DEFAULT_FILE
                              " in the linker's folders, and none is named by SPCCL_NET_PLUGIN");
    }
}
