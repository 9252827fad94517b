/* glue.cpp - includes all sources of the glue, and is the only file that the build compiles. So torch's
 * headers are read once, and the build on a user's machine takes a fraction of the time. */
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
