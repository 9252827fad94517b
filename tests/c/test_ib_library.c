/* test_ib_library.c - a libibverbs that is too old, that cannot be opened, or that refuses: the reason names the library and
 * what is missing. Each case is a process of its own, whose linker finds a library of ib_library/. */
#include "test.h"
#include "transport/net/ib/ib_library.h"

#include <sys/wait.h>
#include <unistd.h>

static const struct library {
    const char *folder, *why; /* why "": it is usable */
} libraries[] = {{"complete", ""},
                 {"old", "libibverbs.so.1 is too old: it has no ibv_wc_status_str"},
                 {"fork", "libibverbs.so.1: ibv_fork_init failed"},
                 {"broken", "apt-get install libibverbs1"}};
#define N_LIBRARIES (sizeof libraries / sizeof *libraries)

/* In a process whose linker looks into the folder first. */
static int look(const struct library *l)
{
    const char *why = NULL;
    const sp_ib_library *found = sp_ib_library_get(&why);
    bool right = found != NULL
                     ? l->why[0] == '\0' && found->reg_dmabuf_mr == NULL && found->wc_status_str != NULL
                     : l->why[0] != '\0' && strstr(why, l->why) != NULL;
    if (!right)
        fprintf(stderr, "%s: got \"%s\", wanted \"%s\"\n", l->folder, why, l->why);
    return right ? 0 : 1;
}

static void test_libraries(void)
{
    for (size_t i = 0; i < N_LIBRARIES; i++) {
        int status = -1;
        pid_t pid = fork();
        if (pid == 0) {
            char folder[400];
            snprintf(folder, sizeof folder, "%s/%s", IB_LIBRARY_FOLDER, libraries[i].folder);
            setenv("LD_LIBRARY_PATH", folder, 1); /* the linker reads it when a program starts */
            execl("/proc/self/exe", "test_ib_library", "look", libraries[i].folder, (char *)NULL);
            _exit(99);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0, "%s: status %x", libraries[i].folder, status);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"libraries", test_libraries}, {NULL, NULL}};
    for (size_t i = 0; argc == 3 && strcmp(argv[1], "look") == 0 && i < N_LIBRARIES; i++)
        if (strcmp(argv[2], libraries[i].folder) == 0)
            return look(&libraries[i]);
    return test_main(cases, argc, argv);
}
