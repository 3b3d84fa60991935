#pragma once

#include <deque>
#include <functional>

#include "library/monotonic_condition.h"

namespace kv::nixl {

// Commands from any thread to the one that runs them.
class CommandQueue {
 public:
  using Command = std::function<void()>;

  static constexpr size_t kMaxWaiting = 1u << 20;

  // From any thread. Wakes the running thread. Commands keep their order. Throws
  // KV_TRANSPORT_UNAVAILABLE when too many wait, except for commands that end something.
  void push(Command command, bool ends = false);
  // From any thread: sets `stopping` and wakes.
  void stop();
  // From any thread: ends the present or next sleep after this time.
  void wake(microseconds after = {});
  // Whether the running thread has not taken all commands.
  bool any() const { return any_.load(std::memory_order_acquire); }
  const atomic<bool>& stopping() const { return stopping_; }

  // On the running thread: runs what waits, and returns whether anything did. When a command
  // throws, the next call runs those after it.
  bool run_all();
  // On the running thread: sleeps until a command, `stop`, `wake` or the end of the time.
  void sleep(microseconds longest);

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
