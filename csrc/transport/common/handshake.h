/* handshake.h - the first four messages on every connection of spccl (local sockets, tcp, rendezvous). They
 * say which rank connects to which, and both ends prove that they know the job secret without sending it.
 *
 *   connecting -> accepting   hello      128 bytes: magic, version, sp_hs_hello, a random number
 *   accepting -> connecting   challenge   80 bytes: magic, version, status, a random number,
 *                                                   HMAC(secret, "spccl accept", hello, challenge up to here)
 *   connecting -> accepting   proof       32 bytes: HMAC(secret, "spccl dial", hello, challenge)
 *   accepting -> connecting   result     256 bytes: a status and, if it is not SPCCL_OK, a text
 *
 * No function blocks: call sp_hs_step until it returns something other than SPCCL_AGAIN. The handshake
 * protects only itself: later bytes on the connection are neither encrypted nor authenticated. */
#ifndef SP_HANDSHAKE_H
#define SP_HANDSHAKE_H

#include "transport/common/sock.h"

#define SP_HS_ID_BYTES 16u
#define SP_HS_SECRET_BYTES 32u
#define SP_HS_HELLO_BYTES 128u
#define SP_HS_CHALLENGE_BYTES 80u
#define SP_HS_PROOF_BYTES 32u
#define SP_HS_RESULT_BYTES 256u

enum { SP_HS_SHM = 1, SP_HS_TCP_QUEUE, SP_HS_TCP_CONTROL, SP_HS_RENDEZVOUS, SP_HS_GPU };

/* What the connecting side says about itself. It counts only after the proof. */
typedef struct sp_hs_hello {
    uint8_t to_id[SP_HS_ID_BYTES]; /* random id of the endpoint that it wants to reach */
    uint64_t group_tag, queue_bytes;
    uint32_t kind; /* SP_HS_SHM .. */
    int32_t from, to, world_size;
    uint32_t queue, socket_idx, n_queues, n_sockets;
} sp_hs_hello;

typedef enum sp_hs_state {
    SP_HS_CONNECT_HELLO,
    SP_HS_CONNECT_CHALLENGE,
    SP_HS_CONNECT_PROOF,
    SP_HS_CONNECT_RESULT,
    SP_HS_ACCEPT_HELLO,
    SP_HS_ACCEPT_CHALLENGE,
    SP_HS_ACCEPT_PROOF,
    SP_HS_ACCEPT_RESULT,
    SP_HS_OVER
} sp_hs_state;

typedef struct sp_hs {
    sp_hs_state state;
    int fd;                /* borrowed */
    const uint8_t *secret; /* [SP_HS_SECRET_BYTES], borrowed */
    size_t done;           /* bytes of the current message that are sent or received */
    sp_hs_hello hello;     /* accepting side: valid after SP_HS_ACCEPT_PROOF */
    /* Accepting side: checks whether the proven connecting side belongs here. Its status and last-error text
     * are the result. */
    spccl_status (*check)(void *ctx, const sp_hs_hello *hello);
    void *ctx;
    spccl_status result;
    uint8_t hello_bytes[SP_HS_HELLO_BYTES], challenge[SP_HS_CHALLENGE_BYTES], proof[SP_HS_PROOF_BYTES],
        result_bytes[SP_HS_RESULT_BYTES];
} sp_hs;

/* Start a handshake as the connecting side. Errors: SYSTEM (no random bytes). */
spccl_status sp_hs_connect(sp_hs *hs, int fd, const sp_hs_hello *hello, const uint8_t *secret);
/* Start a handshake as the accepting side. */
void sp_hs_accept(sp_hs *hs, int fd, const uint8_t *secret,
                  spccl_status (*check)(void *ctx, const sp_hs_hello *hello), void *ctx);
/* Continue. SPCCL_OK: both ends are proven, and the accepting side's check passed. The texts of errors are
 * clauses. Errors: PEER (the connection was closed or broke, or the other end is not spccl: another address
 * or try may help), AUTH (the other end has another secret), VERSION, and those of the check (MISMATCH
 * ...). */
spccl_status sp_hs_step(sp_hs *hs);
/* Connecting side: true if the accepting side has proved the secret. It is the right job: keep waiting. */
bool sp_hs_connect_trusted(const sp_hs *hs);

#endif
