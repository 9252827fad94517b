/* captured_log.h - what this process writes to stderr between begin_log and end_log. begin_log changes the environment:
 * no other thread may read it meanwhile. */
#ifndef SP_TEST_CAPTURED_LOG_H
#define SP_TEST_CAPTURED_LOG_H

#include "test.h"

#include <errno.h>
#include <unistd.h>

static int stderr_fd;
static FILE *log_file;

static inline void begin_log(void)
{
    setenv("SPCCL_LOG", "warn", 1);
    fflush(stderr);
    log_file = tmpfile();
    stderr_fd = dup(2);
    CHECK(log_file != NULL && stderr_fd >= 0 && dup2(fileno(log_file), 2) == 2, "errno %d", errno);
}

/* out: the text, cut to cap - 1 bytes. */
static inline void end_log(char *out, size_t cap)
{
    fflush(stderr);
    CHECK(dup2(stderr_fd, 2) == 2, "errno %d", errno);
    close(stderr_fd);
    rewind(log_file);
    out[fread(out, 1, cap - 1, log_file)] = '\0';
    fclose(log_file);
}

#endif
