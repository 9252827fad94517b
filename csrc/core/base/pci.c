/* pci.c - see pci.h. */
#include "core/base/pci.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* The length of the first `n` components of a path below /sys/devices; 0: it has fewer. */
static size_t head_of(const char *path, int n)
{
    const char *at = path + strlen("/sys/devices");
    for (int i = 0; i < n; i++) {
        if (*at != '/')
            return 0;
        at++;
        at += strcspn(at, "/");
    }
    return (size_t)(at - path);
}

/* Have both paths the same first `n` components? */
static bool share(const char *a, const char *b, int n)
{
    size_t head = head_of(a, n);
    return head != 0 && head == head_of(b, n) && strncmp(a, b, head) == 0;
}

static bool is_pci(const char *path)
{
    return strncmp(path, "/sys/devices/pci", strlen("/sys/devices/pci")) == 0;
}

sp_pci_path sp_pci_path_between(const char *a, const char *b)
{
    if (!is_pci(a) || !is_pci(b))
        return SP_PCI_UNKNOWN;
    if (!share(a, b, 1))
        return SP_PCI_CPUS;
    /* The second component is a port of the CPU, if there is a third; else the device itself. */
    return share(a, b, 2) ? SP_PCI_SWITCHES : SP_PCI_HOST_BRIDGE;
}

int sp_pci_numa_node(const char *path)
{
    char file[300];
    int node = -1;
    FILE *f;
    if (path[0] == '\0')
        return -1;
    snprintf(file, sizeof file, "%.280s/numa_node", path);
    f = fopen(file, "re");
    if (f == NULL || fscanf(f, "%d", &node) != 1)
        node = -1;
    if (f != NULL)
        fclose(f);
    return node;
}

int sp_pci_distance(const char *a, const char *b)
{
    int node;
    switch (sp_pci_path_between(a, b)) {
    case SP_PCI_SWITCHES:
        return 0;
    case SP_PCI_HOST_BRIDGE:
        return 1;
    case SP_PCI_CPUS:
    case SP_PCI_UNKNOWN:
        break;
    }
    node = sp_pci_numa_node(a);
    return node >= 0 && node == sp_pci_numa_node(b) ? 2 : SP_PCI_FAR;
}
