/* net_plugin.c - an NCCL net plugin over loopback sockets: the double for real plugins in tests. It exports versions
 * 8 to 12, or the one of TEST_NET_VERSION; 7 stands for a plugin that is too old. Its declarations are its own, so
 * that a mistake in those of csrc/transport/net/plugin/plugin_abi.c shows.
 *
 * It checks what it is given, and returns "invalid usage" with a line on stderr if that is wrong. Environment
 * variables, read by init, give it habits of real plugins:
 *   TEST_NET_DEVICES=n      number of devices, 0 too; default 1
 *   TEST_NET_SPEED=n      net_speed in Mbit/s of the devices; the second half is ten times slower
 *   TEST_NET_DEVICE=s     name of the first device; default sock0
 *   TEST_NET_COMMS=n      most connections of a device
 *   TEST_NET_NAME=s       name of the plugin
 *   TEST_NET_BUSY=n       one in n isend, irecv and test of an unfinished request does nothing
 *   TEST_NET_SLOW=n       connect and accept return no connection n times
 *   TEST_NET_CREDIT=1     isend does nothing until the receiver has posted, as over InfiniBand
 *   TEST_NET_ENV=1        init changes the environment
 *   TEST_NET_NCCL=1       NCCL calls too: isend takes empty messages, and ignores what the pointer to its request
 *                         points to, as irecv does
 *   TEST_NET_LOG=1        init logs a text with wrong arguments
 *   TEST_NET_SIZE=n       test gives n as the size of each received message
 *   TEST_NET_FAIL and others: calls that fail, hang or crash (net_faults.c) */
#include "net_plugin.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define REQUESTS 32
#define HANDLE_MAGIC 0x74656e74

struct header {
    uint32_t bytes, tag;
};
struct comm;
struct request {
    struct comm *comm;
    uint8_t *data;
    size_t bytes, moved;     /* moved counts the header too */
    struct header head, got; /* got: the header that is being received */
    int done;
};
struct registration {
    struct registration *next;
};
struct comm {
    struct registration *registrations; /* they end with the connection */
    int fd, credit_fd, receives;
    int tries;
    uint64_t n_given, n_done, n_credits;
    struct request requests[REQUESTS]; /* n % REQUESTS */
};
struct listener {
    int fd, first_fd, tries;
};
struct handle {
    uint32_t magic, port;
};

static logger log_line;
int net_n_devices, net_speed, net_comms;
char net_name[40] = "Test Sockets";
char net_device[16] = "sock0";
static int busy, slow, credit, wrong_size, for_nccl;
static _Atomic uint32_t n_busy;

/* ---- devices ---- */

int net_start(logger log)
{
    const char *name = getenv("TEST_NET_NAME"), *device = getenv("TEST_NET_DEVICE");
    log_line = log;
    net_n_devices = net_number("TEST_NET_DEVICES", 1);
    net_speed = net_number("TEST_NET_SPEED", 0);
    net_comms = net_number("TEST_NET_COMMS", 0x7fffffff);
    busy = net_number("TEST_NET_BUSY", 0);
    slow = net_number("TEST_NET_SLOW", 0);
    credit = net_number("TEST_NET_CREDIT", 0);
    wrong_size = net_number("TEST_NET_SIZE", -1);
    for_nccl = net_number("TEST_NET_NCCL", 0);
    snprintf(net_name, sizeof net_name, "%s", name != NULL ? name : "Test Sockets");
    snprintf(net_device, sizeof net_device, "%s", device != NULL ? device : "sock0");
    if (net_number("TEST_NET_ENV", 0) != 0) {
        setenv("TEST_NET_ADDED", "1", 1);
        setenv("NCCL_PROTO", "simple", 1);
        unsetenv("TEST_NET_KEPT");
    }
    if (net_number("TEST_NET_LOG", 0) != 0 && log != NULL)
        log(2, 1, "net_plugin.c", __LINE__, "a device named %s is not used", (char *)1);
    if (net_faulty("init")) {
        if (log != NULL)
            log(2, 1, "net_plugin.c", __LINE__, "no link on any port");
        return 2;
    }
    return 0;
}

int net_devices(int *n)
{
    if (net_faulty("devices"))
        return 2;
    *n = net_n_devices;
    return 0;
}

/* ---- connections ---- */

static int new_socket(void)
{
    return socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}

static struct sockaddr_in loopback(uint32_t port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

int net_listen_device(int dev, void *handle, void **out)
{
    struct sockaddr_in a = loopback(0);
    struct handle h = {.magic = HANDLE_MAGIC};
    socklen_t n = sizeof a;
    struct listener *l;
    if (net_faulty("listen"))
        return 2;
    net_end_slowly();
    if (dev < 0 || dev >= net_n_devices)
        return net_misuse("listen on a device that is not there");
    l = calloc(1, sizeof *l);
    l->fd = new_socket();
    l->first_fd = -1;
    if (l->fd < 0 || bind(l->fd, (struct sockaddr *)&a, sizeof a) != 0 || listen(l->fd, 16) != 0 ||
        getsockname(l->fd, (struct sockaddr *)&a, &n) != 0)
        return 2;
    h.port = ntohs(a.sin_port);
    memset(handle, 0, 128);
    memcpy(handle, &h, sizeof h);
    *out = l;
    return 0;
}

static struct comm *new_comm(int fd, int credit_fd, int receives)
{
    struct comm *c = calloc(1, sizeof *c);
    int one = 1;
    c->fd = fd;
    c->credit_fd = credit_fd;
    c->receives = receives;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return c;
}

/* Over loopback a connect succeeds at once, or fails. */
static int connect_now(const struct handle *h)
{
    struct sockaddr_in a = loopback(h->port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

int net_connect_device(int dev, void *handle, void **out, void **device)
{
    static __thread int tries;
    struct handle h;
    int fd, credit_fd;
    memcpy(&h, handle, sizeof h);
    if (net_faulty("connect"))
        return 2;
    if (dev < 0 || dev >= net_n_devices || h.magic != HANDLE_MAGIC)
        return net_misuse("connect with a wrong device or handle");
    if (device == NULL || *device != NULL)
        return net_misuse("connect asks for offload to a device");
    *out = NULL;
    if (tries++ < slow)
        return 0;
    tries = 0;
    fd = connect_now(&h);
    credit_fd = connect_now(&h);
    if (fd < 0 || credit_fd < 0)
        return 6;
    *out = new_comm(fd, credit_fd, 0);
    return 0;
}

int net_accept_comm(void *listener, void **out, void **device)
{
    struct listener *l = listener;
    int fd;
    if (net_faulty("accept"))
        return 2;
    if (device == NULL || *device != NULL)
        return net_misuse("accept asks for offload to a device");
    *out = NULL;
    if (l->tries++ < slow)
        return 0;
    fd = accept4(l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return errno == EAGAIN ? 0 : 2;
    if (l->first_fd < 0) {
        l->first_fd = fd;
        return 0;
    }
    *out = new_comm(l->first_fd, fd, 1);
    l->first_fd = -1;
    return 0;
}

/* Bytes that this process has registered in all, for tests. */
extern _Atomic size_t net_registered_bytes;
__attribute__((visibility("default"))) _Atomic size_t net_registered_bytes;

int net_reg(void *comm, void *data, size_t bytes, int type, void **mr)
{
    struct comm *c = comm;
    struct registration *r;
    if (net_faulty("regMr"))
        return 2;
    if (comm == NULL || data == NULL || bytes == 0 || type != 1)
        return net_misuse("regMr");
    net_registered_bytes += bytes;
    r = malloc(sizeof *r);
    r->next = c->registrations;
    c->registrations = r;
    *mr = r;
    return 0;
}

/* Where the connection's list points to a registration, or to its end. */
static struct registration **find_registration(struct comm *c, const void *mr)
{
    struct registration **at = &c->registrations;
    while (*at != NULL && *at != mr)
        at = &(*at)->next;
    return at;
}

int net_dereg(void *comm, void *mr)
{
    struct registration **at;
    if (comm == NULL)
        return net_misuse("deregMr without a connection");
    at = find_registration(comm, mr);
    if (*at == NULL)
        return net_misuse("deregMr of memory that is not registered");
    *at = (*at)->next;
    free(mr);
    return net_faulty("deregMr") ? 2 : 0;
}

/* ---- transfers ---- */

static int is_busy(void)
{
    /* Without a pattern: a caller that asks in turn must not always get the same answer for the same thing. */
    return busy != 0 && ((++n_busy * 2654435761u) >> 16) % (uint32_t)busy == 0;
}

static struct request *new_request(struct comm *c, void *data, size_t bytes, int tag)
{
    struct request *r = &c->requests[c->n_given % REQUESTS];
    *r = (struct request){.comm = c, .data = data, .bytes = bytes, .head = {(uint32_t)bytes, (uint32_t)tag}};
    c->n_given++;
    return r;
}

/* 1: done. 0: not yet. -1: broken. */
static int push_one(struct request *r)
{
    while (r->moved < sizeof r->head + r->bytes) {
        size_t n_head = r->moved < sizeof r->head ? sizeof r->head - r->moved : 0;
        size_t at = n_head != 0 ? 0 : r->moved - sizeof r->head;
        struct iovec parts[2] = {{(uint8_t *)&r->head + r->moved, n_head}, {r->data + at, r->bytes - at}};
        struct msghdr m = {.msg_iov = n_head != 0 ? parts : parts + 1, .msg_iovlen = n_head != 0 ? 2 : 1};
        ssize_t n = sendmsg(r->comm->fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0)
            return errno == EAGAIN || errno == EINTR ? 0 : -1;
        r->moved += (size_t)n;
    }
    return 1;
}

/* Bytes of a header are taken as they come. If they were left in the socket, they could keep a whole segment of the
 * kernel in the receive buffer: over loopback, the window then stays closed for ever. */
static int pull_one(struct request *r)
{
    while (r->moved < sizeof r->head || r->moved < sizeof r->head + r->head.bytes) {
        int in_head = r->moved < sizeof r->head;
        ssize_t n =
            in_head ? recv(r->comm->fd, (uint8_t *)&r->got + r->moved, sizeof r->got - r->moved, MSG_DONTWAIT)
                    : recv(r->comm->fd, r->data + (r->moved - sizeof r->head),
                           sizeof r->head + r->head.bytes - r->moved, MSG_DONTWAIT);
        if (n < 0)
            return errno == EAGAIN || errno == EINTR ? 0 : -1;
        if (n == 0)
            return -1;
        r->moved += (size_t)n;
        if (!in_head || r->moved < sizeof r->head)
            continue;
        if (r->got.tag != r->head.tag || r->got.bytes > r->bytes)
            return net_misuse("another tag, or more bytes than the receiver posted"), -1;
        r->head = r->got;
    }
    return 1;
}

/* Move the requests of a comm in order. False if the connection is broken. */
static int advance(struct comm *c)
{
    while (c->n_done < c->n_given) {
        struct request *r = &c->requests[c->n_done % REQUESTS];
        int got = c->receives ? pull_one(r) : push_one(r);
        if (got < 0)
            return 0;
        if (got == 0)
            return 1;
        r->done = 1;
        c->n_done++;
    }
    return 1;
}

/* Has the receiver posted one more receive? */
static int has_credit(struct comm *c)
{
    uint8_t bytes[REQUESTS];
    ssize_t n = recv(c->credit_fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n > 0)
        c->n_credits += (uint64_t)n;
    return c->n_credits > c->n_given;
}

int net_send_any(void *comm, void *data, size_t bytes, int tag, void **request)
{
    struct comm *c = comm;
    if (c == NULL || c->receives || (!for_nccl && (*request != NULL || bytes == 0)))
        return net_misuse("isend");
    *request = NULL;
    if (is_busy() || c->n_given - c->n_done >= REQUESTS || (credit && !has_credit(c)))
        return 0;
    if (net_faulty("isend"))
        return 6;
    *request = new_request(c, data, bytes, tag);
    return advance(c) ? 0 : 6;
}

int net_receive_any(void *comm, int n, void *data, size_t bytes, int tag, void **request)
{
    struct comm *c = comm;
    if (c == NULL || !c->receives || (!for_nccl && *request != NULL) || n != 1)
        return net_misuse("irecv");
    *request = NULL;
    if (is_busy() || c->n_given - c->n_done >= REQUESTS)
        return 0;
    if (net_faulty("irecv"))
        return 6;
    *request = new_request(c, data, bytes, tag);
    if (credit)
        (void)send(c->credit_fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    return 0;
}

int net_test_any(void *request, int *done, int *size)
{
    struct request *r = request;
    *done = 0;
    if (r == NULL)
        return net_misuse("test of no request");
    if (!r->done && is_busy())
        return 0;
    if (!r->done && !advance(r->comm) && !r->done)
        return 6;
    if (r->done && net_faulty("test"))
        return 6;
    *done = r->done;
    if (r->done && size != NULL)
        *size = r->comm->receives && wrong_size >= 0 ? wrong_size : (int)r->head.bytes;
    return 0;
}

static int close_comm(struct comm *c)
{
    while (c->registrations != NULL) {
        struct registration *r = c->registrations;
        c->registrations = r->next;
        free(r);
    }
    close(c->fd);
    close(c->credit_fd);
    free(c);
    return 0;
}

int net_close_send(void *comm)
{
    return net_faulty("closeSend") ? 2 : close_comm(comm);
}
int net_close_receive(void *comm)
{
    return net_faulty("closeRecv") ? 2 : close_comm(comm);
}
int net_close_listen(void *listener)
{
    struct listener *l = listener;
    if (l->first_fd >= 0)
        close(l->first_fd);
    close(l->fd);
    free(l);
    return net_faulty("closeListen") ? 2 : 0;
}
