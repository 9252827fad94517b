/* torch_compat.hpp - the torch headers of the glue, and everything in which one torch differs from another.
 *
 * Supported: torch 2.9 and later; 2.13 is tested in every run of the suite, 2.11 by hand. Methods of
 * c10d::Backend and c10d::Work that some version lacks, or has non-virtual, are declared without `override`
 * in our classes; what cannot be said that way is here. May include: nothing of ours.
 *
 * Numbers in texts go through std::to_string, never into c10::str as they are: there they meet a stream's
 * locale, and torch 2.11's CUDA build, which brings parts of its own libstdc++, crashed on that (seen with
 * gcc 13). */
#pragma once

#if __cplusplus < 202002L
#error "spccl's torch glue needs -std=c++20 (ATen's headers refuse less from torch 2.13 on)"
#endif

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/version.h>

namespace spccl_torch
{

/* Factor of ReduceOp.PREMUL_SUM. 2.13 gave it a name without NCCL in it. */
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
using PremulFactor = c10d::PreMulSumSupplement;
#else
using PremulFactor = c10d::NCCLPreMulSumSupplement;
#endif

/* A store that another thread may wait on while this one is used. Versions without Store::clone share the
 * store itself; then a long wait of one thread delays the other. */
template <class Store>
c10::intrusive_ptr<c10d::Store> independent_store(const c10::intrusive_ptr<Store> &store)
{
    if constexpr (requires { store->clone(); })
        return store->clone();
    else
        return store;
}

} // namespace spccl_torch
