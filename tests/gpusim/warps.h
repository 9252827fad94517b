// warps.h - running kernels in software. runtime.cpp calls these functions of warps.cpp, all from one thread:
// the device thread.
#ifndef SP_GPUSIM_WARPS_H
#define SP_GPUSIM_WARPS_H

#include <cuda_runtime_api.h>
#include <functional>
#include <memory>

struct gpusim_grid_size {
    unsigned blocks, threads; // threads: per CTA, a multiple of 32
    size_t shared;            // shared memory of a CTA, bytes
};

// A kernel that runs. All its CTAs run from the start.
struct gpusim_kernel;
std::shared_ptr<gpusim_kernel> gpusim_kernel_start(const std::function<void()> &thread,
                                                   gpusim_grid_size size);
bool gpusim_kernel_done(const gpusim_kernel &kernel);
// What a turn of the device thread did. POLLED: its warp only waits, or had no turn as it is slow now.
enum gpusim_turn { GPUSIM_NO_KERNEL, GPUSIM_POLLED, GPUSIM_WORKED };
// Run one warp, drawn at random from all kernels, for a while.
gpusim_turn gpusim_run_some();

#endif
