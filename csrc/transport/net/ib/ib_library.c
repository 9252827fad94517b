/* ib_library.c - see ib_library.h. */
#include "transport/net/ib/ib_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define LIBRARY "libibverbs.so.1"

static sp_ib_library library;
static bool usable;
static char failure[200];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const struct {
    const char *name;
    size_t at;
} symbols[] = {
#define SYMBOL(name)                                                                                         \
    {                                                                                                        \
        "ibv_" #name, offsetof(sp_ib_library, name)                                                          \
    }
    SYMBOL(fork_init),       SYMBOL(get_device_list),     SYMBOL(free_device_list),
    SYMBOL(get_device_name), SYMBOL(open_device),         SYMBOL(close_device),
    SYMBOL(query_device),    SYMBOL(query_port),          SYMBOL(query_gid),
    SYMBOL(alloc_pd),        SYMBOL(dealloc_pd),          SYMBOL(reg_mr),
    SYMBOL(dereg_mr),        SYMBOL(create_comp_channel), SYMBOL(destroy_comp_channel),
    SYMBOL(create_cq),       SYMBOL(destroy_cq),          SYMBOL(get_cq_event),
    SYMBOL(ack_cq_events),   SYMBOL(create_qp),           SYMBOL(modify_qp),
    SYMBOL(destroy_qp),      SYMBOL(get_async_event),     SYMBOL(ack_async_event),
    SYMBOL(event_type_str),  SYMBOL(wc_status_str),
#undef SYMBOL
};

static void address_of_optional(void *handle)
{
    void *address = dlsym(handle, "ibv_reg_dmabuf_mr");
    memcpy(&library.reg_dmabuf_mr, &address, sizeof address);
}

static void open_library(void)
{
    void *handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        snprintf(failure, sizeof failure, "%.100s (Debian: apt-get install libibverbs1 ibverbs-providers)",
                 dlerror());
        return;
    }
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *address = dlsym(handle, symbols[i].name);
        if (address == NULL) {
            snprintf(failure, sizeof failure, LIBRARY " is too old: it has no %s", symbols[i].name);
            return;
        }
        memcpy((char *)&library + symbols[i].at, &address, sizeof address);
    }
    address_of_optional(handle);
    /* Kernels before 5.12 need it so that a child of fork does not disturb registered memory of the driver. */
    if (library.fork_init() != 0) {
        snprintf(failure, sizeof failure, LIBRARY ": ibv_fork_init failed: memory was registered before");
        return;
    }
    usable = true;
}

const sp_ib_library *sp_ib_library_get(const char **why)
{
    pthread_once(&once, open_library);
    *why = failure;
    return usable ? &library : NULL;
}
