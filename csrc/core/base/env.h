/* env.h - the table of all SPCCL_* variables: name, type, default, help.
 * A variable is read when the process or a communicator starts, not during a collective. */
#ifndef SP_ENV_H
#define SP_ENV_H

#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

/* The public settings, then those of SPCCL_DEBUG_*, which may change in any release. */
typedef enum sp_env_id {
    SP_ENV_LOG,             /* text */
    SP_ENV_FORMAT,          /* text */
    SP_ENV_SCHEDULE,        /* text */
    SP_ENV_TRANSPORTS,      /* text */
    SP_ENV_HOST_ID,         /* text */
    SP_ENV_TCP_ADDR,        /* text */
    SP_ENV_IB_DEVICE,       /* text */
    SP_ENV_NET_PLUGIN,      /* text */
    SP_ENV_RENDEZVOUS_ADDR, /* text */
    SP_ENV_TIMEOUT_MS,      /* number */
    SP_ENV_CUDA_ROUTE,      /* text */
    SP_ENV_MAX_CTAS,        /* number */
    SP_ENV_INBOX_BYTES,     /* number */
    SP_ENV_LIST_BYTES,      /* number */
    SP_ENV_CPU_ISA,         /* text; the first of SPCCL_DEBUG_* */
    SP_ENV_SLICE_BYTES,     /* number */
    SP_ENV_QUEUE_BYTES,     /* number */
    SP_ENV_SPIN_US,         /* number */
    SP_ENV_IB_RAILS,        /* number */
    SP_ENV_IB_QPS,          /* number */
    SP_ENV_IB_TIMEOUT,      /* number */
    SP_ENV_NET_PLUGIN_MS,   /* number */
    SP_ENV_NVLINK_HANDLES,  /* text */
    SP_ENV_PROXIES,         /* number */
    SP_ENV_GPU_DIRECT,      /* text */
    SP_N_ENV
} sp_env_id;

typedef struct sp_env_var {
    const char *name, *default_text, *help;
    const char *choices;  /* all words that are allowed, "off, error"; NULL: other code checks the text */
    int64_t min, max;     /* numbers: allowed range; max 0: it is text */
    const char *old_name; /* counts where `name` is unset, for one more release; NULL: none */
} sp_env_var;

const sp_env_var *sp_env_describe(sp_env_id id);
/* The text of the variable, else of its old name, else the default; an empty variable counts as unset. Never NULL. */
const char *sp_env_text(sp_env_id id);
/* The variable's number, or its default. The suffixes K, M and G mean powers of 1024.
 * Errors: SETTING (not a number, or outside its range). */
spccl_status sp_env_number(sp_env_id id, int64_t *out);
/* Checks every variable that is a number or a choice, so that no bad value goes unnoticed because its code does
 * not run. Errors: SETTING. */
spccl_status sp_env_check(void);
/* Logs a warning for each variable with an old name, for each that has no effect any more, and for each SPCCL_... that
 * nothing reads: its name is probably misspelt. These last it finds in the environment with which the process was
 * started. Once per process. */
void sp_env_warn_names(void);

#endif
