// fiber.h - functions that can stop in the middle: each has a stack of its own, all run on one thread.
#ifndef SP_GPUSIM_FIBER_H
#define SP_GPUSIM_FIBER_H

struct gpusim_fiber;

// A fiber that waits for work: it calls `body` at every resume that follows a return of it. Always the same
// `body`.
gpusim_fiber *gpusim_fiber_take(void (*body)());
// body has returned: the fiber and its stack are for the next.
void gpusim_fiber_give(gpusim_fiber *f);
// Run it until it pauses or body returns.
void gpusim_fiber_resume(gpusim_fiber *f);
// Called by body: back to who resumed it.
void gpusim_fiber_pause();

#endif
