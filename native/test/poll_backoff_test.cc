// Tests PollBackoff with a simulated clock. Prints each failed expectation and exits with their
// number.
#include "agent/poll_backoff.h"
#include "expect.h"

using kv::nixl::PollBackoff;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

namespace {

struct Thread {
  PollBackoff backoff;
  kv::nixl::Clock::time_point now{seconds(1000)};
  bool reachable = true;
  int agents = 1;

  Thread() {
    backoff.worked(now);
    // PollBackoff learns what an empty poll takes.
    for (int i = 0; i < 100; ++i) poll(microseconds(1));
  }
  // Polls, and returns the pause after the poll.
  microseconds poll(nanoseconds takes) {
    const auto start = now + nanoseconds(200);
    now = start + takes;
    backoff.polled(start, now, reachable);
    return backoff.pause(now, reachable, false, agents);
  }
  // Makes empty polls, with the pauses between them, for this time. Returns their number.
  int idle(nanoseconds length) {
    int polls = 0;
    for (const auto end = now + length; now < end; ++polls) now += poll(microseconds(1));
    return polls;
  }
};

void an_idle_agent_sleeps_longer_and_longer() {
  Thread thread;
  expect(thread.idle(milliseconds(1)) > 20, "after work it polls every 20 us");
  thread.idle(seconds(1));
  const int polls = thread.idle(seconds(1));
  // It wakes 500 times and polls twice each: the duration of a poll right after a sleep says
  // nothing.
  expect(polls > 900 && polls < 1100, "an idle agent wakes every 2 ms");
  thread.agents = 64;
  thread.idle(seconds(1));
  expect(thread.idle(seconds(1)) < 85, "with 64 agents in the process it wakes every 25.6 ms");
  thread.agents = 1;
  thread.reachable = false;
  thread.idle(seconds(1));
  expect(thread.idle(seconds(1)) < 250, "if peers can reach nothing, it wakes every 5 ms and polls once");
}

void it_does_not_pause_while_data_arrives() {
  Thread thread;
  thread.idle(seconds(1));
  thread.now += milliseconds(2);
  // Ten seconds of blocks: polls that move data do not raise the estimate of an empty poll.
  thread.poll(microseconds(20));
  for (int block = 0; block < 500'000; ++block) {
    if (thread.poll(microseconds(20)) == microseconds::zero()) continue;
    expect(false, "it sleeps between two blocks of a long transfer");
    break;
  }
  expect(thread.idle(milliseconds(1)) > 20, "after a transfer it polls every 20 us");
}

void a_preempted_poll_is_not_taken_for_work() {
  Thread thread;
  thread.idle(seconds(10));
  thread.now += milliseconds(2);
  thread.poll(microseconds(1));
  expect(thread.poll(milliseconds(1)) == microseconds::zero(), "after a long poll it polls again at once");
  microseconds pause{};
  for (int polls = 0; polls < 4; ++polls) pause = thread.poll(microseconds(1));
  expect(pause == milliseconds(2), "one long poll does not count as work");
}

void it_adapts_when_empty_polls_become_slower() {
  Thread thread;
  thread.idle(seconds(1));
  const auto start = thread.now;
  while (thread.poll(microseconds(5)) == microseconds::zero() && thread.now - start < seconds(200)) {
  }
  expect(thread.now - start > seconds(50), "it takes a minute of data for idleness");
  expect(thread.now - start < seconds(130), "it never sleeps again after empty polls became slower");
}

}  // namespace

int main() {
  an_idle_agent_sleeps_longer_and_longer();
  it_does_not_pause_while_data_arrives();
  a_preempted_poll_is_not_taken_for_work();
  it_adapts_when_empty_polls_become_slower();
  return failures;
}
