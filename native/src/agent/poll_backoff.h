// How often an agent's thread looks at NIXL: at once while there is work, and after pauses that grow with the quiet.
#pragma once

#include <chrono>

namespace kv::nixl {

class PollBackoff {
 public:
  using Clock = std::chrono::steady_clock;

  // Something was done, for this agent's callers or for a peer.
  void worked(Clock::time_point at) { last_work_ = at; }
  // NIXL was polled. Where peers have something to reach here, a poll that took long may have served one.
  void polled(Clock::time_point start, Clock::time_point end, bool reachable);

  // Whether a poll is due although there is other work.
  bool due(Clock::time_point now) const;
  Clock::time_point last_poll() const { return last_poll_; }
  // How long to sleep before the next look; zero: not at all.
  std::chrono::microseconds pause(Clock::time_point now, bool reachable, bool in_flight) const;

 private:
  void notice(Clock::time_point end, Clock::duration poll);

  Clock::time_point last_work_;
  Clock::time_point last_poll_;
  Clock::time_point last_short_poll_;
  // Polls that follow without a pause.
  int looks_ahead_ = 0;
  // Those in a row that took long.
  int long_polls_ = 0;
  // What an empty poll takes that follows another at once.
  Clock::duration typical_poll_ = std::chrono::milliseconds(1);
};

}  // namespace kv::nixl
