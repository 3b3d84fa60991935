#pragma once

#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <mutex>

namespace kv::nixl {

// Who may call NIXL for one agent: one thread at a time. The agent's thread has the turn unless it
// sleeps. The JavaScript thread takes it for one short call if it is free, and never waits for it.
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

  // On the JavaScript thread: takes the turn. Returns false if the agent's thread has it or waits
  // for it, and for some time after a long call.
  bool try_take(Clock::time_point now) {
    if (now < resting_until_ || wanted() || !mutex_.try_lock()) return false;
    began_ = now;
    if (watched_calls_ > 0) before_ = used();
    return true;
  }
  // On the JavaScript thread: gives the turn back. A call that takes long, such as a copy from
  // memory of a peer that is swapped out, is followed by a time in which the agent's thread makes
  // all calls: however slow they are, the event loop spends a fiftieth of its time on them. A busy
  // host may have taken the core away instead. To tell costs two system calls, so that only the
  // calls after a long one are watched.
  void give_back(Clock::time_point now) {
    const bool is_long = now - began_ > kLong;
    if (watched_calls_ > 0) {
      --watched_calls_;
      if (is_long && used().is_long_since(before_)) resting_until_ = now + (now - began_) * kRest;
    }
    if (is_long) watched_calls_ = kWatched;
    mutex_.unlock();
  }

 private:
  static constexpr auto kLong = std::chrono::milliseconds(2);
  static constexpr int kRest = 50;
  static constexpr int kWatched = 1000;

  // What a thread has used: how often it has waited, and its time on a core.
  struct Used {
    long waits;
    std::chrono::microseconds time;

    // Whether it has waited or worked long since then. A thread whose core was taken away has not.
    bool is_long_since(const Used& before) const { return waits > before.waits || time - before.time > kLong; }
  };
  static Used used() {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    const auto microseconds = [](const timeval& time) { return std::chrono::seconds(time.tv_sec) + std::chrono::microseconds(time.tv_usec); };
    return {usage.ru_nvcsw, microseconds(usage.ru_utime) + microseconds(usage.ru_stime)};
  }

  std::mutex mutex_;
  // The agent's thread waits for the turn. Without this a busy JavaScript thread would take it
  // again each time before that thread is awake.
  std::atomic<bool> wanted_{false};
  // For the JavaScript thread only.
  Clock::time_point began_;
  // The next calls to be watched, and what the thread had used before the present one.
  int watched_calls_ = 0;
  Used before_{};
  Clock::time_point resting_until_{};
};

}  // namespace kv::nixl
