// Tests AgentTurn. Prints each failed expectation and exits with their number.
#include "agent/agent_turn.h"

#include <cstdio>
#include <thread>

using kv::nixl::AgentTurn;

namespace {

using Clock = AgentTurn::Clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  ++failures;
}

void a_call_waits_for_nobody() {
  AgentTurn turn;
  turn.take();
  bool taken = true;
  std::thread([&] { taken = turn.try_take(Clock::now()); }).join();
  expect(!taken, "a call takes the turn from the agent's thread");
  turn.give();
  expect(turn.try_take(Clock::now()), "a call does not get a turn that is free");
  turn.give_back(Clock::now());
}

void a_thread_that_waits_comes_first() {
  AgentTurn turn;
  expect(turn.try_take(Clock::now()), "a call does not get a turn that is free");
  std::thread thread([&] {
    turn.take();
    turn.give();
  });
  // Once the thread waits, no call gets the turn before it.
  while (!turn.wanted()) std::this_thread::yield();
  expect(!turn.try_take(Clock::now()), "a call comes before the agent's thread, which waits");
  turn.give_back(Clock::now());
  thread.join();
  expect(turn.try_take(Clock::now()), "a call gets no turn after the agent's thread");
  turn.give_back(Clock::now());
}

void a_long_call_is_followed_by_a_rest() {
  AgentTurn turn;
  const auto start = Clock::now();
  const auto takes = [&](Clock::time_point at, Clock::duration duration) {
    if (!turn.try_take(at)) return false;
    turn.give_back(at + duration);
    return true;
  };
  expect(takes(start, microseconds(1900)) && takes(start + milliseconds(2), microseconds(1900)), "short calls are followed by a rest");
  expect(takes(start + milliseconds(4), milliseconds(10)), "a call does not get a turn that is free");
  expect(!takes(start + milliseconds(15), microseconds(1)) && !takes(start + milliseconds(500), microseconds(1)), "a long call has no rest");
  expect(takes(start + milliseconds(515), microseconds(1)), "the rest has no end");
}

}  // namespace

int main() {
  a_call_waits_for_nobody();
  a_thread_that_waits_comes_first();
  a_long_call_is_followed_by_a_rest();
  return failures;
}
