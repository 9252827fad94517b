/* test_local_socket.c - local_socket.h: who may connect, messages in parts, too many descriptors, no
 * descriptor left open. test_transport*.c (shm) and test_nvlink.c test what the sockets carry. */
#include "core/base/status.h"
#include "test.h"
#include "transport/common/local_socket.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

static const uint8_t secret[SP_HS_SECRET_BYTES] = {7};
static const sp_local_config plain = {
    .transport = "shm", .what = "queues", .world_size = 2, .secret = secret};

static void expect(spccl_status got, spccl_status wanted, const char *words)
{
    CHECK(got == wanted && strstr(spccl_last_error(), words) != NULL, "wanted %s with \"%s\", got %s: %s",
          spccl_status_name(wanted), words, spccl_status_name(got), spccl_last_error());
}

/* ---- connecting ---- */

/* Rank 2 of 3 listens. Another rank, with the settings `mine`, connects to it. */
static spccl_status try_connecting(const sp_local_config *mine, sp_local_listener *at)
{
    sp_local_listener me = {.config = *mine};
    sp_local_connect c = {.state = SP_LOCAL_UNCONNECTED};
    spccl_status st = SPCCL_AGAIN;
    int fd = -1;
    for (int i = 0; i < 2000 && st == SPCCL_AGAIN; i++) {
        st = sp_local_connect_step(&me, &c, 2, at->id, &fd);
        if (at->acceptor.listen_fd >= 0)
            (void)sp_acceptor_step(&at->acceptor);
        usleep(100);
    }
    sp_sock_close(&fd);
    sp_sock_close(&at->peers[0].sock);
    return st;
}

static void test_connect(void)
{
    sp_local_listener at = {.acceptor = {.listen_fd = -1}};
    sp_local_config c = plain, other;
    int before = count_entries("/proc/self/fd");
    c.rank = 2;
    c.world_size = 3;
    c.kind = SP_HS_SHM;
    c.group_tag = 5;
    c.n_queues = 2;
    c.queue_bytes = 4096;
    CHECK_OK(sp_local_listen(&at, &c));
    at.peers[0].state = SP_LOCAL_EXPECTED;
    other = c;
    other.rank = 0;
    CHECK_OK(try_connecting(&other, &at));
    CHECK(at.peers[0].state == SP_LOCAL_EXCHANGE, "state %d", (int)at.peers[0].state);
    other.rank = 1;
    expect(try_connecting(&other, &at), SPCCL_ERR_PEER, "does not expect rank 1");
    other.rank = 2;
    expect(try_connecting(&other, &at), SPCCL_ERR_PEER, "does not expect rank 2");
    other.rank = 0;
    other.kind = SP_HS_GPU;
    expect(try_connecting(&other, &at), SPCCL_ERR_PEER, "is not the rank that this connection is for");
    other = c;
    other.rank = 0;
    other.queue_bytes = 8192;
    expect(try_connecting(&other, &at), SPCCL_ERR_MISMATCH,
           "2 queues of 8192 bytes, but rank 2 has 2 queues of 4096");
    other.queue_bytes = 4096;
    other.world_size = 4;
    expect(try_connecting(&other, &at), SPCCL_ERR_MISMATCH, "of 4 ranks, but rank 2 in one of 3");
    sp_acceptor_close(&at.acceptor);
    expect(try_connecting(&other, &at), SPCCL_ERR_PEER, "stopped listening before it passed its queues");
    sp_local_close(&at);
    CHECK(count_entries("/proc/self/fd") == before, "%d descriptors more",
          count_entries("/proc/self/fd") - before);
}

/* ---- messages ---- */

static void open_pair(int ends[2])
{
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair");
}

static void test_descriptors(void)
{
    char sent[100] = "queues", got[100];
    int fds[2], ends[2], before = count_entries("/proc/self/fd");
    for (int n = 0; n <= SP_LOCAL_FDS_MAX; n++) {
        sp_local_message m = {.n_bytes = 0};
        open_pair(ends);
        fds[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        fds[1] = open("/dev/zero", O_RDONLY | O_CLOEXEC);
        expect(sp_local_receive(&plain, ends[1], got, sizeof got, n, &m), SPCCL_AGAIN, "");
        CHECK_OK(sp_local_send(&plain, ends[0], sent, sizeof sent, fds, n));
        CHECK_OK(sp_local_receive(&plain, ends[1], got, sizeof got, n, &m));
        CHECK(m.n_fds == n && strcmp(got, "queues") == 0, "%d descriptors, wanted %d", m.n_fds, n);
        if (n == 2)
            CHECK(read(m.fds[1], got, 1) == 1 && got[0] == 0, "the second is /dev/zero");
        sp_local_message_close(&m);
        for (int i = 0; i < 2; i++) {
            close(fds[i]);
            close(ends[i]);
        }
    }
    CHECK(count_entries("/proc/self/fd") == before, "%d descriptors more",
          count_entries("/proc/self/fd") - before);
}

static void send_raw(int fd, const int *fds, int n_fds)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(8 * sizeof(int))];
    } control = {.bytes = {0}};
    struct iovec iov = {.iov_base = &control, .iov_len = 16};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = &control,
                       .msg_controllen = CMSG_SPACE((size_t)n_fds * sizeof(int))};
    control.align.cmsg_level = SOL_SOCKET;
    control.align.cmsg_type = SCM_RIGHTS;
    control.align.cmsg_len = CMSG_LEN((size_t)n_fds * sizeof(int));
    memcpy(CMSG_DATA(&control.align), fds, (size_t)n_fds * sizeof(int));
    CHECK(sendmsg(fd, &m, 0) == 16, "sendmsg");
}

/* More descriptors than wanted: in one part, in two parts, more than fit in the buffer. */
static void test_too_many(void)
{
    static const struct {
        int first, second, max;
    } cases[] = {{2, 0, 1}, {1, 0, 0}, {1, 1, 1}, {2, 2, 2}, {8, 0, 2}};
    int before = count_entries("/proc/self/fd");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_local_message m = {.n_bytes = 0};
        char got[32];
        int ends[2], fds[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        spccl_status st;
        open_pair(ends);
        send_raw(ends[0], fds, cases[i].first);
        st = sp_local_receive(&plain, ends[1], got, sizeof got, cases[i].max, &m);
        if (cases[i].second != 0) {
            expect(st, SPCCL_AGAIN, "");
            send_raw(ends[0], fds, cases[i].second);
            st = sp_local_receive(&plain, ends[1], got, sizeof got, cases[i].max, &m);
        }
        expect(st, SPCCL_ERR_PEER, "something that is not its queues");
        sp_local_message_close(&m);
        close(ends[0]);
        close(ends[1]);
    }
    CHECK(count_entries("/proc/self/fd") == before, "%d descriptors more",
          count_entries("/proc/self/fd") - before);
}

/* This process may not open another descriptor: the kernel drops the sent one, and the text says what to
 * do. */
static void test_limit(void)
{
    sp_local_message m = {.n_bytes = 0};
    struct rlimit old, none = {.rlim_cur = 0};
    char got[16] = {0};
    int ends[2], fds[2] = {0, 0};
    spccl_status st;
    open_pair(ends);
    CHECK_OK(sp_local_send(&plain, ends[0], got, sizeof got, fds, 2));
    CHECK(getrlimit(RLIMIT_NOFILE, &old) == 0, "getrlimit");
    none.rlim_max = old.rlim_max;
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit");
    st = sp_local_receive(&plain, ends[1], got, sizeof got, 2, &m);
    CHECK(setrlimit(RLIMIT_NOFILE, &old) == 0, "setrlimit");
    expect(st, SPCCL_ERR_SYSTEM, "ulimit -n");
    sp_local_message_close(&m);
    close(ends[0]);
    expect(sp_local_receive(&plain, ends[1], got, sizeof got, 2, &(sp_local_message){0}), SPCCL_ERR_PEER,
           "closed");
    close(ends[1]);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"connect", test_connect},
                                             {"descriptors", test_descriptors},
                                             {"too_many", test_too_many},
                                             {"limit", test_limit},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
