/* rank_list.h - a list of ranks in the text of an error or a warning. */
#ifndef SP_RANK_LIST_H
#define SP_RANK_LIST_H

#include <stddef.h>
#include <stdio.h>

/* Ranks as text: "1, 4, 5, ..."; starts zeroed. */
typedef struct sp_rank_list {
    int n;
    size_t used;
    char text[96];
} sp_rank_list;

static inline void sp_rank_list_add(sp_rank_list *list, int rank)
{
    enum { N_SHOWN = 8 };
    int n = 0;
    if (list->n < N_SHOWN)
        n = snprintf(list->text + list->used, sizeof list->text - list->used, "%s%d",
                     list->n == 0 ? "" : ", ", rank);
    else if (list->n == N_SHOWN)
        n = snprintf(list->text + list->used, sizeof list->text - list->used, ", ...");
    list->used += n > 0 ? (size_t)n : 0;
    list->n++;
}

#endif
