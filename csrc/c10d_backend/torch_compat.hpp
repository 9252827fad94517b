/* torch_compat.hpp - the torch headers of the glue, and all code that depends on the version of torch.
 *
 * Supported: torch 2.9 and later; 2.13 is tested in every run of the suite, 2.11 by hand. Some versions lack
 * methods of c10d::Backend and c10d::Work, or have them non-virtual. Our classes declare those without
 * `override`; what that does not solve is here. May include: nothing of ours.
 *
 * Numbers in texts are converted by std::to_string before they go into c10::str. An unconverted number uses
 * the locale of an std::ostream. torch 2.11's CUDA build, which contains parts of its own libstdc++, crashed
 * on that (seen with gcc 13). */
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

#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <dlfcn.h>

namespace spccl_torch
{

/* Holds the factor of ReduceOp.PREMUL_SUM. torch 2.13 renamed it. */
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
using PremulFactor = c10d::PreMulSumSupplement;
#else
using PremulFactor = c10d::NCCLPreMulSumSupplement;
#endif

/* A store that another thread may wait on while `store` is in use. Versions without Store::clone share the
 * store itself, and a long wait of one thread then delays the other. */
template <class Store>
c10::intrusive_ptr<c10d::Store> independent_store(const c10::intrusive_ptr<Store> &store)
{
    if constexpr (requires { store->clone(); })
        return store->clone();
    else
        return store;
}

/* The cudaStream_t of `stream`. torch 2.11 added native_handle() to streams. An older CUDA build exports only
 * a C function of torch's inductor, which returns the current stream. */
template <class Stream> void *native_handle(const Stream &stream)
{
    if constexpr (requires { stream.native_handle(); }) {
        return stream.native_handle();
    } else {
        using Current = int (*)(int32_t device, void **out);
        static const auto current =
            reinterpret_cast<Current>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
        TORCH_CHECK_NOT_IMPLEMENTED(
            current != nullptr, "spccl: torch ", TORCH_VERSION,
            " does not tell the CUDA stream of a c10::Stream: use torch 2.11 or later");
        const c10::StreamGuard guard(stream);
        void *handle = nullptr;
        TORCH_CHECK(current(stream.device_index(), &handle) == 0,
                    "spccl: aoti_torch_get_current_cuda_stream failed on ", stream.device());
        return handle;
    }
}

/* The id of the CUDA graph capture that `stream` (cudaStream_t) is part of, or 0. c10 has no such id, so this
 * asks the driver, which is loaded if there is a CUDA stream. It never asks about the legacy default stream:
 * that stream cannot be captured, and asking would invalidate the capture of another stream. */
inline uint64_t capture_id(void *stream)
{
    /* cuStreamGetCaptureInfo_v2 of cuda.h: status 1 = active; the last three may be NULL */
    using Info = int (*)(void *stream, int *status, unsigned long long *id, void **graph, const void **deps,
                         size_t *n_deps);
    static const auto info = [] {
        void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        return driver == nullptr ? nullptr
                                 : reinterpret_cast<Info>(dlsym(driver, "cuStreamGetCaptureInfo_v2"));
    }();
    if (stream == nullptr)
        return 0;
    TORCH_CHECK(info != nullptr,
                "spccl: the CUDA driver (libcuda.so.1) has no cuStreamGetCaptureInfo_v2: update the driver");
    int status = 0;
    unsigned long long id = 0;
    if (info(stream, &status, &id, nullptr, nullptr, nullptr) != 0 || status == 0)
        return 0;
    return id == 0 ? UINT64_MAX : id;
}

} // namespace spccl_torch
