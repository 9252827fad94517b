/* comm.hpp - one spccl_comm for torch: joins through a c10d::Store, issues calls one at a time, and turns
 * failures into exceptions.
 *
 * May include: spccl.h, torch_compat.hpp, process.hpp, tensor.hpp. */
#pragma once

#include "process.hpp"
#include "tensor.hpp"

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>

namespace spccl_torch
{

using std::chrono::milliseconds;

struct CommSettings {
    std::string name; /* of the group, for texts and keys */
    milliseconds timeout{0};
    spccl_format format = SPCCL_FORMAT_AUTO;
    uint32_t slice_bytes = 0; /* 0 = default */
    std::string transports;   /* empty = default */
    uint32_t n_sockets = 0;   /* 0 = default */
};

/* The exception for a failed call: ValueError for bad arguments, TypeError for a dtype, NotImplementedError
 * for what this build cannot do, DistBackendError for a failure between ranks.
 *   text   spccl's own line about the failure */
std::exception_ptr make_error(spccl_status status, const std::string &where, const std::string &text);

class Comm
{
  public:
    /* Join; returns when all links of this rank are up. Throws DistBackendError and the like.
     *   store   borrowed until return; keys are written under `settings.name`
     *   stop    called several times a second while the constructor waits for a peer's keys; returns the
     *           reason to give up, or "" to go on */
    Comm(const c10::intrusive_ptr<c10d::Store> &store, int rank, int size, CommSettings settings,
         std::function<std::string()> stop = nullptr);
    Comm(const Comm &) = delete;
    Comm &operator=(const Comm &) = delete;
    ~Comm();

    int rank() const
    {
        return rank_;
    }
    int size() const
    {
        return size_;
    }
    /* "rank 1 of 4, group 'x'" */
    std::string who() const;

    /* Run `call(comm)`, which returns an spccl_status, while no other thread issues. Throws what the status
     * means, with `op` in the text.
     *   timeout   c10d::kUnsetTimeout = the group's */
    template <class Call> void issue(const OpText &op, milliseconds timeout, Call &&call)
    {
        check_process(op.str());
        std::lock_guard<std::mutex> lock(issue_);
        spccl_status status = open_for(op, timeout);
        if (status == SPCCL_OK)
            status = call(raw_);
        if (status != SPCCL_OK)
            std::rethrow_exception(make_error(status, who() + ": " + op.str(), spccl_last_error()));
    }

    /* Throw if this process is a child of fork. Locks nothing. `op` goes into the text. Threads: any. */
    void check_process(const std::string &op) const;
    bool in_child() const
    {
        return home_.in_child();
    }

    void set_timeout(milliseconds timeout);
    /* The group's deadline. */
    milliseconds timeout();
    /* End every wait at once, here and on the peers. Threads: any, also while another one is in issue(). */
    void abort(const char *reason) noexcept;
    /* SPCCL_OK or what broke the group. Threads: any. */
    spccl_status error(std::string *text);
    /* Throw what broke the group, or that it was shut down; `op` goes into the text. Threads: any. */
    void check_usable(const std::string &op);
    /* Wait until the collectives under way have ended (within their deadlines), then free. Idempotent. Later
     * calls throw. */
    void close();

    spccl_stats stats();
    std::string describe_link(int peer);
    /* As spccl_comm_local_ip. */
    std::string local_ip();

    /* spccl_cuda_attach; *text = what went wrong. All ranks call it at the same point of their sequence of
     * calls. */
    spccl_status attach_cuda(const spccl_cuda_config &config, milliseconds timeout, std::string *text);
    /* Block until `stream` (cudaStream_t) has completed. Throws if the group fails or time runs out first.
     *   timeout   0 = the group's */
    void wait_cuda(const OpText &op, void *stream, milliseconds timeout);
    /* Why GPUs cannot run the plan that a plan file has for the collective ("all_reduce"); "": they can. */
    std::string refused_plan(const OpText &op, const char *collective);
    /* Tell spccl that the collective just launched ends before `event` (cudaEvent_t). close() waits for the
     * event. Call it inside issue(), and not for a captured collective.
     *   owner   keeps the event from being recorded again */
    spccl_status set_end_event(std::shared_ptr<const void> owner, void *event);
    spccl_cuda_stats cuda_stats();

  private:
    spccl_status open_for(const OpText &op, milliseconds timeout);
    template <class Call> void query(const std::string &op, bool must, Call &&call);

    const HomeProcess home_;
    const int rank_;
    const int size_;
    const CommSettings settings_;
    std::mutex issue_;       /* one call at a time; held through a blocking call */
    std::shared_mutex life_; /* raw_ stays valid while it is held shared; abort never waits for issue_ */
    spccl_comm *raw_ = nullptr;
    milliseconds default_timeout_;          /* guarded by issue_ */
    milliseconds current_timeout_;          /* what raw_ has now; guarded by issue_ */
    std::shared_ptr<const void> end_event_; /* raw_ uses it; guarded by issue_ */
};

} // namespace spccl_torch
