/* registry.c - the transports of this build, and the parser of lists of transports. See transport.h. */
#include "transport/common/transports.h"

#include "core/base/status.h"

#include <string.h>

/* Only tests link fault.c. In other programs the address is NULL, which ends the list. */
extern const sp_transport sp_transport_fault __attribute__((weak, visibility("hidden")));

const sp_transport *const sp_transports[] = {&sp_transport_inproc,
                                             &sp_transport_shm,
                                             &sp_transport_ib,
                                             &sp_transport_ncclnet,
                                             &sp_transport_tcp,
                                             &sp_transport_fault,
                                             NULL};

static const sp_transport *find(const char *name, size_t n)
{
    for (size_t i = 0; sp_transports[i] != NULL; i++)
        if (strlen(sp_transports[i]->name) == n && strncmp(sp_transports[i]->name, name, n) == 0)
            return sp_transports[i];
    return NULL;
}

const sp_transport *sp_transport_find(const char *name)
{
    return find(name, strlen(name));
}

static spccl_status unknown(const char *list, const char *name, size_t n)
{
    char known[128] = "";
    size_t used = 0;
    for (size_t i = 0; sp_transports[i] != NULL && used < sizeof known; i++)
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i == 0 ? "" : ", ",
                                 sp_transports[i]->name);
    return SP_FAIL(SPCCL_ERR_SETTING,
                   "transports \"%s\": \"%.*s\" is not one of %s (SPCCL_TRANSPORTS, config.transports)", list,
                   (int)n, name, known);
}

spccl_status sp_transport_parse_list(const char *text, const sp_transport **out, size_t cap, size_t *n)
{
    size_t count = 0;
    for (const char *at = text;;) {
        size_t length;
        const sp_transport *t;
        at += strspn(at, " ");
        length = strcspn(at, " ,");
        t = find(at, length);
        if (t == NULL)
            return unknown(text, at, length);
        for (size_t i = 0; i < count; i++)
            if (out[i] == t)
                return SP_FAIL(SPCCL_ERR_SETTING, "transports \"%s\": \"%s\" is given twice", text, t->name);
        if (count == cap)
            return SP_FAIL(SPCCL_ERR_SETTING, "transports \"%s\": got more than %zu", text, cap);
        out[count++] = t;
        at += length;
        at += strspn(at, " ");
        if (*at == '\0')
            break;
        if (*at++ != ',')
            return SP_FAIL(SPCCL_ERR_SETTING, "transports \"%s\": wanted a comma after \"%s\"", text,
                           t->name);
    }
    *n = count;
    return SPCCL_OK;
}
