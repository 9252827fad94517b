/* host.c - see host.h. */
#include "transport/common/host.h"

#include "core/base/bits.h"
#include "core/base/status.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define BOOT_ID "/proc/sys/kernel/random/boot_id"

spccl_status sp_host_identity(uint8_t out[SP_HOST_ID_BYTES])
{
    struct stat s;
    ssize_t n;
    int fd = open(BOOT_ID, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "opening " BOOT_ID);
    n = read(fd, out, SP_HOST_BOOT_BYTES);
    close(fd);
    if (n != (ssize_t)SP_HOST_BOOT_BYTES)
        return SP_FAIL(SPCCL_ERR_SYSTEM, BOOT_ID " gave %zd bytes, wanted %d", n, (int)SP_HOST_BOOT_BYTES);
    if (stat("/proc/self/ns/net", &s) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "reading the identity of /proc/self/ns/net");
    sp_store_le64(out + SP_HOST_BOOT_BYTES, (uint64_t)s.st_ino);
    return SPCCL_OK;
}
