#pragma once

#include <variant>

#include "library/failure.h"

namespace kv::nixl {

// Metadata, or a notification's payload.
using Bytes = vector<uint8_t>;

// A command's result. The numbers are those of NativeOutcome.
using EventValue = std::variant<std::monostate, double, string, Bytes, vector<double>>;

struct Event {
  // native.ts of @kv/nixl has the same values.
  enum class Kind : int {
    settled = 0,       // this ticket's command has succeeded with `value`, or failed
    done = 1,          // this ticket's transfer has succeeded and is released, or has failed
    released = 2,      // a transfer that did not succeed: NIXL no longer touches its memory
    notification = 3,  // the peer `from` sent `value`; or, to JavaScript, the first one waits
    dropped = 4,       // `value` notifications of `from` (empty: of several) were lost; no ticket
    refused = 5,       // `value` connections were refused without descriptors; no ticket
    unrepaired = 6,    // the repair `from` did not take hold, because of `value`; once, no ticket
    broken = 7,        // the agent ended by itself, because of `value`; no more events
  };

  Kind kind = Kind::settled;
  uint64_t ticket = 0;
  optional<Failure> failure = {};
  EventValue value = {};
  string from = {};

  static Event settled(uint64_t ticket) { return {.kind = Kind::settled, .ticket = ticket}; }
  static Event released(uint64_t ticket) { return {.kind = Kind::released, .ticket = ticket}; }
  // The kind is settled for a command, done for a transfer.
  static Event failed(Kind kind, uint64_t ticket, Failure failure) {
    return {.kind = kind, .ticket = ticket, .failure = std::move(failure)};
  }
};

// The agent's thread writes these. JavaScript's thread also counts posts and transfers in flight.
struct Counters {
  atomic<uint64_t> transfers_posted{0};
  atomic<uint64_t> transfers_done{0};
  atomic<uint64_t> transfers_failed{0};
  atomic<uint64_t> transfers_in_flight{0};
  atomic<uint64_t> bytes_transferred{0};
  atomic<uint64_t> notifications_sent{0};
  atomic<uint64_t> notifications_received{0};
  atomic<uint64_t> registrations{0};
  atomic<uint64_t> prepared_lists{0};
  atomic<uint64_t> remotes{0};
  // The cost of an idle agent.
  atomic<uint64_t> polls{0};
};

}  // namespace kv::nixl
