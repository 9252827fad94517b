/* ib_none.c - transport "ib" in a build without <infiniband/verbs.h>: it reaches no peer, so no other function is called. */
#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/transports.h"

#include <stdio.h>

#define WHY                                                                                                  \
    "built without <infiniband/verbs.h> (Debian: apt-get install libibverbs-dev, then build spccl again)"

static void none_inform(const char **value, const char **why)
{
    *value = "absent";
    *why = WHY;
}

static spccl_status none_open(const sp_endpoint_config *config, sp_endpoint **out)
{
    *out = sp_calloc(1, 1);
    return *out != NULL ? SPCCL_OK : SP_FAIL(SPCCL_ERR_NOMEM, "rank %d: ib: an endpoint", config->rank);
}

static spccl_status none_address(sp_endpoint *ep, uint8_t *out, size_t *bytes)
{
    (void)ep;
    (void)out;
    *bytes = 0;
    return SPCCL_OK;
}

static bool none_can_reach(sp_endpoint *ep, const uint8_t *address, size_t bytes, char *why, size_t why_cap)
{
    (void)ep;
    (void)address;
    (void)bytes;
    snprintf(why, why_cap, "%s", WHY);
    return false;
}

static void none_close(sp_endpoint *ep)
{
    sp_free(ep);
}

const sp_transport sp_transport_ib = {
    .name = "ib",
    .inform = none_inform,
    .open = none_open,
    .address = none_address,
    .can_reach = none_can_reach,
    .close = none_close,
};
