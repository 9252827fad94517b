/* nics.c - see nics.h. */
#include "transport/common/nics.h"

#include "transport/common/forks.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CARDS_MAX 128
#define VERBS_FOLDER "/sys/class/infiniband"

static struct {
    const char *transport;
    sp_nic nic;
    int n_users; /* 0: the entry is free */
} cards[CARDS_MAX];
/* Its lock guards the table. A fork waits for it, so no caller holds the lock of another guard. */
static sp_fork_guard guard = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* A child of fork begins with no card taken. */
static void forget_cards(void *table)
{
    memset(table, 0, sizeof cards);
}

bool sp_nic_is_same(const sp_nic *a, const sp_nic *b)
{
    if (a->pci[0] != '\0' && strcmp(a->pci, b->pci) == 0)
        return true;
    for (int i = 0; i < SP_NIC_NAMES_MAX; i++)
        for (int k = 0; k < SP_NIC_NAMES_MAX && a->names[i][0] != '\0'; k++)
            if (strcmp(a->names[i], b->names[k]) == 0)
                return true;
    return false;
}

void sp_nic_read_pci(const char *path, char out[SP_NIC_PCI_CAP])
{
    const char *last = strrchr(path, '/');
    unsigned domain, bus, device, function;
    int n = 0;
    last = last != NULL ? last + 1 : path;
    out[0] = '\0';
    if (sscanf(last, "%x:%x:%x.%x%n", &domain, &bus, &device, &function, &n) == 4 && last[n] == '\0')
        snprintf(out, SP_NIC_PCI_CAP, "%04x:%02x:%02x.%x", domain & 0xffff, bus & 0xff, device & 0xff,
                 function & 0xf);
}

/* Software RoCE names its interface here. */
static void read_parent(const char *device, char out[SP_NIC_NAME_CAP])
{
    char path[160];
    FILE *f;
    snprintf(path, sizeof path, VERBS_FOLDER "/%.63s/parent", device);
    f = fopen(path, "re");
    if (f != NULL && fgets(out, SP_NIC_NAME_CAP, f) != NULL)
        out[strcspn(out, "\n")] = '\0';
    if (f != NULL)
        fclose(f);
}

void sp_nic_of_verbs(const char *device, sp_nic *out)
{
    char path[160], real[PATH_MAX];
    int n = 2;
    DIR *d;
    memset(out, 0, sizeof *out);
    snprintf(out->names[0], SP_NIC_NAME_CAP, "%s", device);
    read_parent(device, out->names[1]);
    snprintf(path, sizeof path, VERBS_FOLDER "/%.63s/device", device);
    if (realpath(path, real) != NULL)
        sp_nic_read_pci(real, out->pci);
    snprintf(path, sizeof path, VERBS_FOLDER "/%.63s/device/net", device);
    d = opendir(path);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL && n < SP_NIC_NAMES_MAX;)
        if (e->d_name[0] != '.')
            snprintf(out->names[n++], SP_NIC_NAME_CAP, "%.63s", e->d_name);
    if (d != NULL)
        closedir(d);
}

bool sp_nic_take(const char *transport, const sp_nic *nic, const char **holder)
{
    int mine = -1, unused = -1;
    *holder = NULL;
    (void)sp_fork_watch_static(&guard, forget_cards,
                               cards); /* it fails only where no endpoint can be opened */
    pthread_mutex_lock(&guard.lock);
    for (int i = 0; i < CARDS_MAX && *holder == NULL; i++) {
        bool is_same = cards[i].n_users != 0 && sp_nic_is_same(&cards[i].nic, nic);
        if (is_same && strcmp(cards[i].transport, transport) != 0)
            *holder = cards[i].transport;
        else if (is_same && memcmp(&cards[i].nic, nic, sizeof *nic) == 0)
            mine = i;
        else if (cards[i].n_users == 0)
            unused = i;
    }
    if (*holder == NULL && mine < 0 && unused >= 0) {
        cards[unused].transport = transport;
        cards[unused].nic = *nic;
        mine = unused;
    }
    if (*holder == NULL && mine >= 0)
        cards[mine].n_users++;
    pthread_mutex_unlock(&guard.lock);
    return *holder == NULL;
}

void sp_nic_give_back(const char *transport, const sp_nic *nic)
{
    pthread_mutex_lock(&guard.lock);
    for (int i = 0; i < CARDS_MAX; i++)
        if (cards[i].n_users != 0 && strcmp(cards[i].transport, transport) == 0 &&
            memcmp(&cards[i].nic, nic, sizeof *nic) == 0) {
            cards[i].n_users--;
            break;
        }
    pthread_mutex_unlock(&guard.lock);
}
