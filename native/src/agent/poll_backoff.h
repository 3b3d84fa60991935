#pragma once

#include <chrono>

namespace kv::nixl {

// How often an agent's thread polls NIXL: without pauses while a peer's data arrives, every 20 us
// after work, and less and less often while nothing happens. An idle agent must keep polling, since
// a peer's first READ and all emulated ones progress only while the target polls.
class PollBackoff {
 public:
  using Clock = std::chrono::steady_clock;

  // The thread did something for its callers, or received a notification.
  void worked(Clock::time_point at) { last_work_ = at; }
  // NIXL was polled. `reachable`: peers can reach memory of this agent, so a poll that took long
  // may have moved data for one.
  void polled(Clock::time_point start, Clock::time_point end, bool reachable);

  // Whether a poll is due although the thread has other work.
  bool due(Clock::time_point now) const;
  // When the last poll ended.
  Clock::time_point last_poll() const { return last_poll_; }
  // How long to sleep before the next poll; zero for not at all. `in_flight`: the agent has
  // transfers. `agents`: how many of this process poll.
  std::chrono::microseconds pause(Clock::time_point now, bool reachable, bool in_flight, int agents) const;

 private:
  void record_duration(Clock::time_point end, Clock::duration poll);

  Clock::time_point last_work_;
  Clock::time_point last_poll_;
  Clock::time_point last_short_poll_;
  // Polls still to make without a pause.
  int immediate_polls_ = 0;
  int long_polls_in_a_row_ = 0;
  // What an empty poll takes that directly follows another one.
  Clock::duration typical_poll_ = std::chrono::milliseconds(1);
};

}  // namespace kv::nixl
