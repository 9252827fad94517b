// fiber.cpp - see fiber.h. Jumps are the compiler's (__builtin_setjmp). Those of the C library save signal
// masks, and sanitizers intercept each of them.
#include "fiber.h"

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

// These calls tell the address sanitizer which stack is in use. It must not inspect the stack at each jump.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else
static void __sanitizer_start_switch_fiber(void **, const void *, size_t)
{
}
static void __sanitizer_finish_switch_fiber(void *, const void **, size_t *)
{
}
#endif
#define UNSANITIZED __attribute__((noinline, no_sanitize_address))

static constexpr size_t STACK_BYTES = 64 << 10;
static const size_t guard_bytes = (size_t)sysconf(_SC_PAGESIZE);

struct gpusim_fiber {
    void *at[5]; // where it has paused
    char *stack;
    void *kept; // belongs to the sanitizer
    void (*body)();
    bool entered;
};

static void *resumer[5]; // where the caller of resume goes on
static void *resumer_kept;
static const void *resumer_stack;
static size_t resumer_stack_bytes;
static gpusim_fiber *running;
static std::vector<gpusim_fiber *> &idle = *new std::vector<gpusim_fiber *>; // never destroyed

UNSANITIZED static void jump(void **to)
{
    __builtin_longjmp(to, 1);
}

UNSANITIZED static void jump_and_keep(void **here, void **to)
{
    if (__builtin_setjmp(here) == 0)
        jump(to);
}

static void fiber_main()
{
    gpusim_fiber *self = running;
    __sanitizer_finish_switch_fiber(nullptr, &resumer_stack, &resumer_stack_bytes);
    for (;;) {
        self->body();
        gpusim_fiber_pause();
    }
}

UNSANITIZED static void enter(gpusim_fiber *f)
{
    ucontext_t context;
    f->entered = true;
    if (__builtin_setjmp(resumer) != 0)
        return;
    getcontext(&context);
    context.uc_stack.ss_sp = f->stack + guard_bytes;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
    setcontext(&context);
}

gpusim_fiber *gpusim_fiber_take(void (*body)())
{
    if (!idle.empty()) {
        gpusim_fiber *f = idle.back();
        idle.pop_back();
        return f;
    }
    void *stack = mmap(nullptr, guard_bytes + STACK_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, guard_bytes, PROT_NONE) != 0) {
        perror("gpusim: stack of a GPU thread");
        abort();
    }
    return new gpusim_fiber{{}, (char *)stack, nullptr, body, false};
}

void gpusim_fiber_give(gpusim_fiber *f)
{
    idle.push_back(f);
}

void gpusim_fiber_resume(gpusim_fiber *f)
{
    running = f;
    __sanitizer_start_switch_fiber(&resumer_kept, f->stack + guard_bytes, STACK_BYTES);
    if (f->entered)
        jump_and_keep(resumer, f->at);
    else
        enter(f);
    __sanitizer_finish_switch_fiber(resumer_kept, nullptr, nullptr);
}

void gpusim_fiber_pause()
{
    gpusim_fiber *self = running;
    __sanitizer_start_switch_fiber(&self->kept, resumer_stack, resumer_stack_bytes);
    jump_and_keep(self->at, resumer);
    __sanitizer_finish_switch_fiber(self->kept, &resumer_stack, &resumer_stack_bytes);
}
