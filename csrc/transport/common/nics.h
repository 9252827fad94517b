/* nics.h - which transport of this process uses a network card. Transports ib and ncclnet may drive the same card. One of
 * them uses it at a time in a process: the first that takes it, until its last endpoint has given it back. */
#ifndef SP_NICS_H
#define SP_NICS_H

#include <stdbool.h>
#include <stddef.h>

#define SP_NIC_NAMES_MAX 4
#define SP_NIC_NAME_CAP 64
#define SP_NIC_PCI_CAP 16

/* What is known of a card. Two are the same card if they have a name or the PCI address in common. */
typedef struct sp_nic {
    char names[SP_NIC_NAMES_MAX]
              [SP_NIC_NAME_CAP]; /* of the device, and of its interfaces: "mlx5_0", "eth0"; may be "" */
    char pci[SP_NIC_PCI_CAP];    /* "0000:03:00.1"; "": unknown */
} sp_nic;

bool sp_nic_is_same(const sp_nic *a, const sp_nic *b);
/* Find the PCI address at the end of a path: "/sys/devices/pci0000:00/0000:00:03.0". "" if there is none. */
void sp_nic_read_pci(const char *path, char out[SP_NIC_PCI_CAP]);
/* The card of a verbs device, from sysfs: its PCI address and interfaces. */
void sp_nic_of_verbs(const char *device, sp_nic *out);

/* Take a card for a transport, whose name must stay valid. False: *holder is the transport that has it. The caller holds
 * no lock of an sp_fork_guard. */
bool sp_nic_take(const char *transport, const sp_nic *nic, const char **holder);
/* Give back what one sp_nic_take took. */
void sp_nic_give_back(const char *transport, const sp_nic *nic);

#endif
