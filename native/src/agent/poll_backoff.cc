#include "agent/poll_backoff.h"

#include <algorithm>

namespace kv::nixl {

namespace {

// A pause is the time since the last work divided by kIdlePerPause, within these bounds.
constexpr int kIdlePerPause = 64;
constexpr auto kShortestPause = microseconds(20);
constexpr auto kLongestPause = microseconds(2000);
// Applies if peers can reach nothing here.
constexpr auto kLongestPauseUnreachable = microseconds(5000);
// A process's idle agents wake at most 2,500 times a second. A wake costs 12 to 15 us.
constexpr auto kLongestPausePerAgent = microseconds(400);
constexpr auto kLongestPauseInFlight = microseconds(50);
// Polls this close are consecutive. After a sleep caches are cold, and a poll's duration says
// nothing.
constexpr auto kConsecutive = microseconds(5);
// A poll this many times as long as an empty one has probably moved a peer's data, so more follow
// at once. Several in a row exclude that the thread was preempted.
constexpr int kLongPollRatio = 3;
constexpr int kPollsAfterLongOne = 4;
constexpr int kLongPollsForCertainty = 3;
constexpr int kTypicalPollRise = 1024;
// After this time without a short poll, empty polls may have become slower.
constexpr auto kNoShortPoll = seconds(60);
// The distance of polls while slices are posted: a poll costs as much as a small slice.
constexpr auto kPollWhilePosting = microseconds(100);

}  // namespace

void PollBackoff::polled(Clock::time_point start, Clock::time_point end, bool reachable) {
  const bool consecutive = start - last_poll_ < kConsecutive;
  last_poll_ = end;
  if (!reachable) {
    // No peer was served: a long poll was preempted.
    immediate_polls_ = 0;
  } else if (consecutive) {
    record_duration(end, end - start);
  } else {
    immediate_polls_ = std::max(immediate_polls_, 1);
  }
}

// Compares a poll with a typical empty one of this backend. The estimate falls at once and rises
// slowly. Polls that move data do not raise it, or sleeps would interrupt a long transfer.
void PollBackoff::record_duration(Clock::time_point end, Clock::duration poll) {
  if (poll > typical_poll_ * kLongPollRatio) {
    if (++long_polls_in_a_row_ >= kLongPollsForCertainty) last_work_ = end;
    immediate_polls_ = kPollsAfterLongOne;
    if (end - last_short_poll_ < kNoShortPoll) return;
    typical_poll_ *= 2;
  } else {
    long_polls_in_a_row_ = 0;
    if (immediate_polls_ > 0) --immediate_polls_;
    typical_poll_ = poll < typical_poll_ ? poll : typical_poll_ + (poll - typical_poll_) / kTypicalPollRise;
  }
  last_short_poll_ = end;
}

bool PollBackoff::due(Clock::time_point now) const { return now - last_poll_ > kPollWhilePosting; }

microseconds PollBackoff::pause(Clock::time_point now, bool reachable, bool in_flight, int agents) const {
  if (immediate_polls_ > 0) return microseconds::zero();
  const auto idle = std::chrono::duration_cast<microseconds>(now - last_work_);
  auto longest = reachable ? kLongestPause : kLongestPauseUnreachable;
  longest = std::max<microseconds>(longest, kLongestPausePerAgent * agents);
  if (in_flight) longest = kLongestPauseInFlight;
  // A sleep after work beats a poll: JavaScript may need this core to take the event.
  return std::clamp(idle / kIdlePerPause, kShortestPause, longest);
}

}  // namespace kv::nixl
