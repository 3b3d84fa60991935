#pragma once

#include <atomic>
#include <chrono>
#include <mutex>

namespace kv::nixl {

// Who may call NIXL for one agent: one thread at a time. The agent's thread has the turn unless it sleeps. The JavaScript thread takes it for one short
// call if it is free, and never waits for it.
class AgentTurn {
 public:
  using Clock = std::chrono::steady_clock;

  // On the agent's thread: takes the turn, for which it waits while the JavaScript thread has it.
  void take() {
    wanted_.store(true, std::memory_order_relaxed);
    mutex_.lock();
    wanted_.store(false, std::memory_order_relaxed);
  }
  // Whether the agent's thread waits for the turn.
  bool wanted() const { return wanted_.load(std::memory_order_relaxed); }
  // On the agent's thread: gives the turn back, to sleep.
  void give() { mutex_.unlock(); }

  // On the JavaScript thread: takes the turn. Returns false if the agent's thread has it or waits for it, and for some time after a long call.
  bool try_take(Clock::time_point now) {
    if (now < resting_until_ || wanted() || !mutex_.try_lock()) return false;
    began_ = now;
    return true;
  }
  // On the JavaScript thread: gives the turn back. A call that took long, such as a copy from memory of a peer that is swapped out, is followed by a time
  // in which the agent's thread makes all calls: however slow they are, the event loop spends a fiftieth of its time on them.
  void give_back(Clock::time_point now) {
    if (now - began_ > kLong) resting_until_ = now + (now - began_) * kRest;
    mutex_.unlock();
  }

 private:
  static constexpr auto kLong = std::chrono::milliseconds(2);
  static constexpr int kRest = 50;

  std::mutex mutex_;
  // The agent's thread waits for the turn. Without this a busy JavaScript thread would take it again each time before that thread is awake.
  std::atomic<bool> wanted_{false};
  // For the JavaScript thread only.
  Clock::time_point began_;
  Clock::time_point resting_until_{};
};

}  // namespace kv::nixl
