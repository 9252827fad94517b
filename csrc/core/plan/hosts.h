/* hosts.h - which ranks are on which host, as plans need it. Hosts have numbers in the order of their first
 * ranks. */
#ifndef SP_HOSTS_H
#define SP_HOSTS_H

#include "core/base/status.h"

typedef struct sp_hosts {
    int n_hosts, world_size;
    int *host_of; /* [world_size] number of each rank's host */
    int *place;   /* [world_size] how many ranks of the same host come before this rank */
    int *first;   /* [n_hosts + 1] host h has ranks[first[h]] .. ranks[first[h + 1] - 1] */
    int *ranks;   /* [world_size] host by host, rising on each */
} sp_hosts;

/* Sort ranks by host. host_of [world_size]: any numbers from 0 to world_size - 1, equal for ranks of one host.
 * One block of memory; free it with sp_free. Errors: NOMEM. */
spccl_status sp_hosts_create(const int *host_of, int world_size, sp_hosts **out);

static inline int sp_hosts_size(const sp_hosts *h, int host)
{
    return h->first[host + 1] - h->first[host];
}

#endif
