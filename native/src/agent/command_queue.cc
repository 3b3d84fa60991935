#include "agent/command_queue.h"

#include <utility>

namespace kv::nixl {

void CommandQueue::push(Command command) {
  bool asleep = false;
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
    any_.store(true, std::memory_order_release);
    asleep = asleep_;
  }
  if (asleep) wake_.notify_one();
}

void CommandQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
}

void CommandQueue::wake() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  wake_.notify_one();
}

bool CommandQueue::run_all() {
  if (!any()) return false;
  std::deque<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
    any_.store(false, std::memory_order_relaxed);
  }
  for (Command& command : commands) command();
  return !commands.empty();
}

void CommandQueue::sleep(std::chrono::microseconds longest) {
  std::unique_lock lock(mutex_);
  asleep_ = true;
  wake_.wait_for(lock, longest, [this] { return !commands_.empty() || woken_ || stopping_; });
  asleep_ = false;
  woken_ = false;
}

}  // namespace kv::nixl
