/* test_auth.c - SHA-256 and HMAC against published test vectors: FIPS 180-4 examples, RFC 4231 section 4. */
#include "test.h"
#include "transport/common/auth.h"

static void check_hex(const uint8_t got[SP_SHA256_BYTES], const char *want, const char *what)
{
    char text[2 * SP_SHA256_BYTES + 1];
    for (size_t i = 0; i < SP_SHA256_BYTES; i++)
        snprintf(text + 2 * i, 3, "%02x", got[i]);
    CHECK(strcmp(text, want) == 0, "%s: %s, wanted %s", what, text, want);
}

static void test_sha256(void)
{
    static const char *const cases[][2] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
    };
    uint8_t out[SP_SHA256_BYTES];
    sp_sha256 h;
    char a[1000];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_sha256_init(&h);
        sp_sha256_add(&h, cases[i][0], strlen(cases[i][0]));
        sp_sha256_finish(&h, out);
        check_hex(out, cases[i][1], cases[i][0]);
    }
    memset(a, 'a', sizeof a);
    sp_sha256_init(&h);
    for (size_t left = 1000000, n; left > 0; left -= n) { /* pieces start and end anywhere in a block */
        n = 1 + (size_t)(test_rand() % sizeof a);
        n = n < left ? n : left;
        sp_sha256_add(&h, a, n);
    }
    sp_sha256_finish(&h, out);
    check_hex(out, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0", "a million a");
}

/* RFC 4231, test cases 1 to 4, 6 and 7. */
static void test_hmac(void)
{
    static const struct {
        int key_byte;
        size_t key_bytes;
        const char *text;
        int data_byte; /* if text is NULL, the data is 50 of these bytes */
        const char *want;
    } cases[] = {
        {0x0b, 20, "Hi There", 0, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
        {0xaa, 20, NULL, 0xdd, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
        {0xaa, 131, "Test Using Larger Than Block-Size Key - Hash Key First", 0,
         "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
        {0xaa, 131,
         "This is a test using a larger than block-size key and a larger than block-size data. The key needs "
         "to be hashed before being used by the HMAC algorithm.",
         0, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
    };
    uint8_t key[131], fifty[50], out[SP_SHA256_BYTES];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *data = cases[i].text != NULL ? cases[i].text : (const char *)fifty;
        size_t n = cases[i].text != NULL ? strlen(cases[i].text) : sizeof fifty;
        sp_bytes parts[] = {{data, n / 3}, {data + n / 3, n - n / 3}};
        memset(key, cases[i].key_byte, sizeof key);
        memset(fifty, cases[i].data_byte, sizeof fifty);
        sp_hmac_sha256(key, cases[i].key_bytes, parts, 2, out);
        check_hex(out, cases[i].want, "RFC 4231");
    }
    sp_hmac_sha256("Jefe", 4, &(sp_bytes){"what do ya want for nothing?", 28}, 1, out);
    check_hex(out, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843", "RFC 4231 case 2");
    for (uint8_t i = 0; i < 25; i++)
        key[i] = (uint8_t)(i + 1);
    memset(fifty, 0xcd, sizeof fifty);
    sp_hmac_sha256(key, 25, &(sp_bytes){fifty, sizeof fifty}, 1, out);
    check_hex(out, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b", "RFC 4231 case 4");
}

static void test_equal_secret(void)
{
    uint8_t a[SP_SHA256_BYTES], b[SP_SHA256_BYTES];
    CHECK_OK(sp_random_bytes(a, sizeof a));
    CHECK_OK(sp_random_bytes(b, sizeof b));
    CHECK(memcmp(a, b, sizeof a) != 0, "two random numbers are the same");
    memcpy(b, a, sizeof a);
    CHECK(sp_equal_secret(a, b, sizeof a), "equal secrets differ");
    for (size_t bit = 0; bit < 8 * sizeof a; bit++) {
        b[bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK(!sp_equal_secret(a, b, sizeof a), "bit %zu is not compared", bit);
        b[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"sha256", test_sha256},
        {"hmac", test_hmac},
        {"equal_secret", test_equal_secret},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
