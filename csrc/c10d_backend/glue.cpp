/* glue.cpp - all of the glue as one translation unit: torch's headers are read once, which makes the build on
 * a user's machine several times shorter. The only file that the build compiles. */
#include "tensor.cpp"

#include "comm.cpp"

#include "work.cpp"

#include "order.cpp"

#include "sparse.cpp"

#include "cuda.cpp"

#include "backend.cpp"

#include "coalesced.cpp"

#include "delegate.cpp"

#include "ops.cpp"
