// warps.cpp - CTAs, warps and lanes as fibers of one thread, in an order drawn at random. README.md says what
// is modelled: lanes that run freely between warp operations, stores that others see late, copies that land
// late.
#include "warps.h"

#include "fiber.h"
#include "gpusim_device.h"

#include <algorithm>
#include <random>
#include <vector>

namespace
{

constexpr unsigned ROUNDS_MAX = 64;  // of a warp, at most, before another warp runs
constexpr unsigned LANDING_MAX = 40; // the most turns until a copy lands
constexpr uint8_t POISON = 0xe7;

// What follows is never destroyed, as the device thread runs on while the program exits.
uint64_t draw_seed()
{
    const char *text = getenv("GPUSIM_SEED");
    return text != nullptr ? strtoull(text, nullptr, 0) : std::random_device{}();
}
const uint64_t seed = draw_seed();
std::mt19937_64 &rng = *new std::mt19937_64(seed);
unsigned below(unsigned n)
{
    return (unsigned)(rng() % n);
}

[[noreturn]] void give_up(const char *what, const char *file = "", int line = 0)
{
    fprintf(stderr, "gpusim: %s%s%s", what, line != 0 ? " at " : "", file);
    if (line != 0)
        fprintf(stderr, ":%d", line);
    fprintf(stderr, " (CTA %u, thread %u; GPUSIM_SEED=%llu)\n", gpusim_here ? gpusim_here->block.x : 0,
            gpusim_here ? gpusim_here->thread.x : 0, (unsigned long long)seed);
    abort();
}

// ---- what runs ----

enum lane_state { READY, IN_EXCHANGE, IN_SYNC_BLOCK, DONE };

struct warp;
struct block;
struct lane {
    gpusim_index index;
    warp *of = nullptr;
    gpusim_fiber *fiber = nullptr;
    lane_state state = READY;
    bool idle = false; // its last step was a yield
    unsigned n_exchanges = 0;
    gpusim_exchange what = GPUSIM_SYNC;
    const char *file = "";
    int line = 0;
    struct copy {
        void *to;
        const void *from;
    };
    std::vector<copy> open;                // cp.async: the open group
    std::vector<std::vector<copy>> groups; // cp.async: the committed groups that have not landed
    unsigned n_bulk = 0;                   // bulk copies without a barrier that have not landed
};

struct late_store {
    uint4 *to;
    uint4 v;
    lane *by;
    bool released;
};
struct warp {
    block *of = nullptr;
    lane lanes[32];
    uint64_t exchanged[2][32];
    std::vector<late_store> stores;
    size_t n_synced = 0; // stores before the last __syncwarp
    bool slow = false;
    bool done() const
    {
        return std::all_of(lanes, lanes + 32, [](const lane &l) { return l.state == DONE; });
    }
};

struct bulk_copy {
    void *to;
    const void *from;
    uint32_t bytes;
    uint64_t *barrier;
    lane *by;
    unsigned turns; // until it lands
};
struct block {
    gpusim_kernel *of = nullptr;
    std::vector<std::unique_ptr<warp>> warps;
    uint8_t *shared = nullptr;
    size_t shared_bytes = 0;
    std::vector<bulk_copy> copies;
    unsigned n_live = 0;
    bool vote = true, voted = true; // __syncthreads_and: of the threads so far; result of the last one
    int with_vote = -1;             // threads wait in: 1 __syncthreads_and, 0 __syncthreads, -1 neither
};

std::vector<warp *> &live = *new std::vector<warp *>; // of all kernels
lane *now;

} // namespace

struct gpusim_kernel {
    std::function<void()> thread;
    std::vector<std::unique_ptr<block>> blocks;
    unsigned n_live = 0; // warps
};

const gpusim_index *gpusim_here;

namespace
{

void wait_as(lane_state state)
{
    now->state = state;
    gpusim_fiber_pause();
}

// The body of a fiber: it runs one thread of a kernel.
void run_thread()
{
    now->of->of->of->thread();
    now->state = DONE;
}

void resume(lane &l)
{
    now = &l;
    gpusim_here = &l.index;
    l.idle = false;
    if (l.fiber == nullptr)
        l.fiber = gpusim_fiber_take(run_thread);
    gpusim_fiber_resume(l.fiber);
}

// ---- memory ----

// Let others see a warp's stores: all of them, or only those that were released.
void flush(warp &w, bool all)
{
    size_t kept = 0, synced = 0;
    for (size_t i = 0; i < w.stores.size(); i++) {
        if (all || w.stores[i].released) {
            *w.stores[i].to = w.stores[i].v;
            continue;
        }
        synced += i < w.n_synced;
        w.stores[kept++] = w.stores[i];
    }
    w.stores.resize(kept);
    w.n_synced = synced;
}

// A barrier word: bit 0 is the phase, bit 1 is set until the arrival, bits from 32 on count the missing
// bytes.
void barrier_settle(uint64_t *b)
{
    if (*b >> 32 == 0 && (*b & 2) == 0)
        *b = (*b ^ 1) | 2;
}

void land(block &b, size_t i)
{
    bulk_copy c = b.copies[i];
    b.copies[i] = b.copies.back();
    b.copies.pop_back();
    memcpy(c.to, c.from, c.bytes);
    if (c.barrier != nullptr) {
        *c.barrier -= (uint64_t)c.bytes << 32;
        barrier_settle(c.barrier);
    } else {
        c.by->n_bulk--;
    }
}

// cp.async: the oldest group lands.
void run_group(lane &l)
{
    for (const lane::copy &c : l.groups.front())
        memcpy(c.to, c.from, 16);
    l.groups.erase(l.groups.begin());
}

void land_some(block &b)
{
    for (auto &w : b.warps) {
        lane &l = w->lanes[below(32)];
        if (!l.groups.empty() && below(4) == 0)
            run_group(l);
    }
    for (size_t i = b.copies.size(); i-- > 0;)
        if (b.copies[i].turns-- == 0)
            land(b, i);
}

// ---- scheduling ----

// All lanes of a warp wait. Check that they wait for the same operation, and let them go on.
void finish_exchange(warp &w)
{
    const lane &first =
        *std::find_if(w.lanes, w.lanes + 32, [](const lane &l) { return l.state == IN_EXCHANGE; });
    for (lane &l : w.lanes) {
        gpusim_here = &l.index;
        if (l.state != IN_EXCHANGE)
            give_up("lanes of a warp wait for another lane, which waits elsewhere or has ended", first.file,
                    first.line);
        if (l.what != first.what ||
            (l.what != GPUSIM_SYNC &&
             (l.line != first.line || (l.file != first.file && strcmp(l.file, first.file) != 0))))
            give_up("lanes of a warp wait at different warp operations", l.file, l.line);
    }
    if (first.what == GPUSIM_SYNC)
        w.n_synced = w.stores.size();
    for (lane &l : w.lanes)
        l.state = READY;
}

void sync_block(block &b)
{
    unsigned n_waiting = 0, n_done = 0, n = 0;
    for (auto &w : b.warps)
        for (const lane &l : w->lanes) {
            n++;
            n_waiting += l.state == IN_SYNC_BLOCK;
            n_done += l.state == DONE;
        }
    if (n_waiting != 0 && n_done != 0)
        give_up("a CTA waits in __syncthreads for threads that have ended");
    if (n_waiting != n)
        return;
    b.voted = b.vote;
    b.vote = true;
    b.with_vote = -1;
    for (auto &w : b.warps) {
        w->n_synced = w->stores.size();
        for (late_store &stored : w->stores)
            stored.released = true; // to all threads of the CTA
        for (lane &l : w->lanes)
            l.state = READY;
    }
}

// Run each lane that can run, once. False: all that ran only polled.
bool round_of(warp &w)
{
    unsigned first = below(32), step = 2 * below(16) + 1, n_ready = 0, n_in_exchange = 0, n_sync = 0;
    bool worked = false;
    for (unsigned i = 0; i < 32; i++) {
        lane &l = w.lanes[(first + i * step) % 32];
        if (l.state == READY) {
            resume(l);
            worked |= !l.idle;
        }
        n_ready += l.state == READY;
        n_in_exchange += l.state == IN_EXCHANGE;
        n_sync += l.state == IN_SYNC_BLOCK;
    }
    gpusim_here = nullptr;
    if (n_ready == 0 && n_in_exchange != 0)
        finish_exchange(w);
    else if (n_ready == 0 && n_sync != 0)
        sync_block(*w.of);
    return worked;
}

void end_block(block &b)
{
    for (const bulk_copy &c : b.copies) {
        gpusim_here = &c.by->index;
        if (c.barrier != nullptr)
            give_up("a CTA ended while a copy into its shared memory was under way");
    }
    while (!b.copies.empty())
        land(b, 0);
    free(b.shared);
    b.shared = nullptr;
}

void end_warp(warp &w)
{
    flush(w, true);
    for (lane &l : w.lanes) {
        gpusim_here = &l.index;
        for (auto &g : l.groups)
            if (!g.empty())
                give_up("a thread ended while its copy into shared memory was under way");
        if (!l.open.empty())
            give_up("a thread ended with a copy that it never committed");
        gpusim_fiber_give(l.fiber);
    }
    if (--w.of->n_live == 0)
        end_block(*w.of);
    else
        sync_block(*w.of);
    w.of->of->n_live--;
}

// Some instructions access only the CTA's shared memory, others only global memory.
void must_be(bool shared, const void *p, size_t bytes)
{
    const block &b = *now->of->of;
    if (((const uint8_t *)p >= b.shared && (const uint8_t *)p + bytes <= b.shared + b.shared_bytes) != shared)
        give_up(shared ? "an address must be in the CTA's shared memory and is not"
                       : "an address must be in global memory and is in shared memory");
}

// Now and then some warps become much slower than the others.
void change_pace()
{
    unsigned slow_fifths = below(3) == 0 ? 1 + below(4) : 0;
    for (warp *w : live)
        w->slow = below(5) < slow_fifths;
}

} // namespace

std::shared_ptr<gpusim_kernel> gpusim_kernel_start(const std::function<void()> &thread, gpusim_grid_size size)
{
    auto k = std::make_shared<gpusim_kernel>();
    k->thread = thread;
    for (unsigned i = 0; i < size.blocks; i++) {
        auto b = std::make_unique<block>();
        b->of = k.get();
        b->n_live = size.threads / 32;
        if (posix_memalign((void **)&b->shared, 128, std::max<size_t>(size.shared, 1)) != 0)
            give_up("no memory for the shared memory of a CTA");
        b->shared_bytes = size.shared;
        memset(b->shared, POISON, size.shared);
        for (unsigned j = 0; j < size.threads / 32; j++) {
            auto w = std::make_unique<warp>();
            w->of = b.get();
            for (unsigned n = 0; n < 32; n++) {
                w->lanes[n].of = w.get();
                w->lanes[n].index = {dim3(j * 32 + n), dim3(i), dim3(size.threads), dim3(size.blocks), n};
            }
            live.push_back(w.get());
            k->n_live++;
            b->warps.push_back(std::move(w));
        }
        k->blocks.push_back(std::move(b));
    }
    return k;
}

bool gpusim_kernel_done(const gpusim_kernel &kernel)
{
    return kernel.n_live == 0;
}

gpusim_turn gpusim_run_some()
{
    if (live.empty())
        return GPUSIM_NO_KERNEL;
    if (below(300) == 0)
        change_pace();
    size_t i = below((unsigned)live.size());
    warp &w = *live[i];
    if (w.slow && below(16) != 0)
        return GPUSIM_POLLED;
    bool worked = !w.of->copies.empty(); // their turns count down, or they land
    for (unsigned n = 1 + below(ROUNDS_MAX); n != 0 && !w.done() && round_of(w); n--)
        worked = true;
    land_some(*w.of);
    if (below(64) == 0)
        flush(w, true);
    if (w.done()) {
        live[i] = live.back();
        live.pop_back();
        end_warp(w);
    }
    return worked ? GPUSIM_WORKED : GPUSIM_POLLED;
}

// ---- what device code calls ----

const uint64_t *gpusim_warp_exchange(gpusim_exchange what, uint64_t value, uint32_t mask, const char *file,
                                     int line)
{
    lane *self = now;
    uint64_t *all = self->of->exchanged[self->n_exchanges++ % 2];
    if (mask != ~0u)
        give_up("a warp operation of some lanes only is not modelled", file, line);
    all[self->index.lane] = value;
    self->what = what;
    self->file = file;
    self->line = line;
    wait_as(IN_EXCHANGE);
    return all;
}

bool gpusim_sync_block(int with_vote, bool vote)
{
    block &b = *now->of->of;
    if (b.with_vote >= 0 && b.with_vote != with_vote)
        give_up("some threads of a CTA are in __syncthreads, others in __syncthreads_and");
    b.with_vote = with_vote;
    b.vote &= vote;
    wait_as(IN_SYNC_BLOCK);
    return b.voted;
}

void gpusim_yield()
{
    now->idle = true;
    wait_as(READY);
}

uint8_t *gpusim_shared()
{
    return now->of->of->shared;
}

void gpusim_store_late(void *p, uint4 v)
{
    must_be(false, p, 16);
    now->of->stores.push_back({(uint4 *)p, v, now, false});
}

void gpusim_release()
{
    warp &w = *now->of;
    for (size_t i = 0; i < w.stores.size(); i++)
        w.stores[i].released |= i < w.n_synced || w.stores[i].by == now;
}

void gpusim_fence()
{
    gpusim_release(); // what this thread knows of, its own stores and its warp's, need no other release
    for (auto &w : now->of->of->warps)
        flush(*w, false);
}

void gpusim_copy16(void *shared, const void *global)
{
    must_be(true, shared, 16);
    must_be(false, global, 16);
    memset(shared, POISON, 16);
    now->open.push_back({shared, global});
}

void gpusim_copy_commit()
{
    now->groups.push_back(std::move(now->open));
    now->open.clear();
}

void gpusim_copy_wait(int n)
{
    while (now->groups.size() > (size_t)n)
        run_group(*now);
}

void gpusim_bulk(void *to, const void *from, uint32_t bytes, uint64_t *barrier)
{
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16 != 0)
        give_up("a bulk copy that is not aligned to 16 bytes");
    must_be(true, barrier != nullptr ? to : from, bytes);
    must_be(false, barrier != nullptr ? from : to, bytes);
    if (barrier != nullptr) {
        memset(to, POISON, bytes);
        *barrier += (uint64_t)bytes << 32;
    } else {
        now->n_bulk++;
    }
    now->of->of->copies.push_back({to, from, bytes, barrier, now, below(LANDING_MAX)});
}

void gpusim_bulk_wait()
{
    while (now->n_bulk != 0)
        gpusim_yield();
}

void gpusim_barrier_init(uint64_t *barrier)
{
    *barrier = 2;
}

void gpusim_barrier_arrive(uint64_t *barrier)
{
    if ((*barrier & 2) == 0)
        give_up("a second arrival at a barrier in one phase");
    *barrier &= ~UINT64_C(2);
    barrier_settle(barrier);
}

bool gpusim_barrier_passed(const uint64_t *barrier, uint32_t parity)
{
    return (*(const volatile uint64_t *)barrier & 1) != parity;
}
