// Tests MonotonicCondition with a clock of the day that was set back, and a wait that records its
// arguments: both replace libc's. Prints each failed expectation and exits with their number.
#include "library/monotonic_condition.h"
#include "expect.h"

using kv::nixl::MonotonicCondition;

namespace {

timespec now{.tv_sec = 5000, .tv_nsec = 999'999'000};
clockid_t clock_of_condition = CLOCK_REALTIME;
timespec last_until{};
int waits = 0;

}  // namespace

extern "C" {
int clock_gettime(clockid_t clock, timespec* time) noexcept {
  *time = clock == CLOCK_MONOTONIC ? now : timespec{.tv_sec = 1, .tv_nsec = 0};
  return 0;
}
int pthread_condattr_setclock(pthread_condattr_t*, clockid_t clock) noexcept {
  clock_of_condition = clock;
  return 0;
}
int pthread_cond_timedwait(pthread_cond_t*, pthread_mutex_t*, const timespec* until) {
  ++waits;
  last_until = *until;
  // The first wake-up is spurious.
  return waits == 1 ? 0 : ETIMEDOUT;
}
}

int main() {
  MonotonicCondition condition;
  std::mutex mutex;
  std::unique_lock lock(mutex);
  expect(clock_of_condition == CLOCK_MONOTONIC, "waits follow the clock of the day");
  expect(!condition.wait_for(lock, std::chrono::microseconds(2'000'001), [] { return false; }), "a wait that timed out says that it did not");
  expect(waits == 2, "a spurious wake-up ends a wait");
  expect(last_until.tv_sec == 5003 && last_until.tv_nsec == 0, "a wait does not end when its time is over");
  expect(condition.wait_for(lock, std::chrono::microseconds(1), [] { return true; }) && waits == 2, "a wait for what holds already sleeps");
  return failures;
}
