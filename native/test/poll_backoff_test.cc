// The pace of an agent's thread, by a clock of its own. Says what is wrong, and exits with the number of faults.
#include "agent/poll_backoff.h"

#include <cstdio>

using kv::nixl::PollBackoff;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

namespace {

int faults = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  ++faults;
}

struct Thread {
  PollBackoff pace;
  PollBackoff::Clock::time_point now{seconds(1000)};
  bool reachable = true;

  Thread() {
    pace.worked(now);
    // What an empty poll takes is known.
    for (int i = 0; i < 100; ++i) poll(microseconds(1));
  }
  // The poll, and how long the thread sleeps after it.
  microseconds poll(nanoseconds takes) {
    const auto start = now + nanoseconds(200);
    now = start + takes;
    pace.polled(start, now, reachable);
    return pace.pause(now, reachable, false);
  }
  // Polls that find nothing, with the pauses between them: how many in this time.
  int quiet(nanoseconds length) {
    int polls = 0;
    for (const auto end = now + length; now < end; ++polls) now += poll(microseconds(1));
    return polls;
  }
};

void an_idle_agent_sleeps_longer_and_longer() {
  Thread thread;
  expect(thread.quiet(milliseconds(1)) > 20, "after work it looks every 20 us");
  thread.quiet(seconds(1));
  const int polls = thread.quiet(seconds(1));
  // 500 times it wakes, and looks twice: what a poll takes after a sleep says nothing.
  expect(polls > 900 && polls < 1100, "an idle agent wakes every 2 ms");
  thread.reachable = false;
  thread.quiet(seconds(1));
  expect(thread.quiet(seconds(1)) < 250, "with nothing to reach it wakes every 5 ms, and looks once");
}

void data_of_a_peer_is_taken_without_a_pause() {
  Thread thread;
  thread.quiet(seconds(1));
  thread.now += milliseconds(2);
  // Ten seconds of blocks: what moves data does not become what an empty poll takes.
  thread.poll(microseconds(20));
  for (int block = 0; block < 500'000; ++block) {
    if (thread.poll(microseconds(20)) == microseconds::zero()) continue;
    expect(false, "it sleeps between two blocks of a long transfer");
    break;
  }
  expect(thread.quiet(milliseconds(1)) > 20, "after a transfer it looks every 20 us");
}

void a_preempted_poll_is_none_that_moved_data() {
  Thread thread;
  thread.quiet(seconds(10));
  thread.now += milliseconds(2);
  thread.poll(microseconds(1));
  expect(thread.poll(milliseconds(1)) == microseconds::zero(), "after a long poll it looks again at once");
  microseconds pause{};
  for (int polls = 0; polls < 4; ++polls) pause = thread.poll(microseconds(1));
  expect(pause == milliseconds(2), "one long poll is no work");
}

void empty_polls_may_become_dearer() {
  Thread thread;
  thread.quiet(seconds(1));
  const auto begun = thread.now;
  while (thread.poll(microseconds(5)) == microseconds::zero() && thread.now - begun < seconds(200)) {
  }
  expect(thread.now - begun > seconds(50), "a minute of data passes for quiet");
  expect(thread.now - begun < seconds(130), "it never sleeps again where empty polls have become dearer");
}

}  // namespace

int main() {
  an_idle_agent_sleeps_longer_and_longer();
  data_of_a_peer_is_taken_without_a_pause();
  a_preempted_poll_is_none_that_moved_data();
  empty_polls_may_become_dearer();
  return faults;
}
