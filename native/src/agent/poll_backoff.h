#pragma once

#include "library/std_names.h"

namespace kv::nixl {

// How often an agent's thread polls: without pauses while a peer's data arrives, every 20 us after
// work, and less while idle. Idle agents must poll, since a peer's first READ and all emulated ones
// progress only then.
class PollBackoff {
 public:
  void worked(Clock::time_point at) { last_work_ = at; }
  // `reachable`: peers can reach memory here, so a long poll may have moved data for one.
  void polled(Clock::time_point start, Clock::time_point end, bool reachable);

  // Whether to poll despite other work.
  bool due(Clock::time_point now) const;
  Clock::time_point last_poll() const { return last_poll_; }
  // How long to sleep. `in_flight`: the agent has transfers. `agents`: how many of this process
  // poll.
  microseconds pause(Clock::time_point now, bool reachable, bool in_flight, int agents) const;

 private:
  void record_duration(Clock::time_point end, Clock::duration poll);

  Clock::time_point last_work_;
  Clock::time_point last_poll_;
  Clock::time_point last_short_poll_;
  int immediate_polls_ = 0;
  int long_polls_in_a_row_ = 0;
  // The duration of an empty poll right after another.
  Clock::duration typical_poll_ = milliseconds(1);
};

}  // namespace kv::nixl
