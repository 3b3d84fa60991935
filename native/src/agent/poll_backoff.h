#pragma once

#include <algorithm>

#include "library/std_names.h"

namespace kv::nixl {

// How often an agent's thread polls: without pauses while a peer's data arrives, every 20 us after
// work, and less while idle. Idle agents must poll, since a peer's first READ and all emulated ones
// progress only then.
class PollBackoff {
 public:
  void worked(Clock::time_point at) { last_work_ = at; }
  // `reachable`: peers can reach memory here, so a long poll may have moved data for one.
  void polled(Clock::time_point start, Clock::time_point end, bool reachable) {
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

  // Whether to poll despite other work.
  bool due(Clock::time_point now) const { return now - last_poll_ > kPollWhilePosting; }
  Clock::time_point last_poll() const { return last_poll_; }
  // How long to sleep. `in_flight`: the agent has transfers. `agents`: how many of this process
  // poll.
  microseconds pause(Clock::time_point now, bool reachable, bool in_flight, int agents) const {
    if (immediate_polls_ > 0) return microseconds::zero();
    const auto idle = std::chrono::duration_cast<microseconds>(now - last_work_);
    auto longest = reachable ? kLongestPause : kLongestPauseUnreachable;
    longest = std::max<microseconds>(longest, kLongestPausePerAgent * agents);
    if (in_flight) longest = kLongestPauseInFlight;
    // A sleep after work beats a poll: JavaScript may need this core to take the event.
    return std::clamp(idle / kIdlePerPause, kShortestPause, longest);
  }

 private:
  // A pause is the time since the last work divided by kIdlePerPause, within these bounds.
  static constexpr int kIdlePerPause = 64;
  static constexpr auto kShortestPause = microseconds(20);
  static constexpr auto kLongestPause = microseconds(2000);
  // Applies if peers can reach nothing here.
  static constexpr auto kLongestPauseUnreachable = microseconds(5000);
  // A process's idle agents wake at most 2,500 times a second. A wake costs 12 to 15 us.
  static constexpr auto kLongestPausePerAgent = microseconds(400);
  static constexpr auto kLongestPauseInFlight = microseconds(50);
  // Polls this close are consecutive. After a sleep caches are cold, and a poll's duration says
  // nothing.
  static constexpr auto kConsecutive = microseconds(5);
  // A poll this many times as long as an empty one has probably moved a peer's data, so more follow
  // at once. Several in a row exclude that the thread was preempted.
  static constexpr int kLongPollRatio = 3;
  static constexpr int kPollsAfterLongOne = 4;
  static constexpr int kLongPollsForCertainty = 3;
  static constexpr int kTypicalPollRise = 1024;
  // After this time without a short poll, empty polls may have become slower.
  static constexpr auto kNoShortPoll = seconds(60);
  // The distance of polls while slices are posted: a poll costs as much as a small slice.
  static constexpr auto kPollWhilePosting = microseconds(100);

  // Compares a poll with a typical empty one of this backend. The estimate falls at once and rises
  // slowly. Polls that move data do not raise it, or sleeps would interrupt a long transfer.
  void record_duration(Clock::time_point end, Clock::duration poll) {
    if (poll > typical_poll_ * kLongPollRatio) {
      if (++long_polls_in_a_row_ >= kLongPollsForCertainty) last_work_ = end;
      immediate_polls_ = kPollsAfterLongOne;
      if (end - last_short_poll_ < kNoShortPoll) return;
      typical_poll_ *= 2;
    } else {
      long_polls_in_a_row_ = 0;
      if (immediate_polls_ > 0) --immediate_polls_;
      typical_poll_ =
          poll < typical_poll_ ? poll : typical_poll_ + (poll - typical_poll_) / kTypicalPollRise;
    }
    last_short_poll_ = end;
  }

  Clock::time_point last_work_;
  Clock::time_point last_poll_;
  Clock::time_point last_short_poll_;
  int immediate_polls_ = 0;
  int long_polls_in_a_row_ = 0;
  // The duration of an empty poll right after another.
  Clock::duration typical_poll_ = milliseconds(1);
};

}  // namespace kv::nixl
