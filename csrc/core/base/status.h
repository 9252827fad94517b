/* status.h - status names and the last-error text of each thread; SP_FAIL, SP_TRY, SP_TRY_TO.
 * Base of the map. */
#ifndef SP_STATUS_H
#define SP_STATUS_H

#include "spccl.h"

#ifdef __cplusplus
extern "C" { /* the launchers of kernels report errors too */
#endif

/* Set this thread's error text (one line: who, where, got, wanted) and return `status`. */
spccl_status sp_fail(spccl_status status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The same with errno's text and number appended. */
spccl_status sp_fail_errno(spccl_status status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Replace this thread's text by `text` as it stands (an error that comes from elsewhere). */
void sp_set_error(const char *text);
/* Printable name of a status without "SPCCL_ERR_": "PEER"; "?" if unknown. */
const char *sp_status_short(spccl_status status);

#ifdef __cplusplus
}
#endif

/* Used once, where a fault is first seen; above that, only forward. */
#define SP_FAIL(status, ...) sp_fail((status), __VA_ARGS__)
#define SP_FAIL_ERRNO(status, ...) sp_fail_errno((status), __VA_ARGS__)
/* Return from this function with anything that is not SPCCL_OK. */
#define SP_TRY(x)                                                                                            \
    do {                                                                                                     \
        spccl_status sp_try_status_ = (x);                                                                   \
        if (sp_try_status_ != SPCCL_OK)                                                                      \
            return sp_try_status_;                                                                           \
    } while (0)
#define SP_TRY_TO(label, st, x)                                                                              \
    do {                                                                                                     \
        (st) = (x);                                                                                          \
        if ((st) != SPCCL_OK)                                                                                \
            goto label;                                                                                      \
    } while (0)

#endif
