/* fuzz.h - EXPECT, and the entry point of a fuzz target. */
#ifndef SP_FUZZ_H
#define SP_FUZZ_H

#include "spccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* If cond is false, abort: the fuzzer, a debugger and ctest all notice that. */
#define EXPECT(cond)                                                                                         \
    do {                                                                                                     \
        if (!(cond)) {                                                                                       \
            fprintf(stderr, "%s:%d: EXPECT(%s); last error: %s\n", __FILE__, __LINE__, #cond,                \
                    spccl_last_error());                                                                     \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

#endif
