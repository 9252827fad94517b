/* process.hpp - which process made an object.
 *
 * A child of fork has copies of its parent's objects, but no copies of the parent's threads, and any mutex
 * may be locked for ever. So each call asks in_child() first, and in a child destructors wait for nothing.
 * May include: nothing of ours. */
#pragma once

#include <string>

#include <unistd.h>

namespace spccl_torch
{

class HomeProcess
{
  public:
    /* Is this a child of fork of the process that made this object? */
    bool in_child() const
    {
        return ::getpid() != pid_;
    }
    /* The end of an error text. */
    std::string refusal() const
    {
        return "process " + std::to_string(::getpid()) + " is a child of fork of process " +
               std::to_string(pid_) +
               ", which made the group and alone can use it: make a new group in the child, or start the "
               "child "
               "with spawn";
    }

  private:
    const pid_t pid_ = ::getpid();
};

} // namespace spccl_torch
