/* host.c - see host.h. */
#include "core/base/host.h"

#include "core/base/bits.h"
#include "core/base/status.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAMED (UINT64_C(1) << 63) /* no inode has a number with this bit */
#define BOOT_ID "/proc/sys/kernel/random/boot_id"

spccl_status sp_host_identity(const char *name, uint8_t out[SP_HOST_ID_BYTES])
{
    uint8_t id[SP_HOST_ID_BYTES];
    struct stat s;
    ssize_t n;
    int fd = open(BOOT_ID, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "opening " BOOT_ID);
    n = read(fd, id, SP_HOST_BOOT_BYTES);
    if (n < 0) {
        spccl_status st = SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "reading " BOOT_ID);
        close(fd);
        return st;
    }
    close(fd);
    if (n != (ssize_t)SP_HOST_BOOT_BYTES)
        return SP_FAIL(SPCCL_ERR_SYSTEM, BOOT_ID " gave %zd bytes, wanted %d", n, (int)SP_HOST_BOOT_BYTES);
    if (stat("/proc/self/ns/net", &s) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "reading the identity of /proc/self/ns/net");
    sp_store_le64(id + SP_HOST_BOOT_BYTES, (uint64_t)s.st_ino);
    if (name != NULL && name[0] != '\0')
        sp_store_le64(id + SP_HOST_BOOT_BYTES, (sp_hash_text(name) ^ (uint64_t)s.st_ino) | NAMED);
    memcpy(out, id, SP_HOST_ID_BYTES);
    return SPCCL_OK;
}

bool sp_host_same_kernel(const uint8_t *a, const uint8_t *b)
{
    return memcmp(a, b, SP_HOST_BOOT_BYTES) == 0;
}
