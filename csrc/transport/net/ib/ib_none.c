/* ib_none.c - ib_verbs.h in a build without <infiniband/verbs.h>: no device is usable, so nothing else is called. */
#include "transport/net/ib/ib_verbs.h"

#include <stdio.h>

#define WHY                                                                                                  \
    "built without <infiniband/verbs.h> (Debian: apt-get install libibverbs-dev, then build spccl again)"

static spccl_status absent(void)
{
    return SP_FAIL(SPCCL_ERR_BUG, "ib: " WHY);
}

void sp_ib_choose(int rank, const char *gpu, sp_ib_choice *out)
{
    (void)rank;
    (void)gpu;
    *out = (sp_ib_choice){.why = WHY};
}

void sp_ib_inform(const char **value, const char **why)
{
    *value = "absent";
    *why = WHY;
}

bool sp_ib_net_device(size_t i, sp_net_device *out)
{
    (void)i;
    (void)out;
    return false;
}

void sp_ib_device_text(const sp_ib_device *device, char *out, size_t cap)
{
    snprintf(out, cap, "device %s port %d", device->name, device->port);
}

void sp_ib_device_details(const sp_ib_device *device, char *out, size_t cap)
{
    sp_ib_device_text(device, out, cap);
}

spccl_status sp_ib_context_open(const sp_ib_device *device, int n_completions, sp_ib_context **out)
{
    (void)device;
    (void)n_completions;
    (void)out;
    return absent();
}

void sp_ib_context_close(sp_ib_context *d)
{
    (void)d;
}

void sp_ib_context_close_descriptors(sp_ib_context *d)
{
    (void)d;
}

int sp_ib_context_fd(const sp_ib_context *d)
{
    (void)d;
    return -1;
}

int sp_ib_context_event_fd(const sp_ib_context *d)
{
    (void)d;
    return -1;
}

void sp_ib_context_log_events(sp_ib_context *d, int rank)
{
    (void)d;
    (void)rank;
}

spccl_status sp_ib_context_notify(sp_ib_context *d)
{
    (void)d;
    return absent();
}

void sp_ib_context_forget(sp_ib_context *d)
{
    (void)d;
}

int sp_ib_context_poll(sp_ib_context *d, sp_ib_completion *out, int cap)
{
    (void)d;
    (void)out;
    (void)cap;
    return -1;
}

spccl_status sp_ib_memory_open(sp_ib_context *d, void *data, size_t bytes, enum sp_ib_writer writer,
                               sp_ib_memory *out)
{
    (void)d;
    (void)data;
    (void)bytes;
    (void)writer;
    (void)out;
    return absent();
}

spccl_status sp_ib_region_open(sp_ib_context *d, const sp_region_config *config, sp_ib_memory *out)
{
    (void)d;
    (void)config;
    (void)out;
    return absent();
}

void sp_ib_memory_close(sp_ib_memory *m)
{
    (void)m;
}

spccl_status sp_ib_link_open(sp_ib_context *d, int n_writes, int n_receives, sp_ib_link **out,
                             sp_ib_end *mine)
{
    (void)d;
    (void)n_writes;
    (void)n_receives;
    (void)out;
    (void)mine;
    return absent();
}

void sp_ib_link_close(sp_ib_link *l)
{
    (void)l;
}

spccl_status sp_ib_link_receive(sp_ib_link *l, uint64_t id, int n)
{
    (void)l;
    (void)id;
    (void)n;
    return absent();
}

spccl_status sp_ib_link_connect(sp_ib_link *l, const sp_ib_end *mine, const sp_ib_end *theirs)
{
    (void)l;
    (void)mine;
    (void)theirs;
    return absent();
}

spccl_status sp_ib_link_write(sp_ib_link *l, const sp_ib_write *w)
{
    (void)l;
    (void)w;
    return absent();
}

spccl_status sp_ib_link_open_loop(sp_ib_context *d, sp_ib_link **out)
{
    (void)d;
    (void)out;
    return absent();
}

spccl_status sp_ib_link_read(sp_ib_link *l, const void *from, uint32_t rkey, void *to, uint32_t lkey,
                             uint64_t id)
{
    (void)l;
    (void)from;
    (void)rkey;
    (void)to;
    (void)lkey;
    (void)id;
    return absent();
}
