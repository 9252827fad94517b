/* sched_sums.c - see sched_sums.h. */
#include "core/plan/sched_sums.h"

#include "core/base/mem.h"

#include <string.h>

#define CAP_FIRST 1024

static size_t slot_of(const sp_sums *s, int left, int term)
{
    uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)term) * 0x9e3779b97f4a7c15u;
    size_t n_slots = 2 * (size_t)s->cap + 1, i = (size_t)(h >> 20) % n_slots;
    while (s->table[i] != 0 && (s->of[s->table[i] - 1].left != left || s->of[s->table[i] - 1].term != term))
        i = i + 1 < n_slots ? i + 1 : 0;
    return i;
}

static spccl_status grow(sp_sums *s, int cap)
{
    sp_sum *of = sp_calloc((size_t)cap, sizeof *of);
    int *table = sp_calloc(2 * (size_t)cap + 1, sizeof *table);
    if (of == NULL || table == NULL) {
        sp_free(of);
        sp_free(table);
        return SP_FAIL(SPCCL_ERR_NOMEM, "table of %d sums", cap);
    }
    if (s->n != 0)
        memcpy(of, s->of, (size_t)s->n * sizeof *of);
    sp_free(s->of);
    sp_free(s->table);
    s->of = of;
    s->table = table;
    s->cap = cap;
    for (int i = s->n_ranks + 1; i < s->n; i++)
        table[slot_of(s, of[i].left, of[i].term)] = i + 1;
    return SPCCL_OK;
}

spccl_status sp_sums_init(sp_sums *s, int n_ranks)
{
    int sum = n_ranks;
    *s = (sp_sums){.n_ranks = n_ranks};
    SP_TRY(grow(s, CAP_FIRST));
    for (int r = 0; r <= n_ranks; r++)
        s->of[r] = (sp_sum){-1, -1, r < n_ranks ? UINT64_C(1) << r : 0};
    s->n = n_ranks + 1;
    for (int r = 0; r < n_ranks; r++)
        SP_TRY(sp_sums_add(s, sum, r, &sum));
    s->in_order = sum;
    return SPCCL_OK;
}

void sp_sums_fini(sp_sums *s)
{
    sp_free(s->of);
    sp_free(s->table);
    *s = (sp_sums){0};
}

spccl_status sp_sums_add(sp_sums *s, int left, int term, int *out)
{
    size_t slot;
    if (left == s->n_ranks && term > s->n_ranks) {
        *out = term;
        return SPCCL_OK;
    }
    slot = slot_of(s, left, term);
    if (s->table[slot] == 0) {
        if (s->n == s->cap) {
            SP_TRY(grow(s, 2 * s->cap));
            slot = slot_of(s, left, term);
        }
        s->of[s->n] = (sp_sum){left, term, s->of[left].holds | s->of[term].holds};
        s->table[slot] = ++s->n;
    }
    *out = s->table[slot] - 1;
    return SPCCL_OK;
}
