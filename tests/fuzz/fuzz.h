/* fuzz.h - what the fuzz targets share: EXPECT, and a reader of their input. */
#ifndef SP_FUZZ_H
#define SP_FUZZ_H

#include "spccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* A broken promise: stop where the fuzzer, a debugger and ctest see it. */
#define EXPECT(cond)                                                                                         \
    do {                                                                                                     \
        if (!(cond)) {                                                                                       \
            fprintf(stderr, "%s:%d: EXPECT(%s); last error: %s\n", __FILE__, __LINE__, #cond,                \
                    spccl_last_error());                                                                     \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

#endif
