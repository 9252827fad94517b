/* unique_id.c - groups of callers that have no store: the unique id names our rendezvous (rendezvous.h). */
#include "core/base/abi.h"
#include "core/base/env.h"
#include "core/base/mem.h"
#include "core/contract/rendezvous.h"
#include "core/run/comm.h"

#include <string.h>

spccl_status spccl_get_unique_id(spccl_unique_id *out)
{
    int64_t timeout_ms;
    if (out == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_get_unique_id: out is NULL");
    SP_TRY(sp_env_check());
    SP_TRY(sp_env_number(SP_ENV_TIMEOUT_MS, &timeout_ms));
    return sp_rendezvous_start(sp_env_text(SP_ENV_RENDEZVOUS_ADDR), timeout_ms, out);
}

spccl_status spccl_comm_init_rank(const spccl_unique_id *id, int rank, int world_size,
                                  const spccl_config *config, spccl_comm **out)
{
    spccl_config c = SPCCL_CONFIG_INIT;
    uint8_t secret[SP_SECRET_BYTES];
    spccl_store store;
    spccl_status st;
    int64_t timeout_ms;
    if (id == NULL || out == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_comm_init_rank: %s is NULL", id == NULL ? "id" : "out");
    SP_TRY(sp_options_copy("spccl_config", config, &c, sizeof c));
    SP_TRY(sp_comm_check_config(rank, world_size, &c)); /* before this rank connects */
    SP_TRY(sp_env_check());
    SP_TRY(sp_env_number(SP_ENV_TIMEOUT_MS, &timeout_ms));
    SP_TRY_TO(done, st,
              sp_rendezvous_connect(id, c.timeout_ms > 0 ? c.timeout_ms : timeout_ms, &store, secret));
    if (c.secret == NULL)
        c.secret = secret;
    st = spccl_comm_create(&store, rank, world_size, &c, out);
    if (st == SPCCL_OK)
        sp_rendezvous_done(&store, world_size);
    else
        st = sp_rendezvous_explain(&store, st);
    sp_rendezvous_disconnect(&store);
done:
    explicit_bzero(secret, sizeof secret);
    sp_wipe_stack();
    return st;
}
