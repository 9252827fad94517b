// warps.h - kernels that run in software: what runtime.cpp asks of warps.cpp. One thread, that of the device,
// calls all of this.
#ifndef SP_GPUSIM_WARPS_H
#define SP_GPUSIM_WARPS_H

#include <cuda_runtime_api.h>
#include <functional>
#include <memory>

struct gpusim_grid_size {
    unsigned blocks, threads; // threads: of a block, a multiple of 32
    size_t shared;            // bytes of a block
};

// A kernel under way: all its blocks run from the start.
struct gpusim_kernel;
std::shared_ptr<gpusim_kernel> gpusim_kernel_start(const std::function<void()> &thread,
                                                   gpusim_grid_size size);
bool gpusim_kernel_done(const gpusim_kernel &kernel);
// Run some of what can run of all kernels, in an order drawn at random. False: nothing is under way.
bool gpusim_run_some();

#endif
