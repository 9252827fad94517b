/* tcp_stripe.c - one data socket of transport tcp: a bounded buffer each way. On the wire, per message:
 *   0 u32 bytes  4 u16 lane  6 u16 "ST"  8 u64 number of the message on its lane     then the bytes, padded to 16
 * Header and payload lie together in the buffer and leave in one writev with whatever else waits there. */
#include "tcp.h"

#include "bits.h"
#include "mem.h"
#include "status.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#define RECORD_MAGIC 0x5453u /* "ST" */

static size_t record_bytes(size_t bytes)
{
    return SP_TCP_RECORD_BYTES + sp_align_up(bytes, 16);
}

spccl_status sp_tcp_stripe_init(sp_tcp_stripe *s, int lane, size_t cap)
{
    s->lane = lane;
    s->cap = cap;
    s->out = sp_alloc64(cap);
    s->in = sp_alloc64(cap);
    if (s->out == NULL || s->in == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "tcp: buffers of %zu bytes", cap);
    return SPCCL_OK;
}

void sp_tcp_stripe_fini(sp_tcp_stripe *s)
{
    sp_tcp_close_fd(&s->fd);
    sp_free(s->out);
    sp_free(s->in);
    s->out = s->in = NULL;
}

/* Where a record of that size can lie whole; cap = nowhere now. One byte stays free so that full differs from empty. */
static size_t find_room(const sp_tcp_stripe *s, size_t total)
{
    if (s->wrap != 0)
        return s->head + total < s->sent ? s->head : s->cap;
    if (s->cap - s->head >= total)
        return s->head;
    return total < s->sent ? 0 : s->cap;
}

spccl_status sp_tcp_stripe_reserve(sp_tcp_stripe *s, size_t bytes, void **out)
{
    size_t at = find_room(s, record_bytes(bytes));
    if (at == s->cap)
        return SPCCL_AGAIN;
    s->reserved_at = at;
    s->reserved_bytes = bytes;
    *out = s->out + at + SP_TCP_RECORD_BYTES;
    return SPCCL_OK;
}

void sp_tcp_stripe_commit(sp_tcp_stripe *s, uint64_t seq)
{
    uint8_t *r = s->out + s->reserved_at;
    size_t total = record_bytes(s->reserved_bytes), used = SP_TCP_RECORD_BYTES + s->reserved_bytes;
    sp_store_le32(r, (uint32_t)s->reserved_bytes);
    sp_store_le16(r + 4, (uint16_t)s->lane);
    sp_store_le16(r + 6, RECORD_MAGIC);
    sp_store_le64(r + 8, seq);
    memset(r + used, 0, total - used);
    if (s->reserved_at < s->head) /* wrapped: what lies before ends here */
        s->wrap = s->head;
    s->head = s->reserved_at + total;
    s->reserved_bytes = 0;
}

bool sp_tcp_stripe_has_output(const sp_tcp_stripe *s)
{
    return !s->broken && (s->wrap != 0 || s->sent != s->head);
}

bool sp_tcp_stripe_has_room(const sp_tcp_stripe *s)
{
    return !s->ended && s->filled < s->cap;
}

/* n bytes have left the buffer. */
static void advance(sp_tcp_stripe *s, size_t n)
{
    s->sent += n;
    if (s->wrap != 0 && s->sent >= s->wrap) {
        s->sent -= s->wrap;
        s->wrap = 0;
    }
    if (s->wrap == 0 && s->sent == s->head)
        s->sent = s->head = 0;
}

void sp_tcp_stripe_write(sp_tcp_stripe *s)
{
    while (sp_tcp_stripe_has_output(s)) {
        struct iovec v[2] = {{.iov_base = s->out + s->sent, .iov_len = (s->wrap != 0 ? s->wrap : s->head) - s->sent},
                             {.iov_base = s->out, .iov_len = s->head}};
        struct msghdr m = {.msg_iov = v, .msg_iovlen = s->wrap != 0 ? 2 : 1}; /* writev, without SIGPIPE */
        ssize_t n = sendmsg(s->fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n >= 0)
            advance(s, (size_t)n);
        else if (errno == EAGAIN || errno == EWOULDBLOCK)
            return;
        else if (errno != EINTR)
            s->broken = true;
    }
}

/* Is there a whole record at read_at? Its payload bytes, or 0. */
static size_t whole_record(const sp_tcp_stripe *s)
{
    size_t have = s->filled - s->read_at, bytes;
    if (have < SP_TCP_RECORD_BYTES)
        return 0;
    bytes = sp_load_le32(s->in + s->read_at);
    return bytes <= s->cap && record_bytes(bytes) <= have ? bytes : 0;
}

/* Move an incomplete record that may not fit before the end to the front. Nothing is peeked then. As cap is at least
 * twice the largest record, there is room to read whenever no whole record is there. */
static void compact(sp_tcp_stripe *s)
{
    size_t have = s->filled - s->read_at;
    if (s->read_at <= s->cap / 2 || whole_record(s) != 0)
        return;
    memmove(s->in, s->in + s->read_at, have);
    s->read_at = 0;
    s->filled = have;
}

void sp_tcp_stripe_read(sp_tcp_stripe *s)
{
    while (sp_tcp_stripe_has_room(s)) {
        ssize_t n = recv(s->fd, s->in + s->filled, s->cap - s->filled, MSG_DONTWAIT);
        if (n > 0) {
            s->filled += (size_t)n;
            compact(s);
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        else if (n == 0 || errno != EINTR)
            s->ended = true;
    }
}

spccl_status sp_tcp_stripe_peek(sp_tcp_stripe *s, uint64_t seq, size_t bytes_max, const void **out, size_t *bytes)
{
    const uint8_t *r = s->in + s->read_at;
    size_t have = s->filled - s->read_at, n;
    if (have < SP_TCP_RECORD_BYTES)
        return s->ended ? SPCCL_ERR_PEER : SPCCL_AGAIN;
    n = sp_load_le32(r);
    if (n == 0 || n > bytes_max || sp_load_le16(r + 4) != (uint16_t)s->lane || sp_load_le16(r + 6) != RECORD_MAGIC ||
        sp_load_le64(r + 8) != seq)
        return SP_FAIL(SPCCL_ERR_FORMAT, "its message %llu on lane %d has a record that cannot be (%zu bytes)",
                       (unsigned long long)seq, s->lane, n);
    if (record_bytes(n) > have)
        return s->ended ? SPCCL_ERR_PEER : SPCCL_AGAIN;
    *out = r + SP_TCP_RECORD_BYTES;
    *bytes = n;
    return SPCCL_OK;
}

void sp_tcp_stripe_release(sp_tcp_stripe *s)
{
    s->read_at += record_bytes(whole_record(s));
    if (s->read_at == s->filled)
        s->read_at = s->filled = 0;
    compact(s);
}
