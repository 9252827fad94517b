/* handshake.h - the first four messages on every connection of spccl (shm's local socket, tcp, rendezvous):
 * who is calling whom, and proof at both ends that the job secret is known, without showing it.
 *
 *   dialler -> acceptor   hello      128 bytes: magic, version, who and what, a random number
 *   acceptor -> dialler   challenge   80 bytes: magic, version, a random number,
 *                                               HMAC(secret, "accept", hello, number)
 *   dialler -> acceptor   proof       32 bytes: HMAC(secret, "dial", hello, challenge)
 *   acceptor -> dialler   verdict    256 bytes: a status and, if it is not SPCCL_OK, a text
 *
 * Nothing blocks: call step until it returns something other than SPCCL_AGAIN. The bytes that follow on the
 * connection are not protected: the proof keeps strangers out, it does not encrypt. */
#ifndef SP_HANDSHAKE_H
#define SP_HANDSHAKE_H

#include "transport/common/sock.h"

#define SP_HS_ID_BYTES 16u
#define SP_HS_SECRET_BYTES 32u
#define SP_HS_HELLO_BYTES 128u
#define SP_HS_CHALLENGE_BYTES 80u
#define SP_HS_PROOF_BYTES 32u
#define SP_HS_VERDICT_BYTES 256u

enum { SP_HS_SHM = 1, SP_HS_TCP_QUEUE, SP_HS_TCP_CONTROL, SP_HS_RENDEZVOUS, SP_HS_GPU };

/* What the dialler says about itself; believed only after the proof. */
typedef struct sp_hs_hello {
    uint8_t to_id[SP_HS_ID_BYTES]; /* random id of the endpoint it means to reach */
    uint64_t group_tag, queue_bytes;
    uint32_t kind; /* SP_HS_SHM .. */
    int32_t from, to, world_size;
    uint32_t queue, stripe, n_queues, n_sockets;
} sp_hs_hello;

typedef enum sp_hs_state {
    SP_HS_CONNECT_HELLO,
    SP_HS_CONNECT_CHALLENGE,
    SP_HS_CONNECT_PROOF,
    SP_HS_CONNECT_VERDICT,
    SP_HS_ACCEPT_HELLO,
    SP_HS_ACCEPT_CHALLENGE,
    SP_HS_ACCEPT_PROOF,
    SP_HS_ACCEPT_VERDICT,
    SP_HS_OVER
} sp_hs_state;

typedef struct sp_hs {
    sp_hs_state state;
    int fd;                /* borrowed */
    const uint8_t *secret; /* [SP_HS_SECRET_BYTES], borrowed */
    size_t done;           /* of the message under way */
    sp_hs_hello hello;     /* acceptor: valid once SP_HS_ACCEPT_PROOF is over */
    /* Acceptor: does this proven dialler belong here? Its status and last-error text go to the dialler. */
    spccl_status (*check)(void *ctx, const sp_hs_hello *hello);
    void *ctx;
    spccl_status verdict;
    uint8_t hello_bytes[SP_HS_HELLO_BYTES], challenge[SP_HS_CHALLENGE_BYTES], proof[SP_HS_PROOF_BYTES],
        verdict_bytes[SP_HS_VERDICT_BYTES];
} sp_hs;

/* Errors: SYSTEM (no random bytes). */
spccl_status sp_hs_connect(sp_hs *hs, int fd, const sp_hs_hello *hello, const uint8_t *secret);
void sp_hs_accept(sp_hs *hs, int fd, const uint8_t *secret,
                  spccl_status (*check)(void *ctx, const sp_hs_hello *hello), void *ctx);
/* SPCCL_OK: both ends are proven and the acceptor said yes. Otherwise, with a clause as the text:
 * PEER (closed, broke, or not spccl at all: another address or another try may help), AUTH (the other end
 * has another secret), VERSION, or what the acceptor's check said (MISMATCH ...). */
spccl_status sp_hs_step(sp_hs *hs);
/* The dialler has seen the acceptor's proof: this is the right endpoint, so patience is in order. */
bool sp_hs_connect_trusted(const sp_hs *hs);

#endif
