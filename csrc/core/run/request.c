/* request.c - the caller's handle on one collective. It may outlive the communicator. */
#include "core/run/comm.h"

#include "core/base/log.h"

#include <inttypes.h>
#include <stdio.h>

spccl_status sp_request_create(const sp_op *op, spccl_request **out)
{
    spccl_request *req = sp_calloc(1, sizeof *req);
    pthread_condattr_t attr;
    if (req == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "request: %zu bytes", sizeof *req);
    atomic_init(&req->refs, 2);
    pthread_mutex_init(&req->mu, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&req->done_cv, &attr);
    pthread_condattr_destroy(&attr);
    req->status = SPCCL_AGAIN;
    req->process_stamp = sp_process_stamp();
    req->timeout_ms = op->a.timeout_ms;
    *out = req;
    return SPCCL_OK;
}

static const char child_text[] =
    "this process is a child of fork of the one that started the collective; only the parent can use it";

/* Errors: STATE in a child of fork. A thread of the parent completes the request, and in the child the
 * request's lock may be held for ever. */
static spccl_status check_process(const spccl_request *req, const char *call)
{
    return sp_process_forked(req->process_stamp)
               ? SP_FAIL(SPCCL_ERR_STATE, "%s: %s: %s", call, req->what, child_text)
               : SPCCL_OK;
}

static void request_unref(spccl_request *req)
{
    if (atomic_fetch_sub(&req->refs, 1) != 1)
        return;
    if (req->report && !req->seen)
        sp_log(SP_LOG_ERROR, -1, "a request was freed, and nobody asked whether it failed: %s",
               req->error != NULL ? req->error : req->what);
    pthread_cond_destroy(&req->done_cv);
    pthread_mutex_destroy(&req->mu);
    sp_free(req->error);
    sp_free(req);
}

void sp_request_complete(spccl_request *req, spccl_status status, const char *error, bool report)
{
    void (*fn)(void *, spccl_status);
    void *ctx;
    char *copy = NULL;
    if (status != SPCCL_OK && (copy = sp_calloc(strlen(error) + 1, 1)) != NULL)
        memcpy(copy, error, strlen(error));
    pthread_mutex_lock(&req->mu);
    req->status = status;
    req->error = copy;
    req->report = report;
    req->done = true;
    fn = req->fn;
    req->seen = fn != NULL;
    ctx = req->fn_ctx;
    pthread_cond_broadcast(&req->done_cv);
    pthread_mutex_unlock(&req->mu);
    if (fn != NULL)
        fn(ctx, status);
    request_unref(req);
}

/* Return the status of a finished request, and set its text as this thread's last error. The caller holds mu.
 */
static spccl_status outcome_locked(spccl_request *req)
{
    req->seen = true;
    if (req->status != SPCCL_OK)
        sp_set_error(req->error != NULL ? req->error : "out of memory while reporting an error");
    return req->status;
}

spccl_status spccl_request_test(spccl_request *req)
{
    spccl_status st = SPCCL_AGAIN;
    if (req == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_request_test: req is NULL");
    SP_TRY(check_process(req, "spccl_request_test"));
    pthread_mutex_lock(&req->mu);
    if (req->done)
        st = outcome_locked(req);
    pthread_mutex_unlock(&req->mu);
    return st;
}

spccl_status spccl_request_wait(spccl_request *req, int64_t timeout_ms)
{
    spccl_status st;
    int64_t deadline_ns;
    struct timespec until;
    if (req == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_request_wait: req is NULL");
    SP_TRY(check_process(req, "spccl_request_wait"));
    deadline_ns = timeout_ms >= 0 ? sp_deadline_in_ms(timeout_ms) : SP_NEVER;
    until.tv_sec = (time_t)(deadline_ns / 1000000000);
    until.tv_nsec = (long)(deadline_ns % 1000000000);
    pthread_mutex_lock(&req->mu);
    while (!req->done) {
        if (deadline_ns == SP_NEVER)
            pthread_cond_wait(&req->done_cv, &req->mu);
        else if (pthread_cond_timedwait(&req->done_cv, &req->mu, &until) != 0 && !req->done)
            break;
    }
    if (req->done)
        st = outcome_locked(req);
    else
        st = SP_FAIL(SPCCL_ERR_TIMEOUT,
                     "%s is not done after a wait of %" PRId64
                     " ms (the collective goes on; its own time-out is %" PRId64 " ms)",
                     req->what, timeout_ms, req->timeout_ms);
    pthread_mutex_unlock(&req->mu);
    return st;
}

const char *spccl_request_error(spccl_request *req)
{
    const char *text = "";
    if (req == NULL)
        return text;
    if (sp_process_forked(req->process_stamp))
        return child_text;
    pthread_mutex_lock(&req->mu);
    if (req->done && req->error != NULL)
        text = req->error;
    pthread_mutex_unlock(&req->mu);
    return text;
}

spccl_status spccl_request_on_done(spccl_request *req, void (*fn)(void *ctx, spccl_status status), void *ctx)
{
    spccl_status status = SPCCL_AGAIN;
    if (req == NULL || fn == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_request_on_done: %s is NULL", req == NULL ? "req" : "fn");
    SP_TRY(check_process(req, "spccl_request_on_done"));
    pthread_mutex_lock(&req->mu);
    if (req->fn != NULL) {
        pthread_mutex_unlock(&req->mu);
        return SP_FAIL(SPCCL_ERR_STATE, "spccl_request_on_done: the request has a callback already");
    }
    req->fn = fn;
    req->fn_ctx = ctx;
    if (req->done) {
        status = req->status;
        req->seen = true;
    }
    pthread_mutex_unlock(&req->mu);
    if (status != SPCCL_AGAIN)
        fn(ctx, status);
    return SPCCL_OK;
}

void spccl_request_free(spccl_request *req)
{
    if (req != NULL && !sp_process_forked(req->process_stamp))
        request_unref(req);
}
