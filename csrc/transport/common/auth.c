/* auth.c - see auth.h. */
#include "transport/common/auth.h"

#include "core/base/status.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

/* First 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS 180-4, 4.2.2). */
static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotr(uint32_t v, int n)
{
    return v >> n | v << (32 - n);
}

static uint32_t load_be32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void store_be32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (24 - 8 * i));
}

/* FIPS 180-4, 6.2.2. */
static void sha256_block(uint32_t state[8], const uint8_t block[64])
{
    uint32_t w[64], v[8];
    for (int t = 0; t < 16; t++)
        w[t] = load_be32(block + 4 * t);
    for (int t = 16; t < 64; t++) {
        uint32_t s0 = rotr(w[t - 15], 7) ^ rotr(w[t - 15], 18) ^ w[t - 15] >> 3;
        uint32_t s1 = rotr(w[t - 2], 17) ^ rotr(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = s1 + w[t - 7] + s0 + w[t - 16];
    }
    memcpy(v, state, sizeof v);
    for (int t = 0; t < 64; t++) {
        uint32_t sum1 = rotr(v[4], 6) ^ rotr(v[4], 11) ^ rotr(v[4], 25);
        uint32_t choose = (v[4] & v[5]) ^ (~v[4] & v[6]);
        uint32_t t1 = v[7] + sum1 + choose + round_constants[t] + w[t];
        uint32_t sum0 = rotr(v[0], 2) ^ rotr(v[0], 13) ^ rotr(v[0], 22);
        uint32_t t2 = sum0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        state[i] += v[i];
}

void sp_sha256_init(sp_sha256 *h)
{
    /* Fractional parts of the square roots of the first 8 primes (5.3.3). */
    static const uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(h->state, first, sizeof first);
    h->n_bytes = 0;
}

void sp_sha256_add(sp_sha256 *h, const void *data, size_t bytes)
{
    const uint8_t *p = data;
    while (bytes > 0) {
        size_t used = (size_t)(h->n_bytes % 64), n = 64 - used < bytes ? 64 - used : bytes;
        memcpy(h->block + used, p, n);
        h->n_bytes += n;
        p += n;
        bytes -= n;
        if (used + n == 64)
            sha256_block(h->state, h->block);
    }
}

void sp_sha256_finish(sp_sha256 *h, uint8_t out[SP_SHA256_BYTES])
{
    static const uint8_t padding[64] = {0x80};
    uint64_t n_bits = h->n_bytes * 8;
    size_t used = (size_t)(h->n_bytes % 64);
    uint8_t length[8];
    store_be32(length, (uint32_t)(n_bits >> 32));
    store_be32(length + 4, (uint32_t)n_bits);
    sp_sha256_add(h, padding, used < 56 ? 56 - used : 120 - used);
    sp_sha256_add(h, length, sizeof length);
    for (int i = 0; i < 8; i++)
        store_be32(out + 4 * i, h->state[i]);
    explicit_bzero(h, sizeof *h);
}

void sp_hmac_sha256(const void *key, size_t key_bytes, const sp_bytes *parts, size_t n_parts,
                    uint8_t out[SP_SHA256_BYTES])
{
    uint8_t padded[64] = {0}, inner[SP_SHA256_BYTES];
    sp_sha256 h;
    sp_sha256_init(&h);
    if (key_bytes > sizeof padded) {
        sp_sha256_add(&h, key, key_bytes);
        sp_sha256_finish(&h, padded);
        sp_sha256_init(&h);
    } else {
        memcpy(padded, key, key_bytes);
    }
    for (size_t i = 0; i < sizeof padded; i++)
        padded[i] ^= 0x36;
    sp_sha256_add(&h, padded, sizeof padded);
    for (size_t i = 0; i < n_parts; i++)
        sp_sha256_add(&h, parts[i].data, parts[i].bytes);
    sp_sha256_finish(&h, inner);
    for (size_t i = 0; i < sizeof padded; i++)
        padded[i] ^= 0x36 ^ 0x5c;
    sp_sha256_init(&h);
    sp_sha256_add(&h, padded, sizeof padded);
    sp_sha256_add(&h, inner, sizeof inner);
    sp_sha256_finish(&h, out);
    explicit_bzero(padded, sizeof padded);
    explicit_bzero(inner, sizeof inner);
}

bool sp_equal_secret(const void *a, const void *b, size_t bytes)
{
    const volatile uint8_t *x = a, *y = b;
    uint8_t diff = 0;
    for (size_t i = 0; i < bytes; i++)
        diff |= x[i] ^ y[i];
    return diff == 0;
}

spccl_status sp_random_bytes(void *out, size_t bytes)
{
    uint8_t *p = out;
    while (bytes > 0) {
        ssize_t n = getrandom(p, bytes, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "getrandom of %zu bytes", bytes);
        p += n;
        bytes -= (size_t)n;
    }
    return SPCCL_OK;
}
