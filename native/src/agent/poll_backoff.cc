#include "agent/poll_backoff.h"

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
// Polls that follow one another with less than this between them: what a poll takes after a sleep is that of cold caches, and says nothing.
constexpr auto kAtOnce = microseconds(5);
// A poll that takes several times what an empty one takes has probably moved data for a peer, which may have more: other polls follow at
// once. It may also have been preempted: some in a row make it certain.
constexpr int kLongPollRatio = 3;
constexpr int kPollsAfterLongOne = 4;
constexpr int kCertain = 3;
constexpr int kTypicalPollRise = 1024;
// Where no poll was a short one for so long, the empty ones may have become dearer.
constexpr auto kNoShortPoll = std::chrono::seconds(60);
// While slices are being posted, polls are this far apart; each costs about as much as the making of a small slice.
constexpr auto kPollWhilePosting = microseconds(100);

}  // namespace

void PollBackoff::polled(Clock::time_point start, Clock::time_point end, bool reachable) {
  const bool at_once = start - last_poll_ < kAtOnce;
  last_poll_ = end;
  // With nothing of its own to reach no peer can have been served: a slow poll was a preempted one.
  if (!reachable) {
    looks_ahead_ = 0;
  } else if (at_once) {
    notice(end, end - start);
  } else {
    looks_ahead_ = std::max(looks_ahead_, 1);
  }
}

// Looks at how long a poll took. What an empty one takes depends on the backend: the estimate falls at once and rises slowly, and not by what
// moves data, or a long transfer would pass for quiet and wait for a sleep after each of its blocks.
void PollBackoff::notice(Clock::time_point end, Clock::duration poll) {
  if (poll > typical_poll_ * kLongPollRatio) {
    if (++long_polls_ >= kCertain) last_work_ = end;
    looks_ahead_ = kPollsAfterLongOne;
    if (end - last_short_poll_ < kNoShortPoll) return;
    typical_poll_ *= 2;
  } else {
    long_polls_ = 0;
    if (looks_ahead_ > 0) --looks_ahead_;
    typical_poll_ = poll < typical_poll_ ? poll : typical_poll_ + (poll - typical_poll_) / kTypicalPollRise;
  }
  last_short_poll_ = end;
}

bool PollBackoff::due(Clock::time_point now) const { return now - last_poll_ > kPollWhilePosting; }

microseconds PollBackoff::pause(Clock::time_point now, bool reachable, bool in_flight) const {
  if (looks_ahead_ > 0) return microseconds::zero();
  const auto quiet = std::chrono::duration_cast<microseconds>(now - last_work_);
  auto longest = reachable ? kLongestPause : kLongestPauseBare;
  if (in_flight) longest = kLongestPauseInFlight;
  // To sleep at once, also after work, is faster than to look again: whoever was told of it needs a core, and on few cores it is this one.
  return std::clamp(quiet / kQuietPerPause, kShortestPause, longest);
}

}  // namespace kv::nixl
