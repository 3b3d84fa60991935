#pragma once

#include <algorithm>
#include <deque>
#include <functional>

#include "library/failure.h"
#include "library/monotonic_condition.h"

namespace kv::nixl {

// Commands from any thread to the one that runs them.
class CommandQueue {
 public:
  using Command = std::function<void()>;

  static constexpr size_t kMaxWaiting = 1u << 20;

  // From any thread. Wakes the running thread. Commands keep their order. Throws
  // KV_TRANSPORT_UNAVAILABLE when too many wait, except for commands that end something.
  void push(Command command, bool ends = false) {
    bool asleep = false;
    {
      const lock_guard lock(mutex_);
      if (commands_.size() >= kMaxWaiting && !ends) {
        throw Failure("KV_TRANSPORT_UNAVAILABLE",
                      to_string(kMaxWaiting) + " calls wait for the agent's thread",
                      "await some of them before the next");
      }
      commands_.push_back(std::move(command));
      any_.store(true, std::memory_order_release);
      asleep = asleep_;
    }
    if (asleep) wake_.notify_one();
  }
  // From any thread: sets `stopping` and wakes.
  void stop() {
    {
      const lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
  }
  // From any thread: ends the present or next sleep after this time.
  void wake(microseconds after = {}) {
    {
      const lock_guard lock(mutex_);
      const auto at = Clock::now() + after;
      wake_at_ = std::min(wake_at_.value_or(at), at);
    }
    wake_.notify_one();
  }
  // Whether the running thread has not taken all commands.
  bool any() const { return any_.load(std::memory_order_acquire); }
  const atomic<bool>& stopping() const { return stopping_; }

  // On the running thread: runs what waits, and returns whether anything did. When a command
  // throws, the next call runs those after it.
  bool run_all() {
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
  // On the running thread: sleeps until a command, `stop`, `wake` or the end of the time.
  void sleep(microseconds longest) {
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
      wake_.wait_for(lock, left, [this, until] {
        return !commands_.empty() || stopping_ || wake_at_.value_or(until) != until;
      });
    }
    asleep_ = false;
  }

 private:
  std::mutex mutex_;
  MonotonicCondition wake_;
  std::deque<Command> commands_;
  // Taken by the running thread.
  std::deque<Command> running_;
  bool asleep_ = false;
  // When the running thread wakes without commands.
  optional<Clock::time_point> wake_at_;
  // Read without the lock in every turn of the loop.
  atomic<bool> any_{false};
  atomic<bool> stopping_{false};
};

}  // namespace kv::nixl
