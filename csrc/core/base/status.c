/* status.c - see status.h. */
#include "core/base/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define SP_ERROR_TEXT_CAP 1024

static _Thread_local char last_error[SP_ERROR_TEXT_CAP];
static _Thread_local bool out_of_descriptors; /* last_error says so */

spccl_status sp_fail(spccl_status status, const char *fmt, ...)
{
    va_list ap;
    char text[SP_ERROR_TEXT_CAP]; /* the arguments may point into last_error */
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    memcpy(last_error, text, sizeof text);
    out_of_descriptors = false;
    return status;
}

bool sp_error_is_descriptors(void)
{
    return out_of_descriptors;
}

spccl_status sp_fail_errno(spccl_status status, const char *fmt, ...)
{
    int err = errno;
    va_list ap;
    char text[SP_ERROR_TEXT_CAP - 128];
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    out_of_descriptors = err == EMFILE || err == ENFILE;
    if (out_of_descriptors) {
        snprintf(last_error, sizeof last_error, "%s: %s (errno %d): raise %s", text, strerror(err), err,
                 err == EMFILE ? "this process's limit (ulimit -n)" : "the system's limit (fs.file-max)");
        return status == SPCCL_ERR_NOMEM ? SPCCL_ERR_SYSTEM : status; /* it is not memory that is missing */
    }
    snprintf(last_error, sizeof last_error, "%s: %s (errno %d)", text, strerror(err), err);
    return status;
}

const char *sp_without_rank(const char *text, int rank)
{
    char name[24];
    int n = snprintf(name, sizeof name, "rank %d: ", rank);
    return strncmp(text, name, (size_t)n) == 0 ? text + n : text;
}

void sp_set_error(const char *text)
{
    size_t n = strlen(text);
    if (n >= sizeof last_error)
        n = sizeof last_error - 1;
    memmove(last_error, text, n);
    last_error[n] = '\0';
}

const char *spccl_last_error(void)
{
    return last_error;
}

const char *spccl_status_name(spccl_status status)
{
    switch (status) {
    case SPCCL_OK:
        return "SPCCL_OK";
    case SPCCL_AGAIN:
        return "SPCCL_AGAIN";
    case SPCCL_ERR_ARG:
        return "SPCCL_ERR_ARG";
    case SPCCL_ERR_DTYPE:
        return "SPCCL_ERR_DTYPE";
    case SPCCL_ERR_DST_SMALL:
        return "SPCCL_ERR_DST_SMALL";
    case SPCCL_ERR_ALIAS:
        return "SPCCL_ERR_ALIAS";
    case SPCCL_ERR_STATE:
        return "SPCCL_ERR_STATE";
    case SPCCL_ERR_UNSUPPORTED:
        return "SPCCL_ERR_UNSUPPORTED";
    case SPCCL_ERR_SETTING:
        return "SPCCL_ERR_SETTING";
    case SPCCL_ERR_FORMAT:
        return "SPCCL_ERR_FORMAT";
    case SPCCL_ERR_VERSION:
        return "SPCCL_ERR_VERSION";
    case SPCCL_ERR_FRAME:
        return "SPCCL_ERR_FRAME";
    case SPCCL_ERR_NOMEM:
        return "SPCCL_ERR_NOMEM";
    case SPCCL_ERR_SYSTEM:
        return "SPCCL_ERR_SYSTEM";
    case SPCCL_ERR_PEER:
        return "SPCCL_ERR_PEER";
    case SPCCL_ERR_TIMEOUT:
        return "SPCCL_ERR_TIMEOUT";
    case SPCCL_ERR_MISMATCH:
        return "SPCCL_ERR_MISMATCH";
    case SPCCL_ERR_ABORTED:
        return "SPCCL_ERR_ABORTED";
    case SPCCL_ERR_AUTH:
        return "SPCCL_ERR_AUTH";
    case SPCCL_ERR_UNREACHABLE:
        return "SPCCL_ERR_UNREACHABLE";
    case SPCCL_ERR_DEVICE:
        return "SPCCL_ERR_DEVICE";
    case SPCCL_ERR_BUG:
        return "SPCCL_ERR_BUG";
    }
    return "SPCCL_ERR_?";
}
