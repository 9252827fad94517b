/* auth.h - SHA-256, HMAC, random bytes, and the comparison of secrets. The handshake needs them to prove the
 * job secret. Sources: FIPS 180-4 (SHA-256), RFC 2104 (HMAC). */
#ifndef SP_AUTH_H
#define SP_AUTH_H

#include "spccl.h"

#include <stdbool.h>

#define SP_SHA256_BYTES 32u

typedef struct sp_sha256 {
    uint32_t state[8];
    uint64_t n_bytes;
    uint8_t block[64];
} sp_sha256;

void sp_sha256_init(sp_sha256 *h);
void sp_sha256_add(sp_sha256 *h, const void *data, size_t bytes);
void sp_sha256_finish(sp_sha256 *h, uint8_t out[SP_SHA256_BYTES]);

typedef struct sp_bytes {
    const void *data;
    size_t bytes;
} sp_bytes;
/* out = HMAC-SHA256(key, the parts one after another). */
void sp_hmac_sha256(const void *key, size_t key_bytes, const sp_bytes *parts, size_t n_parts,
                    uint8_t out[SP_SHA256_BYTES]);

/* True if the bytes are equal. Takes a time that does not depend on them. */
bool sp_equal_secret(const void *a, const void *b, size_t bytes);
/* Random bytes from the kernel. Errors: SYSTEM. */
spccl_status sp_random_bytes(void *out, size_t bytes);

#endif
