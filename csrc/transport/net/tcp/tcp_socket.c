/* tcp_socket.c - see tcp_socket.h. */
#include "transport/net/tcp/tcp_socket.h"

#include "core/base/bits.h"
#include "core/base/status.h"
#include "transport/common/sock.h"

#include <errno.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>

/* Most bytes of one read. They are still in the L2 cache when they are decoded, and one busy peer does not
 * delay the others. */
#define READ_BYTES ((size_t)256 << 10)
#define FINISH_READS 64 /* a peer that goes on sending must not delay the close */

spccl_status sp_tcp_socket_open(sp_tcp_socket *s, int fd, size_t buffer_bytes)
{
    *s = (sp_tcp_socket){.fd = -1, .readable = true, .writable = true};
    SP_TRY(sp_mirror_open(&s->in, buffer_bytes));
    SP_TRY(sp_mirror_open(&s->out, buffer_bytes));
    s->fd = fd;
    return SPCCL_OK;
}

void sp_tcp_socket_close(sp_tcp_socket *s)
{
    sp_sock_close(&s->fd);
    sp_mirror_close(&s->in);
    sp_mirror_close(&s->out);
}

void *sp_tcp_socket_reserve(sp_tcp_socket *s, size_t bytes)
{
    if (sp_mirror_space(&s->out) < sp_record_bytes(bytes))
        return NULL;
    s->out.held = true;
    return sp_mirror_free(&s->out) + SP_TCP_HEAD_BYTES;
}

static void add_to_ranges(sp_tcp_socket *s, uint32_t call)
{
    if (s->n_ranges == 0 || (s->ranges[s->n_ranges - 1].call != call && s->n_ranges < SP_TCP_CALL_RANGES))
        s->ranges[s->n_ranges++].call = call;
    s->ranges[s->n_ranges - 1].end = ++s->n_committed;
}

void sp_tcp_socket_commit(sp_tcp_socket *s, uint32_t queue, uint32_t sequence, size_t bytes, uint32_t call)
{
    sp_record_write(sp_mirror_free(&s->out), queue, sequence, bytes);
    if (s->out.used == 0)
        s->first_left = sp_record_bytes(bytes);
    s->out.used += sp_record_bytes(bytes);
    s->out.held = false;
    add_to_ranges(s, call);
}

/* The kernel took the first n bytes of `out`. Count the messages that end in them, and drop the bytes. */
static void drop_sent(sp_tcp_socket *s, size_t n)
{
    while (s->first_left != 0 && s->first_left <= n) {
        s->n_left++;
        if (s->first_left == s->out.used)
            s->first_left = 0;
        else
            s->first_left += sp_record_bytes(sp_load_le32(sp_mirror_first(&s->out) + s->first_left));
    }
    if (s->first_left != 0)
        s->first_left -= n;
    sp_mirror_drop(&s->out, n);
    while (s->n_ranges != 0 && s->ranges[0].end <= s->n_left)
        memmove(s->ranges, s->ranges + 1, (size_t)--s->n_ranges * sizeof *s->ranges);
}

bool sp_tcp_socket_flush(sp_tcp_socket *s)
{
    bool moved = false;
    while (s->out.used != 0 && s->writable) {
        ssize_t n = send(s->fd, sp_mirror_first(&s->out), s->out.used, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0) {
            drop_sent(s, (size_t)n);
            moved = true;
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            s->writable = false;
        } else if (n == 0 || errno != EINTR) {
            s->cut = moved = true;
            s->writable = false;
            drop_sent(s, s->out.used); /* the peer takes no more */
        }
    }
    return moved;
}

bool sp_tcp_socket_fill(sp_tcp_socket *s)
{
    size_t want = sp_min_size(sp_mirror_space(&s->in), READ_BYTES);
    ssize_t n;
    if (!s->readable || s->ended || want == 0)
        return false;
    do
        n = recv(s->fd, sp_mirror_free(&s->in), want, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n > 0) {
        s->in.used += (size_t)n;
        /* A short read emptied the socket: an event will come with more bytes. */
        s->readable = (size_t)n == want || s->hung_up;
        return true;
    }
    s->readable = false;
    s->ended = n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
    return s->ended;
}

spccl_status sp_tcp_socket_peek(const sp_tcp_socket *s, const sp_record_expected *want, const void **out,
                                size_t *bytes)
{
    const uint8_t *head = sp_mirror_first(&s->in);
    size_t n = 0;
    if (s->in.used < SP_TCP_HEAD_BYTES)
        return SPCCL_AGAIN;
    SP_TRY(sp_record_check(head, want, &n));
    if (s->in.used < sp_record_bytes(n))
        return SPCCL_AGAIN;
    *out = head + SP_TCP_HEAD_BYTES;
    *bytes = n;
    return SPCCL_OK;
}

void sp_tcp_socket_release(sp_tcp_socket *s, size_t bytes)
{
    sp_mirror_drop(&s->in, sp_record_bytes(bytes));
}

bool sp_tcp_socket_has_message(const sp_tcp_socket *s)
{
    size_t n;
    if (s->in.used < SP_TCP_HEAD_BYTES)
        return false;
    n = sp_load_le32(sp_mirror_first(&s->in));
    return n > s->in.cap - SP_TCP_HEAD_BYTES || s->in.used >= sp_record_bytes(n);
}

bool sp_tcp_socket_finish(sp_tcp_socket *s)
{
    int unacknowledged = 0;
    s->writable = s->readable = true;
    (void)sp_tcp_socket_flush(s);
    if (s->out.used == 0 && !s->shut) {
        (void)shutdown(s->fd, SHUT_WR);
        s->shut = true;
    }
    for (int i = 0; i < FINISH_READS && !s->ended; i++) {
        s->in.at = s->in.used = 0;
        if (!sp_tcp_socket_fill(s))
            break;
    }
    return !s->ended && !s->cut &&
           (!s->shut || (ioctl(s->fd, SIOCOUTQ, &unacknowledged) == 0 && unacknowledged > 0));
}
