/* mirror.c - see mirror.h. */
#include "transport/common/mirror.h"

#include "core/base/bits.h"
#include "core/base/status.h"

#include <sys/mman.h>
#include <unistd.h>

spccl_status sp_mirror_open(sp_mirror *m, size_t bytes)
{
    size_t cap = sp_align_up(bytes, (size_t)sysconf(_SC_PAGESIZE));
    int fd = memfd_create("spccl", MFD_CLOEXEC);
    uint8_t *data = MAP_FAILED;
    spccl_status st;
    if (fd < 0 || ftruncate(fd, (off_t)cap) != 0)
        goto fail;
    data = mmap(NULL, 2 * cap, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED)
        goto fail;
    for (int half = 0; half < 2; half++)
        if (mmap(data + (size_t)half * cap, cap, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
            MAP_FAILED)
            goto fail;
    close(fd);
    *m = (sp_mirror){.data = data, .cap = cap};
    return SPCCL_OK;
fail:
    st = SP_FAIL_ERRNO(SPCCL_ERR_NOMEM, "a buffer of %zu bytes, mapped twice", cap);
    if (data != MAP_FAILED)
        munmap(data, 2 * cap);
    if (fd >= 0)
        close(fd);
    return st;
}

void sp_mirror_close(sp_mirror *m)
{
    if (m->data != NULL)
        munmap(m->data, 2 * m->cap);
    *m = (sp_mirror){0};
}
