/* test.h - the C test harness: CHECK, and test_main, which runs a list of cases. A test program exits with 0
 * for pass, 1 for fail, 77 for skip. */
#ifndef SP_TEST_H
#define SP_TEST_H

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static _Atomic int test_n_failed, test_n_checks; /* atomic: any thread may use CHECK */

#define CHECK(cond, ...)                                                                                     \
    do {                                                                                                     \
        test_n_checks++;                                                                                     \
        if (!(cond)) {                                                                                       \
            test_n_failed++;                                                                                 \
            fprintf(stderr, "%s:%d: CHECK(%s): ", __FILE__, __LINE__, #cond);                                \
            fprintf(stderr, __VA_ARGS__);                                                                    \
            fputc('\n', stderr);                                                                             \
            if (test_n_failed > 20) {                                                                        \
                fprintf(stderr, "too many failures, giving up\n");                                           \
                exit(1);                                                                                     \
            }                                                                                                \
        }                                                                                                    \
    } while (0)
#define CHECK_OK(x)                                                                                          \
    do {                                                                                                     \
        spccl_status check_status_ = (x);                                                                    \
        CHECK(check_status_ == SPCCL_OK, "%s: %s", spccl_status_name(check_status_), spccl_last_error());    \
    } while (0)

/* The call fails with this status, and its error has this text. */
#define CHECK_FAILS(x, status, text)                                                                         \
    do {                                                                                                     \
        spccl_status fails_ = (x);                                                                           \
        CHECK(fails_ == (status) && strstr(spccl_last_error(), (text)) != NULL, "%s: %s",                    \
              spccl_status_name(fails_), spccl_last_error());                                                \
    } while (0)

static inline int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static inline void sleep_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000}, NULL);
}

/* Entries of a folder. /proc/self/fd: the descriptors of this process. */
static inline int count_entries(const char *folder)
{
    int n = 0;
    DIR *d = opendir(folder);
    while (d != NULL && readdir(d) != NULL)
        n++;
    if (d != NULL)
        closedir(d);
    return n;
}

struct test_case {
    const char *name;
    void (*fn)(void);
};

/* Random numbers (splitmix64). SPCCL_TEST_SEED sets the seed; by default each run has a new one. test_main
 * prints the seed, so that a failure can be repeated. */
static uint64_t test_rng_state;
static inline uint64_t test_rand(void)
{
    uint64_t z = (test_rng_state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* SPCCL_TEST_SHARE=n: about one in n of the random cases and rounds, and smaller arrays. `make test` sets it where a stage
 * repeats with another compiler, sanitizer or instruction set what the stage "gcc" runs whole. */
static int test_share = 1;
static inline void read_test_share(void)
{
    const char *text = getenv("SPCCL_TEST_SHARE");
    test_share = text != NULL && atoi(text) > 1 ? atoi(text) : 1;
    if (test_share > 1)
        printf("SPCCL_TEST_SHARE=%d: not all random cases\n", test_share);
}
/* The share of n, but at least `least` of them. */
static inline int share_of(int n, int least)
{
    int few = n < least ? n : least;
    return n / test_share > few ? n / test_share : few;
}

static inline int test_main(const struct test_case *cases, int argc, char **argv)
{
    const char *seed = getenv("SPCCL_TEST_SEED");
    FILE *f = seed == NULL ? fopen("/dev/urandom", "rb") : NULL;
    uint64_t first = seed != NULL ? strtoull(seed, NULL, 0) : 1;
    if (f != NULL) {
        if (fread(&first, sizeof first, 1, f) != 1)
            first = 1;
        fclose(f);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("SPCCL_TEST_SEED=%llu\n", (unsigned long long)first);
    read_test_share();
    int n_run = 0;
    for (; cases->name != NULL; cases++) {
        int before = test_n_failed;
        if (argc > 1 && strstr(cases->name, argv[1]) == NULL)
            continue;
        n_run++;
        test_rng_state = first;
        cases->fn();
        printf("%s %s\n", test_n_failed == before ? "ok  " : "FAIL", cases->name);
    }
    printf("%d checks, %d failed\n", test_n_checks, test_n_failed);
    if (n_run == 0)
        printf("no case has \"%s\" in its name\n", argc > 1 ? argv[1] : "");
    return n_run == 0 || test_n_failed != 0;
}

#endif
