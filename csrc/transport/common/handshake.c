/* handshake.c - see handshake.h. The bytes of the messages; numbers are little-endian:
 *   hello      0 magic[8]  8 version u32  12 kind u32  16 to_id[16]  32 group_tag u64  40 queue_bytes u64
 *              48 from i32  52 to i32  56 world_size i32  60 queue u32  64 socket_idx u32  68 n_queues u32
 *              72 n_sockets u32  76 zero[20]  96 random[32]
 *   challenge  0 magic[8]  8 version u32  12 status i32  16 random[32]  48 mac[32]
 *   result     0 status i32  4 text[252], zero-ended */
#include "transport/common/handshake.h"

#include "core/base/bits.h"
#include "core/base/status.h"
#include "transport/common/auth.h"

#include <string.h>

#define HS_VERSION 1u
#define HELLO_RANDOM_AT 96u
#define CHALLENGE_MAC_AT 48u
static const char magic[8] = {'S', 'P', 'C', 'C', 'L', 'h', 's', '1'};

static void put_hello(uint8_t *p, const sp_hs_hello *h)
{
    const uint32_t words[] = {(uint32_t)h->from, (uint32_t)h->to, (uint32_t)h->world_size,
                              h->queue,          h->socket_idx,   h->n_queues,
                              h->n_sockets};
    memcpy(p, magic, sizeof magic);
    sp_store_le32(p + 8, HS_VERSION);
    sp_store_le32(p + 12, h->kind);
    memcpy(p + 16, h->to_id, SP_HS_ID_BYTES);
    sp_store_le64(p + 32, h->group_tag);
    sp_store_le64(p + 40, h->queue_bytes);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        sp_store_le32(p + 48 + 4 * i, words[i]);
}

static void get_hello(const uint8_t *p, sp_hs_hello *h)
{
    h->kind = sp_load_le32(p + 12);
    memcpy(h->to_id, p + 16, SP_HS_ID_BYTES);
    h->group_tag = sp_load_le64(p + 32);
    h->queue_bytes = sp_load_le64(p + 40);
    h->from = (int32_t)sp_load_le32(p + 48);
    h->to = (int32_t)sp_load_le32(p + 52);
    h->world_size = (int32_t)sp_load_le32(p + 56);
    h->queue = sp_load_le32(p + 60);
    h->socket_idx = sp_load_le32(p + 64);
    h->n_queues = sp_load_le32(p + 68);
    h->n_sockets = sp_load_le32(p + 72);
}

/* The HMAC of each side starts with a label of its own, so that no side can send the other's proof back. */
static void accept_mac(const sp_hs *hs, uint8_t out[SP_SHA256_BYTES])
{
    const sp_bytes parts[] = {
        {"spccl accept", 12}, {hs->hello_bytes, SP_HS_HELLO_BYTES}, {hs->challenge, CHALLENGE_MAC_AT}};
    sp_hmac_sha256(hs->secret, SP_HS_SECRET_BYTES, parts, 3, out);
}
static void connect_mac(const sp_hs *hs, uint8_t out[SP_SHA256_BYTES])
{
    const sp_bytes parts[] = {
        {"spccl dial", 10}, {hs->hello_bytes, SP_HS_HELLO_BYTES}, {hs->challenge, SP_HS_CHALLENGE_BYTES}};
    sp_hmac_sha256(hs->secret, SP_HS_SECRET_BYTES, parts, 3, out);
}

spccl_status sp_hs_connect(sp_hs *hs, int fd, const sp_hs_hello *hello, const uint8_t *secret)
{
    memset(hs, 0, sizeof *hs);
    hs->state = SP_HS_CONNECT_HELLO;
    hs->fd = fd;
    hs->secret = secret;
    hs->hello = *hello;
    put_hello(hs->hello_bytes, hello);
    return sp_random_bytes(hs->hello_bytes + HELLO_RANDOM_AT, SP_HS_HELLO_BYTES - HELLO_RANDOM_AT);
}

void sp_hs_accept(sp_hs *hs, int fd, const uint8_t *secret,
                  spccl_status (*check)(void *ctx, const sp_hs_hello *hello), void *ctx)
{
    memset(hs, 0, sizeof *hs);
    hs->state = SP_HS_ACCEPT_HELLO;
    hs->fd = fd;
    hs->secret = secret;
    hs->check = check;
    hs->ctx = ctx;
}

bool sp_hs_connect_trusted(const sp_hs *hs)
{
    return hs->state == SP_HS_CONNECT_PROOF || hs->state == SP_HS_CONNECT_RESULT;
}

static void enter(sp_hs *hs, sp_hs_state state)
{
    hs->state = state;
    hs->done = 0;
}

static spccl_status read_challenge(sp_hs *hs)
{
    uint8_t mac[SP_SHA256_BYTES];
    spccl_status st = sp_sock_read(hs->fd, hs->challenge, sizeof hs->challenge, &hs->done);
    if (hs->done >= sizeof magic && memcmp(hs->challenge, magic, sizeof magic) != 0)
        return SP_FAIL(SPCCL_ERR_PEER, "the program that answers is not spccl");
    SP_TRY(st);
    if (sp_load_le32(hs->challenge + 8) != HS_VERSION || sp_load_le32(hs->challenge + 12) != 0)
        return SP_FAIL(
            SPCCL_ERR_VERSION,
            "it has version %u of the handshake, this rank has %u: install the same spccl everywhere",
            sp_load_le32(hs->challenge + 8), HS_VERSION);
    accept_mac(hs, mac);
    if (!sp_equal_secret(mac, hs->challenge + CHALLENGE_MAC_AT, sizeof mac))
        return SP_FAIL(SPCCL_ERR_AUTH,
                       "it has another job secret: give every rank of a group the same secret");
    connect_mac(hs, hs->proof);
    enter(hs, SP_HS_CONNECT_PROOF);
    return SPCCL_OK;
}

static spccl_status read_result(sp_hs *hs)
{
    SP_TRY(sp_sock_read(hs->fd, hs->result_bytes, sizeof hs->result_bytes, &hs->done));
    hs->result = (spccl_status)(int32_t)sp_load_le32(hs->result_bytes);
    hs->result_bytes[sizeof hs->result_bytes - 1] = 0;
    enter(hs, SP_HS_OVER);
    switch (hs->result) {
    case SPCCL_OK:
        return SPCCL_OK;
    case SPCCL_ERR_MISMATCH:
    case SPCCL_ERR_PEER:
        return SP_FAIL(hs->result, "%s", (const char *)hs->result_bytes + 4);
    default: /* the number comes from outside: do not return it as a status */
        return SP_FAIL(SPCCL_ERR_PEER, "it refused (%d): %s", (int)hs->result,
                       (const char *)hs->result_bytes + 4);
    }
}

static spccl_status read_hello(sp_hs *hs)
{
    uint32_t version;
    spccl_status st = sp_sock_read(hs->fd, hs->hello_bytes, sizeof hs->hello_bytes, &hs->done);
    if (memcmp(hs->hello_bytes, magic, hs->done < sizeof magic ? hs->done : sizeof magic) != 0)
        return SP_FAIL(SPCCL_ERR_PEER, "it does not speak spccl");
    SP_TRY(st);
    version = sp_load_le32(hs->hello_bytes + 8);
    memcpy(hs->challenge, magic, sizeof magic);
    sp_store_le32(hs->challenge + 8, HS_VERSION);
    sp_store_le32(hs->challenge + 12, version == HS_VERSION ? 0 : (uint32_t)SPCCL_ERR_VERSION);
    SP_TRY(sp_random_bytes(hs->challenge + 16, CHALLENGE_MAC_AT - 16));
    accept_mac(hs, hs->challenge + CHALLENGE_MAC_AT);
    enter(hs, SP_HS_ACCEPT_CHALLENGE);
    return SPCCL_OK;
}

static spccl_status read_proof(sp_hs *hs)
{
    uint8_t mac[SP_SHA256_BYTES];
    const char *text;
    size_t n;
    SP_TRY(sp_sock_read(hs->fd, hs->proof, sizeof hs->proof, &hs->done));
    connect_mac(hs, mac);
    if (!sp_equal_secret(mac, hs->proof, sizeof mac))
        return SP_FAIL(SPCCL_ERR_AUTH, "it does not know the job secret");
    get_hello(hs->hello_bytes, &hs->hello);
    hs->result = hs->check(hs->ctx, &hs->hello);
    sp_store_le32(hs->result_bytes, (uint32_t)hs->result);
    if (hs->result != SPCCL_OK) {
        text = spccl_last_error();
        n = sp_min_size(strlen(text), SP_HS_RESULT_BYTES - 5);
        memcpy(hs->result_bytes + 4, text, n);
    }
    enter(hs, SP_HS_ACCEPT_RESULT);
    return SPCCL_OK;
}

static spccl_status send_result(sp_hs *hs)
{
    SP_TRY(sp_sock_write(hs->fd, hs->result_bytes, sizeof hs->result_bytes, &hs->done));
    enter(hs, SP_HS_OVER);
    if (hs->result != SPCCL_OK)
        return SP_FAIL(hs->result, "%s", (const char *)hs->result_bytes + 4);
    return SPCCL_OK;
}

static spccl_status send_then(sp_hs *hs, const uint8_t *bytes, size_t n, sp_hs_state next)
{
    SP_TRY(sp_sock_write(hs->fd, bytes, n, &hs->done));
    if (hs->state == SP_HS_ACCEPT_CHALLENGE && sp_load_le32(hs->challenge + 12) != 0)
        return SP_FAIL(SPCCL_ERR_VERSION, "it has version %u of the handshake, this rank has %u",
                       sp_load_le32(hs->hello_bytes + 8), HS_VERSION);
    enter(hs, next);
    return SPCCL_OK;
}

static spccl_status step_once(sp_hs *hs)
{
    switch (hs->state) {
    case SP_HS_CONNECT_HELLO:
        return send_then(hs, hs->hello_bytes, sizeof hs->hello_bytes, SP_HS_CONNECT_CHALLENGE);
    case SP_HS_CONNECT_CHALLENGE:
        return read_challenge(hs);
    case SP_HS_CONNECT_PROOF:
        return send_then(hs, hs->proof, sizeof hs->proof, SP_HS_CONNECT_RESULT);
    case SP_HS_CONNECT_RESULT:
        return read_result(hs);
    case SP_HS_ACCEPT_HELLO:
        return read_hello(hs);
    case SP_HS_ACCEPT_CHALLENGE:
        return send_then(hs, hs->challenge, sizeof hs->challenge, SP_HS_ACCEPT_PROOF);
    case SP_HS_ACCEPT_PROOF:
        return read_proof(hs);
    case SP_HS_ACCEPT_RESULT:
        return send_result(hs);
    case SP_HS_OVER:
        break;
    }
    return SP_FAIL(SPCCL_ERR_BUG, "handshake: state %d", (int)hs->state);
}

spccl_status sp_hs_step(sp_hs *hs)
{
    do
        SP_TRY(step_once(hs));
    while (hs->state != SP_HS_OVER);
    return SPCCL_OK;
}
