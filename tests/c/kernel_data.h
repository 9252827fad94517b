/* kernel_data.h - buffers and data for the tests of kernels. Every buffer ends or starts at an unreadable
 * page, and has poison on the other side. A read past the end of an input faults, and a write past the end
 * of an output changes the poison. */
#ifndef SP_TEST_KERNEL_DATA_H
#define SP_TEST_KERNEL_DATA_H

#include "core/base/dtype.h"
#include "core/format/kernel_table.h"
#include "test.h"

#include <sys/mman.h>
#include <unistd.h>

#define ARENA_BYTES ((size_t)1 << 20)
#define POISON_BYTES 192u

/* ---- buffers ---- */

struct arena {
    uint8_t *lo, *hi; /* readable bytes [lo, hi); unreadable pages on both sides */
    uint8_t *p;       /* the current buffer */
    size_t bytes;
    uint8_t poison;
};
enum role { X, BASE, MASK, TILE_NNZ, INDEX, META, VALUES, DST, N_ROLES };
/* [0]: output of the scalar set, and inputs. [1]: output of the other set. */
static struct arena arenas[N_ROLES][2];
static int at_end; /* true: buffers end at the second unreadable page; false: they start at the first */

static inline void arenas_make(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < N_ROLES * 2; i++) {
        struct arena *a = &arenas[i / 2][i % 2];
        uint8_t *map = mmap(NULL, ARENA_BYTES + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map == MAP_FAILED || mprotect(map + page, ARENA_BYTES, PROT_READ | PROT_WRITE) != 0) {
            perror("test arena");
            exit(1);
        }
        a->lo = map + page;
        a->hi = a->lo + ARENA_BYTES;
    }
}

/* Make a buffer of `bytes` in an arena, `shift` bytes from the unreadable page, surrounded by poison. */
static inline uint8_t *take(enum role role, int who, size_t bytes, size_t shift)
{
    struct arena *a = &arenas[role][who];
    a->p = at_end ? a->hi - shift - bytes : a->lo + shift;
    a->bytes = bytes;
    a->poison = (uint8_t)(0x51 + 16 * who);
    uint8_t *from = a->p - a->lo > POISON_BYTES ? a->p - POISON_BYTES : a->lo;
    uint8_t *to = a->hi - (a->p + bytes) > POISON_BYTES ? a->p + bytes + POISON_BYTES : a->hi;
    memset(from, a->poison, (size_t)(to - from));
    return a->p;
}
static inline bool guards_whole(enum role role, int who)
{
    const struct arena *a = &arenas[role][who];
    for (const uint8_t *q = a->p; q > a->lo && a->p - q < POISON_BYTES; q--)
        if (q[-1] != a->poison)
            return 0;
    for (const uint8_t *q = a->p + a->bytes; q < a->hi && q - (a->p + a->bytes) < POISON_BYTES; q++)
        if (*q != a->poison)
            return false;
    return true;
}
/* True if both sets wrote the same bytes, and none outside the buffer. */
static inline bool same(enum role role, size_t bytes)
{
    return guards_whole(role, 0) && guards_whole(role, 1) &&
           (bytes == 0 || memcmp(arenas[role][0].p, arenas[role][1].p, bytes) == 0);
}

/* ---- data ---- */

static const size_t sizes[] = {0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 3 * 4096 + 7};

/* A random value of `bytes`: ordinary, tiny, -0.0, infinity, quiet or signalling NaN. Never all zero. */
static inline uint64_t rand_value(size_t bytes)
{
    static const uint64_t f32s[] = {0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc01234u,
                                    0xffc00001u, 0x7f800001u, 0xffa0beefu, 1u,
                                    0x80000001u, 0x007fffffu, 0x7f7fffffu, 0x477ff000u};
    static const uint16_t f16s[] = {0x8000, 0x7c00, 0xfc00, 0x7e12, 0x7c01,
                                    0xfd0f, 0x0001, 0x8001, 0x03ff, 0x7bff};
    static const uint16_t bf16s[] = {0x8000, 0x7f80, 0xff80, 0x7fc1, 0x7f81,
                                     0xff8f, 0x0001, 0x8001, 0x007f, 0x7f7f};
    uint64_t r = test_rand(), v = test_rand(),
             mask = bytes == 8 ? UINT64_MAX : (UINT64_C(1) << (8 * bytes)) - 1;
    if (r % 4 == 0 && bytes == 4)
        v = f32s[(r >> 8) % (sizeof f32s / sizeof f32s[0])];
    else if (r % 4 == 0 && bytes == 8)
        v = (f32s[(r >> 8) % (sizeof f32s / sizeof f32s[0])] << 32) | ((r >> 20) & 1);
    else if (r % 4 == 0 && bytes == 2)
        v = (r >> 30) & 1 ? f16s[(r >> 8) % (sizeof f16s / sizeof f16s[0])]
                          : bf16s[(r >> 8) % (sizeof bf16s / sizeof bf16s[0])];
    else if (r % 4 == 1 && bytes == 4) /* near 1: sums that round and cancel */
        v = 0x3f000000u | (v & 0x80ffffffu);
    else if (r % 4 == 1 && bytes == 8)
        v = 0x3fe0000000000000u | (v & 0x801fffffffffffffu);
    else if (r % 4 == 1 && bytes == 2)
        v = 0x3c00u | (v & 0x83ffu);
    v &= mask;
    return v != 0 ? v : 1;
}

static inline void fill_any(uint8_t *x, size_t n, size_t bytes)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t v = test_rand() % 8 == 0 ? 0 : rand_value(bytes);
        memcpy(x + i * bytes, &v, bytes);
    }
}

#endif
