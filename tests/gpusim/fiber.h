// fiber.h - functions that can pause. Each has a stack of its own; all run on one thread of the CPU.
#ifndef SP_GPUSIM_FIBER_H
#define SP_GPUSIM_FIBER_H

struct gpusim_fiber;

// Get a fiber. The next resume calls `body`; after body has returned, so does the resume after that. All
// callers must give the same `body`.
gpusim_fiber *gpusim_fiber_take(void (*body)());
// Give the fiber back after body has returned: another call of take may get it.
void gpusim_fiber_give(gpusim_fiber *f);
// Run the fiber until it pauses or body returns.
void gpusim_fiber_resume(gpusim_fiber *f);
// Called by body: return to the caller of resume.
void gpusim_fiber_pause();

#endif
