/* copy_puts.h - puts for tests, which transport fault passes on in place of the wrapped transport's: the caller's thread
 * copies the bytes at once. All ranks are in one process, and the memory of a GPU in software is host memory. */
#ifndef SP_TEST_COPY_PUTS_H
#define SP_TEST_COPY_PUTS_H

#include "core/base/mem.h"
#include "core/base/status.h"
#include "fault.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* The open regions. A handle is the number of its region; the numbers of closed ones are not used again. */
enum { COPY_REGIONS_CAP = 4096 };
static sp_region_config *copy_regions[COPY_REGIONS_CAP];
static uint32_t copy_n_regions;
static pthread_mutex_t copy_lock = PTHREAD_MUTEX_INITIALIZER;

static bool copy_device(sp_endpoint *ep, size_t i, sp_net_device *out)
{
    (void)ep;
    *out = (sp_net_device){.name = "copy0", .why = "copy0 registers no dmabuf"};
    return i == 0;
}

static bool copy_reaches(sp_endpoint *ep, int peer)
{
    (void)ep;
    (void)peer;
    return true;
}

static spccl_status copy_open_region(sp_endpoint *ep, const sp_region_config *config, sp_region **out,
                                     uint8_t *handle)
{
    sp_region_config *r;
    (void)ep;
    if (config->dmabuf >= 0)
        return SP_FAIL(SPCCL_ERR_SYSTEM, "copy0 registers no dmabuf");
    if (copy_n_regions == COPY_REGIONS_CAP || (r = sp_calloc(1, sizeof *r)) == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "region %u", copy_n_regions);
    *r = *config;
    memset(handle, 0, SP_REGION_HANDLE_BYTES);
    pthread_mutex_lock(&copy_lock);
    memcpy(handle, &copy_n_regions, sizeof copy_n_regions);
    copy_regions[copy_n_regions++] = r;
    pthread_mutex_unlock(&copy_lock);
    *out = (sp_region *)r;
    return SPCCL_OK;
}

static void copy_close_region(sp_endpoint *ep, sp_region *r)
{
    (void)ep;
    pthread_mutex_lock(&copy_lock);
    for (uint32_t i = 0; i < copy_n_regions; i++)
        if ((sp_region *)copy_regions[i] == r)
            copy_regions[i] = NULL;
    pthread_mutex_unlock(&copy_lock);
    sp_free(r);
}

static uint32_t copy_room(sp_endpoint *ep, int peer)
{
    (void)ep;
    (void)peer;
    return SP_PUTS_MAX;
}

static spccl_status copy_put(sp_endpoint *ep, int peer, int queue, const sp_put *put)
{
    const sp_region_config *from = (const sp_region_config *)(const void *)put->from, *to;
    spccl_status st = SPCCL_OK;
    uint32_t n;
    (void)ep;
    (void)queue;
    memcpy(&n, put->to, sizeof n);
    pthread_mutex_lock(&copy_lock);
    to = copy_regions[n];
    if (to == NULL)
        st = SP_FAIL(SPCCL_ERR_PEER, "rank %d has closed its region", peer);
    else if (!to->peers_write || put->from_off + put->bytes > from->bytes ||
             put->to_off + put->bytes > to->bytes)
        st = SP_FAIL(SPCCL_ERR_BUG, "a put of %zu bytes to rank %d leaves a region", put->bytes, peer);
    else
        memcpy(to->address + put->to_off, from->address + put->from_off, put->bytes);
    pthread_mutex_unlock(&copy_lock);
    return st;
}

static spccl_status copy_flush(sp_endpoint *ep, int peer, int queue)
{
    (void)ep;
    (void)peer;
    (void)queue;
    pthread_mutex_lock(&copy_lock); /* what another thread has copied is visible now */
    pthread_mutex_unlock(&copy_lock);
    return SPCCL_OK;
}

static const sp_transport_puts copy_puts = {
    .device = copy_device,
    .reaches = copy_reaches,
    .open_region = copy_open_region,
    .close_region = copy_close_region,
    .room = copy_room,
    .put = copy_put,
    .flush = copy_flush,
};

#endif
