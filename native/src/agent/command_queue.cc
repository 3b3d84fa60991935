#include "agent/command_queue.h"

#include <algorithm>

#include "library/failure.h"

namespace kv::nixl {

void CommandQueue::push(Command command, bool ends) {
  bool asleep = false;
  {
    const lock_guard lock(mutex_);
    if (commands_.size() >= kMaxWaiting && !ends) {
      throw Failure("KV_TRANSPORT_UNAVAILABLE", to_string(kMaxWaiting) + " calls wait for the agent's thread", "await some of them before the next");
    }
    commands_.push_back(std::move(command));
    any_.store(true, std::memory_order_release);
    asleep = asleep_;
  }
  if (asleep) wake_.notify_one();
}

void CommandQueue::stop() {
  {
    const lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
}

void CommandQueue::wake(microseconds after) {
  {
    const lock_guard lock(mutex_);
    const auto at = Clock::now() + after;
    wake_at_ = std::min(wake_at_.value_or(at), at);
  }
  wake_.notify_one();
}

bool CommandQueue::run_all() {
  if (!any() && running_.empty()) return false;
  if (running_.empty()) {
    const lock_guard lock(mutex_);
    running_.swap(commands_);
    any_.store(false, std::memory_order_relaxed);
  }
  while (!running_.empty()) {
    const Command command = std::move(running_.front());
    running_.pop_front();
    command();
  }
  return true;
}

void CommandQueue::sleep(microseconds longest) {
  std::unique_lock lock(mutex_);
  asleep_ = true;
  const auto end = Clock::now() + longest;
  while (commands_.empty() && !stopping_) {
    const auto until = wake_at_.value_or(end);
    const auto left = std::chrono::ceil<microseconds>(until - Clock::now());
    if (left <= left.zero()) {
      wake_at_.reset();
      break;
    }
    wake_.wait_for(lock, left, [this, until] { return !commands_.empty() || stopping_ || wake_at_.value_or(until) != until; });
  }
  asleep_ = false;
}

}  // namespace kv::nixl
