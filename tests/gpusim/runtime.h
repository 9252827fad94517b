// runtime.h - what runtime.cpp and devices.cpp share.
#ifndef SP_GPUSIM_RUNTIME_H
#define SP_GPUSIM_RUNTIME_H

#include <cuda_runtime_api.h>

constexpr size_t GPUSIM_SHARED_BYTES = 227 << 10; // the most that a CTA may have

// Waits until a device has done what was added to its streams so far.
void gpusim_wait_for_device(int device);

// Makes e this thread's last error and returns it.
cudaError_t gpusim_fail(cudaError_t e);

#endif
