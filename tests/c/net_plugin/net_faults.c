/* net_faults.c - calls of the test plugin that fail, hang or crash, by environment variables:
 *   TEST_NET_FAIL=call    that call fails; TEST_NET_AFTER=n: only after n calls. Of isend, irecv and test only
 *                         those count that return a request, or that a request is done: polling does not
 *   TEST_NET_HANG=call    that call does not return, likewise
 *   TEST_NET_CRASH=call   that call ends the process, likewise
 *   TEST_NET_PID=n        only in process n
 *   TEST_NET_TIMES=n      only n calls
 *   TEST_NET_DELAY=n      a call that fails does so after n ms
 *   TEST_NET_END=n        a destructor of each thread that listens takes n ms */
#include "net_plugin.h"

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int net_number(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return text != NULL && text[0] != '\0' ? atoi(text) : otherwise;
}

static int applies(const char *variable, const char *call)
{
    const char *text = getenv(variable);
    return text != NULL && strcmp(text, call) == 0;
}

int net_faulty(const char *call)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static int n_calls, n_due;
    int due, any = applies("TEST_NET_FAIL", call) || applies("TEST_NET_HANG", call) ||
                   applies("TEST_NET_CRASH", call);
    if (!any)
        return 0;
    if (net_number("TEST_NET_PID", (int)getpid()) != (int)getpid())
        return 0;
    pthread_mutex_lock(&lock);
    due = n_calls++ >= net_number("TEST_NET_AFTER", 0) && n_due < net_number("TEST_NET_TIMES", 0x7fffffff);
    n_due += due;
    pthread_mutex_unlock(&lock);
    if (due)
        usleep((useconds_t)net_number("TEST_NET_DELAY", 0) * 1000);
    while (due && applies("TEST_NET_HANG", call))
        pause();
    if (due && applies("TEST_NET_CRASH", call))
        raise(SIGSEGV);
    return due && applies("TEST_NET_FAIL", call);
}

static void end_slowly(void *ms)
{
    usleep((useconds_t)(uintptr_t)ms * 1000);
}

static pthread_key_t end_key;
static pthread_once_t end_once = PTHREAD_ONCE_INIT;
static void make_end_key(void)
{
    pthread_key_create(&end_key, end_slowly);
}

void net_end_slowly(void)
{
    pthread_once(&end_once, make_end_key);
    pthread_setspecific(end_key, (void *)(uintptr_t)net_number("TEST_NET_END", 0));
}

int net_misuse(const char *text)
{
    fprintf(stderr, "net_plugin: misuse: %s\n", text);
    return 5;
}
