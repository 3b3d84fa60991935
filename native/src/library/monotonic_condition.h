#pragma once

#include <errno.h>
#include <pthread.h>
#include <time.h>

#include <chrono>
#include <mutex>

namespace kv::nixl {

// A condition whose timed waits follow the monotonic clock. std::condition_variable follows the
// clock of the day where glibc is older than 2.30, for which the published addon is built: a clock
// that is set back by an hour would make a sleep of a millisecond last an hour.
class MonotonicCondition {
 public:
  MonotonicCondition() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&condition_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  ~MonotonicCondition() { pthread_cond_destroy(&condition_); }
  MonotonicCondition(const MonotonicCondition&) = delete;
  MonotonicCondition& operator=(const MonotonicCondition&) = delete;

  // Wakes one waiting thread.
  void notify_one() { pthread_cond_signal(&condition_); }
  // Wakes all waiting threads.
  void notify_all() { pthread_cond_broadcast(&condition_); }

  // Waits, with the lock released, until `holds()` or the time is over. Returns whether `holds()`.
  template <typename Holds>
  bool wait_for(std::unique_lock<std::mutex>& lock, std::chrono::microseconds longest, Holds holds) {
    timespec until{};
    clock_gettime(CLOCK_MONOTONIC, &until);
    const auto nanoseconds = std::chrono::nanoseconds(longest % std::chrono::seconds(1)).count() + until.tv_nsec;
    until.tv_sec += std::chrono::duration_cast<std::chrono::seconds>(longest).count() + nanoseconds / 1'000'000'000;
    until.tv_nsec = nanoseconds % 1'000'000'000;
    while (!holds()) {
      if (pthread_cond_timedwait(&condition_, lock.mutex()->native_handle(), &until) == ETIMEDOUT) return holds();
    }
    return true;
  }

 private:
  pthread_cond_t condition_;
};

}  // namespace kv::nixl
