#pragma once

#include <sys/resource.h>

#include "library/std_names.h"

namespace kv::nixl {

// Lets one thread at a time call NIXL for an agent. The agent's thread has the turn unless it
// sleeps. The JavaScript thread takes a free turn for one short call, and never waits for it.
class AgentTurn {
 public:
  // On the agent's thread: waits for the turn.
  void take() {
    wanted_.store(true, std::memory_order_relaxed);
    mutex_.lock();
    wanted_.store(false, std::memory_order_relaxed);
  }
  bool wanted() const { return wanted_.load(std::memory_order_relaxed); }
  // On the agent's thread, before a sleep.
  void give() { mutex_.unlock(); }

  // On the JavaScript thread. False if the agent's thread has or wants the turn, and for a time
  // after a long call.
  bool try_take(Clock::time_point now) {
    if (now < resting_until_ || wanted() || !mutex_.try_lock()) return false;
    began_ = now;
    if (watched_calls_ > 0) before_ = used();
    return true;
  }
  // On the JavaScript thread. After a long call, such as a copy of swapped-out memory, the agent's
  // thread makes all calls for a time: the event loop spends at most a fiftieth of its time on
  // them. A busy host may instead have taken the core away. Telling that costs two system calls, so
  // only calls after a long one are watched.
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
  static constexpr auto kLong = milliseconds(2);
  static constexpr int kRest = 50;
  static constexpr int kWatched = 1000;

  struct Used {
    long waits;
    microseconds time;

    // A thread whose core was taken away has neither waited nor worked long.
    bool is_long_since(const Used& before) const {
      return waits > before.waits || time - before.time > kLong;
    }
  };
  static Used used() {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    const auto duration = [](const timeval& time) {
      return seconds(time.tv_sec) + microseconds(time.tv_usec);
    };
    return {usage.ru_nvcsw, duration(usage.ru_utime) + duration(usage.ru_stime)};
  }

  std::mutex mutex_;
  // Without this flag, a busy JavaScript thread would retake the turn before the agent's thread is
  // awake.
  atomic<bool> wanted_{false};
  // For the JavaScript thread only.
  Clock::time_point began_;
  // How many more calls are watched, and the use before the present one.
  int watched_calls_ = 0;
  Used before_{};
  Clock::time_point resting_until_{};
};

}  // namespace kv::nixl
