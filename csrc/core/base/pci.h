/* pci.h - where two devices of a host are on PCI. A device is named by its folder in sysfs,
 * "/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0"; "": unknown. */
#ifndef SP_PCI_H
#define SP_PCI_H

/* What lies between two devices. */
typedef enum sp_pci_path {
    SP_PCI_UNKNOWN,
    SP_PCI_SWITCHES,    /* switches below one port of the CPU: NCCL's PIX and PXB */
    SP_PCI_HOST_BRIDGE, /* a host bridge of the CPU: NCCL's PHB */
    SP_PCI_CPUS         /* several host bridges: NCCL's NODE and SYS */
} sp_pci_path;

sp_pci_path sp_pci_path_between(const char *a, const char *b);
/* The NUMA node of a device; -1: unknown. */
int sp_pci_numa_node(const char *path);

#define SP_PCI_FAR 3
/* 0: only switches lie between the two; 1: a host bridge; 2: several, of one NUMA node; SP_PCI_FAR: other NUMA nodes, or
 * not known. */
int sp_pci_distance(const char *a, const char *b);

#endif
