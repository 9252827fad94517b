/* status.h - status names, the last-error text of each thread, SP_FAIL, SP_TRY and SP_TRY_TO. */
#ifndef SP_STATUS_H
#define SP_STATUS_H

#include "spccl.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" { /* for the CUDA files, which are C++ */
#endif

/* Set this thread's error text (one line: who, where, got, wanted), and return `status`. */
spccl_status sp_fail(spccl_status status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* As sp_fail, with the text and number of errno appended. */
spccl_status sp_fail_errno(spccl_status status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* `text` without a leading "rank <rank>: ", for a caller that has named that rank already. */
const char *sp_without_rank(const char *text, int rank);
/* Is this thread's last failure that no file descriptor was left? Only if nobody reworded it since. */
bool sp_error_is_descriptors(void);
/* Replace this thread's error text by `text`: for an error that another thread or rank found. */
void sp_set_error(const char *text);

#ifdef __cplusplus
}
#endif

/* Use these where an error is first found. Callers pass the status on with SP_TRY. */
#define SP_FAIL(status, ...) sp_fail((status), __VA_ARGS__)
#define SP_FAIL_ERRNO(status, ...) sp_fail_errno((status), __VA_ARGS__)
/* If x is not SPCCL_OK, return it from this function (SP_TRY), or store it in st and go to label (SP_TRY_TO).
 */
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
