/* hosts.c - see hosts.h. */
#include "core/plan/hosts.h"

#include "core/base/mem.h"

spccl_status sp_hosts_create(const int *host_of, int world_size, sp_hosts **out)
{
    size_t n = (size_t)world_size;
    sp_hosts *h = sp_calloc(1, sizeof *h + (5 * n + 1) * sizeof(int));
    int *number; /* number[x]: the number here of the caller's host x, plus 1; 0: not seen yet */
    if (h == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "table of hosts for %d ranks", world_size);
    h->world_size = world_size;
    h->host_of = (int *)(h + 1);
    h->place = h->host_of + n;
    h->ranks = h->place + n;
    h->first = h->ranks + n;
    number = h->first + n + 1;
    for (int r = 0; r < world_size; r++) {
        int host;
        if (number[host_of[r]] == 0)
            number[host_of[r]] = ++h->n_hosts;
        host = number[host_of[r]] - 1;
        h->host_of[r] = host;
        h->place[r] = h->first[host + 1]++;
    }
    for (int i = 0; i < h->n_hosts; i++)
        h->first[i + 1] += h->first[i];
    for (int r = 0; r < world_size; r++)
        h->ranks[h->first[h->host_of[r]] + h->place[r]] = r;
    *out = h;
    return SPCCL_OK;
}
