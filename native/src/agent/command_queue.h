#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>

#include "library/monotonic_condition.h"

namespace kv::nixl {

// Commands from any thread to the one thread that runs them.
class CommandQueue {
 public:
  using Command = std::function<void()>;

  // From any thread: adds a command and wakes the running thread if it sleeps. Commands run in the
  // order in which they were added.
  void push(Command command);
  // From any thread: sets `stopping` and wakes the running thread.
  void stop();
  // From any thread: a sleep of the running thread, or its next one, ends once `after` is over,
  // neither later nor, unless there are commands, earlier.
  void wake(std::chrono::microseconds after = {});
  // Whether there are commands that the running thread has not taken.
  bool any() const { return any_.load(std::memory_order_acquire); }
  // Whether `stop` was called.
  const std::atomic<bool>& stopping() const { return stopping_; }

  // On the running thread: runs the commands that are there. Returns whether there were any.
  bool run_all();
  // On the running thread: sleeps until there is a command, `stop` or `wake` is called, or the time
  // is over.
  void sleep(std::chrono::microseconds longest);

 private:
  std::mutex mutex_;
  MonotonicCondition wake_;
  std::deque<Command> commands_;
  bool asleep_ = false;
  // When the running thread wakes although it has no commands.
  std::optional<std::chrono::steady_clock::time_point> wake_at_;
  // Whether there are commands. Read without the lock, since the thread checks it in every turn of
  // its loop.
  std::atomic<bool> any_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace kv::nixl
