// Tests AgentTurn. Prints each failed expectation and exits with their number.
#include "agent/agent_turn.h"
#include "expect.h"

#include <thread>

using kv::nixl::AgentTurn;

namespace {

using kv::nixl::Clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

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

// Whether a call gets the turn. It does `use`, and seems to take `duration`.
template <typename Use>
bool takes(AgentTurn& turn, Clock::time_point at, Clock::duration duration, Use use) {
  if (!turn.try_take(at)) return false;
  use();
  turn.give_back(at + duration);
  return true;
}

const auto start = Clock::now();
const auto nothing = [] {};
const auto waiting = [] { std::this_thread::sleep_for(milliseconds(1)); };
const auto working = [] {
  for (const auto until = Clock::now() + milliseconds(50); Clock::now() < until;) continue;
};

template <typename Use>
void a_second_long_call_is_followed_by_a_rest(Use use, const char* what) {
  AgentTurn turn;
  expect(takes(turn, start, microseconds(1900), use) && takes(turn, start, microseconds(1900), use), "short calls are followed by a rest");
  expect(takes(turn, start + milliseconds(4), milliseconds(10), use), "a call does not get a turn that is free");
  expect(takes(turn, start + milliseconds(20), milliseconds(10), use), "the first long call is followed by a rest");
  expect(!takes(turn, start + milliseconds(31), microseconds(1), use) && !takes(turn, start + milliseconds(500), microseconds(1), use), what);
  expect(takes(turn, start + milliseconds(531), microseconds(1), use), "the rest has no end");
}

void a_core_that_is_taken_away_is_no_long_call() {
  AgentTurn turn;
  for (int call = 0; call < 10; ++call) {
    expect(takes(turn, start + milliseconds(20 * call), milliseconds(10), nothing), "a thread without a core is followed by a rest");
  }
}

}  // namespace

int main() {
  a_call_waits_for_nobody();
  a_thread_that_waits_comes_first();
  a_second_long_call_is_followed_by_a_rest(waiting, "calls that wait have no rest");
  a_second_long_call_is_followed_by_a_rest(working, "calls that work long have no rest");
  a_core_that_is_taken_away_is_no_long_call();
  return failures;
}
