#include "pace.h"

#include <algorithm>

namespace kv::nixl {

namespace {

using std::chrono::microseconds;

// Between two polls: short after work, and growing with the quiet to a bound. An idle agent must still answer: a peer's
// first READ, and all emulated ones, progress only while the target polls.
constexpr auto kShortestPause = microseconds(20);
constexpr auto kLongestPause = microseconds(2000);
// The same where a peer has nothing to reach: no memory of this agent is registered.
constexpr auto kLongestPauseBare = microseconds(5000);
constexpr auto kLongestPauseInFlight = microseconds(50);
constexpr int kQuietPerPause = 64;
// A poll that takes longer than this, and several times what an empty one takes, has probably moved data for a peer. It may
// also have been preempted: a few more polls follow at once, and a second one of its kind makes it certain.
constexpr auto kBusyPoll = microseconds(10);
constexpr int kBusyPollRatio = 4;
constexpr int kTypicalPollRise = 1024;
constexpr int kAttentivePolls = 8;
// While slices are being posted, polls are this far apart; each costs about as much as the making of a small slice.
constexpr auto kPollWhilePosting = microseconds(100);

}  // namespace

void Pace::polled(Clock::time_point start, Clock::time_point end, bool reachable) {
  last_poll_ = end;
  // With nothing of its own to reach no peer can have been served: a slow poll was a preempted one.
  if (reachable) notice(end, end - start);
}

// Looks at how long a poll took. What an empty one takes depends on the backend: the estimate falls at once and rises slowly.
void Pace::notice(Clock::time_point end, Clock::duration poll) {
  if (poll > kBusyPoll && poll > typical_poll_ * kBusyPollRatio) {
    if (attentive_ > 0) last_work_ = end;
    attentive_ = kAttentivePolls;
  } else if (attentive_ > 0) {
    --attentive_;
  }
  typical_poll_ = poll < typical_poll_ ? poll : typical_poll_ + (poll - typical_poll_) / kTypicalPollRise;
}

bool Pace::due(Clock::time_point now) const { return now - last_poll_ > kPollWhilePosting; }

microseconds Pace::pause(Clock::time_point now, bool reachable, bool in_flight) const {
  const auto quiet = std::chrono::duration_cast<microseconds>(now - last_work_);
  auto longest = reachable ? kLongestPause : kLongestPauseBare;
  if (in_flight) longest = kLongestPauseInFlight;
  if (attentive_ > 0) longest = kShortestPause;
  // To sleep at once, also after work, is faster than to look again: whoever was told of it needs a core, and on few cores it is this one.
  return std::clamp(quiet / kQuietPerPause, kShortestPause, longest);
}

}  // namespace kv::nixl
