/* host.c - see host.h. */
#include "transport/common/host.h"

#include "core/base/bits.h"
#include "core/base/status.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

spccl_status sp_host_identity(uint8_t out[SP_HOST_ID_BYTES])
{
    struct stat s;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, out, SP_HOST_BOOT_BYTES) : -1;
    if (fd >= 0)
        close(fd);
    if (n != (ssize_t)SP_HOST_BOOT_BYTES)
        return SP_FAIL(SPCCL_ERR_SYSTEM, "cannot read /proc/sys/kernel/random/boot_id");
    if (stat("/proc/self/ns/net", &s) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "/proc/self/ns/net");
    sp_store_le64(out + SP_HOST_BOOT_BYTES, (uint64_t)s.st_ino);
    return SPCCL_OK;
}
