/* comm.cpp - see comm.hpp. */
#include "comm.hpp"

#include <algorithm>
#include <cstring>

namespace spccl_torch
{

namespace
{
using Clock = std::chrono::steady_clock;

constexpr const char *shut_down = "the group was shut down (destroy_process_group); make a new one";

/* spccl_store over a c10d::Store. An exception must not pass through C, so its text is kept here. */
struct StoreBridge {
    c10::intrusive_ptr<c10d::Store> store;
    std::function<std::string()> stop; /* may be empty */
    std::string error;
};

spccl_status store_set(void *ctx, const char *key, const void *data, size_t bytes)
{
    auto *bridge = static_cast<StoreBridge *>(ctx);
    try {
        const auto *first = static_cast<const uint8_t *>(data);
        bridge->store->set(key, std::vector<uint8_t>(first, first + bytes));
        return SPCCL_OK;
    } catch (const c10::Error &e) {
        bridge->error = e.what_without_backtrace();
    } catch (const std::exception &e) {
        bridge->error = e.what();
    }
    return SPCCL_ERR_SYSTEM;
}

/* Wait for `key`. With `stop`, wait in short pieces: a store's wait cannot be interrupted. Throws what the
 * store throws, also when the time is over. */
spccl_status wait_for_key(StoreBridge &bridge, const char *key, Clock::time_point deadline)
{
    const auto piece = milliseconds(250), slack = milliseconds(20);
    for (;;) {
        const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
        if (left.count() <= 0) /* a store would take 0 as no limit */
            return SPCCL_ERR_TIMEOUT;
        if (!bridge.stop) {
            bridge.store->wait({key}, left);
            return SPCCL_OK;
        }
        bridge.error = bridge.stop();
        if (!bridge.error.empty())
            return SPCCL_ERR_ABORTED;
        const auto piece_end = Clock::now() + std::min(left, piece);
        try {
            bridge.store->wait({key}, std::min(left, piece));
            return SPCCL_OK;
        } catch (const std::exception &) {
            if (Clock::now() < piece_end - slack) /* not a time-out: the wait failed earlier */
                throw;
        }
    }
}

spccl_status store_get(void *ctx, const char *key, void *buf, size_t cap, int64_t timeout_ms,
                       size_t *out_bytes)
{
    auto *bridge = static_cast<StoreBridge *>(ctx);
    const auto deadline = Clock::now() + milliseconds(timeout_ms);
    try {
        if (!bridge->store->check({key})) {
            const spccl_status status = wait_for_key(*bridge, key, deadline);
            if (status != SPCCL_OK)
                return status;
        }
        const std::vector<uint8_t> value = bridge->store->get(key);
        if (value.size() > cap) {
            bridge->error = "key " + std::string(key) + " holds " + std::to_string(value.size()) +
                            " bytes, wanted at most " + std::to_string(cap);
            return SPCCL_ERR_DST_SMALL;
        }
        std::memcpy(buf, value.data(), value.size());
        *out_bytes = value.size();
        return SPCCL_OK;
    } catch (const c10::Error &e) {
        bridge->error = e.what_without_backtrace();
    } catch (const std::exception &e) {
        bridge->error = e.what();
    }
    /* Stores have no exception of their own for a time-out. */
    return Clock::now() >= deadline ? SPCCL_ERR_TIMEOUT : SPCCL_ERR_SYSTEM;
}
} // namespace

std::exception_ptr make_error(spccl_status status, const std::string &where, const std::string &text)
{
    const std::string line =
        "spccl: " + where + ": " + (text.empty() ? "failed" : text) + " [" + spccl_status_name(status) + "]";
    switch (status) {
    case SPCCL_ERR_ARG:
    case SPCCL_ERR_ALIAS:
    case SPCCL_ERR_SETTING:
        return std::make_exception_ptr(C10_BUILD_ERROR(ValueError, line));
    case SPCCL_ERR_DTYPE:
        return std::make_exception_ptr(C10_BUILD_ERROR(TypeError, line));
    case SPCCL_ERR_UNSUPPORTED:
        return std::make_exception_ptr(C10_BUILD_ERROR(NotImplementedError, line));
    default:
        return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, line));
    }
}

Comm::Comm(const c10::intrusive_ptr<c10d::Store> &store, int rank, int size, CommSettings settings,
           std::function<std::string()> stop)
    : rank_(rank), size_(size), settings_(std::move(settings)), default_timeout_(settings_.timeout),
      current_timeout_(settings_.timeout)
{
    StoreBridge bridge{store, std::move(stop), ""};
    spccl_store callbacks{sizeof callbacks, &bridge, store_set, store_get};
    spccl_config config = SPCCL_CONFIG_INIT;
    config.name = settings_.name.c_str();
    config.timeout_ms = settings_.timeout.count();
    config.format = settings_.format;
    config.slice_bytes = settings_.slice_bytes;
    config.transports = settings_.transports.empty() ? nullptr : settings_.transports.c_str();
    config.n_sockets = settings_.n_sockets;

    const spccl_status status = spccl_comm_create(&callbacks, rank, size, &config, &raw_);
    if (status == SPCCL_OK)
        return;
    std::string text = spccl_last_error();
    if (!bridge.error.empty())
        text += " (the store says: " + bridge.error + ")";
    std::rethrow_exception(make_error(status, who() + ": joining the group", text));
}

Comm::~Comm()
{
    close();
}

std::string Comm::who() const
{
    return "rank " + std::to_string(rank_) + " of " + std::to_string(size_) + ", group '" + settings_.name +
           "'";
}

void Comm::check_process(const std::string &op) const
{
    if (home_.in_child())
        std::rethrow_exception(make_error(SPCCL_ERR_STATE, who() + ": " + op, home_.refusal()));
}

spccl_status Comm::open_for(const OpText &op, milliseconds timeout)
{
    if (raw_ == nullptr)
        std::rethrow_exception(make_error(SPCCL_ERR_STATE, who() + ": " + op.str(), shut_down));
    const milliseconds wanted =
        timeout == c10d::kUnsetTimeout || timeout.count() <= 0 ? default_timeout_ : timeout;
    if (wanted == current_timeout_)
        return SPCCL_OK;
    const spccl_status status = spccl_comm_set_timeout(raw_, wanted.count());
    if (status == SPCCL_OK)
        current_timeout_ = wanted;
    return status;
}

void Comm::set_timeout(milliseconds timeout)
{
    check_process("set_timeout");
    TORCH_CHECK_VALUE(timeout.count() > 0, "spccl: ", who(), ": timeout ", std::to_string(timeout.count()),
                      " ms, wanted more than 0");
    std::lock_guard<std::mutex> lock(issue_);
    default_timeout_ = timeout; /* open_for passes it to spccl */
}

milliseconds Comm::timeout()
{
    check_process("timeout");
    std::lock_guard<std::mutex> lock(issue_);
    return default_timeout_;
}

void Comm::abort(const char *reason) noexcept
{
    if (in_child())
        return; /* an abort would reach the peers of the parent */
    std::shared_lock<std::shared_mutex> alive(life_);
    if (raw_ != nullptr)
        spccl_comm_abort(raw_, reason);
}

spccl_status Comm::error(std::string *text)
{
    if (in_child()) {
        if (text != nullptr)
            *text = home_.refusal();
        return SPCCL_ERR_STATE;
    }
    std::shared_lock<std::shared_mutex> alive(life_);
    if (raw_ == nullptr)
        return SPCCL_OK;
    const spccl_status status = spccl_comm_async_error(raw_);
    if (status != SPCCL_OK && text != nullptr)
        *text = spccl_last_error();
    return status;
}

/* Run `call(comm)` beside calls that issue; throws what the status means. If the group was shut down, do nothing, or
 * throw if it `must` be there. */
template <class Call> void Comm::query(const std::string &op, bool must, Call &&call)
{
    check_process(op);
    std::shared_lock<std::shared_mutex> alive(life_);
    if (raw_ == nullptr && must)
        std::rethrow_exception(make_error(SPCCL_ERR_STATE, who() + ": " + op, shut_down));
    const spccl_status status = raw_ != nullptr ? call(raw_) : SPCCL_OK;
    if (status != SPCCL_OK)
        std::rethrow_exception(make_error(status, who() + ": " + op, spccl_last_error()));
}

void Comm::check_usable(const std::string &op)
{
    query(op, true, [](spccl_comm *raw) { return spccl_comm_async_error(raw); });
}

void Comm::close()
{
    if (in_child())
        return; /* the group is the parent's */
    spccl_comm *last;
    {
        std::scoped_lock lock(issue_, life_);
        last = std::exchange(raw_, nullptr);
    }
    /* The status is not needed: collectives under way report their own failure. */
    (void)spccl_comm_destroy(last);
}

spccl_stats Comm::stats()
{
    spccl_stats stats{};
    stats.struct_bytes = sizeof stats;
    query("stats", false, [&](spccl_comm *raw) { return spccl_comm_stats(raw, &stats); });
    return stats;
}

spccl_status Comm::attach_cuda(const spccl_cuda_config &config, milliseconds timeout, std::string *text)
{
    check_process("the first CUDA collective");
    std::lock_guard<std::mutex> lock(issue_);
    spccl_status status = open_for(OpText{"the first CUDA collective"}, timeout);
    if (status == SPCCL_OK)
        status = spccl_cuda_attach(raw_, &config);
    if (status != SPCCL_OK)
        *text = spccl_last_error();
    return status;
}

void Comm::wait_cuda(const OpText &op, void *stream, milliseconds timeout)
{
    query(op.str(), true, [&](spccl_comm *raw) {
        return spccl_cuda_wait(raw, stream, timeout.count() > 0 ? timeout.count() : INT64_C(-1));
    });
}

std::string Comm::refused_plan(const OpText &op, const char *collective)
{
    std::string why;
    query(op.str(), true, [&](spccl_comm *raw) {
        const spccl_status status = spccl_cuda_check_plan(raw, collective, std::max(op.root, 0));
        if (status == SPCCL_ERR_UNSUPPORTED)
            why = spccl_last_error();
        return status == SPCCL_ERR_UNSUPPORTED ? SPCCL_OK : status;
    });
    return why;
}

spccl_status Comm::set_end_event(std::shared_ptr<const void> owner, void *event)
{
    const spccl_status status = spccl_cuda_set_end_event(raw_, event);
    if (status == SPCCL_OK)
        end_event_ = std::move(owner);
    return status;
}

spccl_cuda_stats Comm::cuda_stats()
{
    spccl_cuda_stats stats{};
    stats.struct_bytes = sizeof stats;
    query("cuda_stats", false, [&](spccl_comm *raw) { return spccl_cuda_get_stats(raw, &stats); });
    return stats;
}

std::string Comm::describe_link(int peer)
{
    std::string copy; /* another thread may close the group once `query` has returned */
    query("describe_link", true, [&](spccl_comm *raw) {
        const char *text = "";
        const spccl_status status = spccl_comm_describe_link(raw, peer, &text);
        copy = text;
        return status;
    });
    return copy;
}

std::string Comm::local_ip()
{
    const char *text = "";
    query("joining the group", true, [&](spccl_comm *raw) { return spccl_comm_local_ip(raw, &text); });
    return text;
}

} // namespace spccl_torch
