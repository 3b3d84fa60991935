#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "library/failure.h"

namespace kv::nixl {

// Metadata, or the payload of a notification.
using Bytes = std::vector<uint8_t>;

// Names and values of a backend, in no order.
using Parameters = std::vector<std::pair<std::string, std::string>>;
// For each key of a query its parameters, or none where there is nothing under it.
using QueryAnswers = std::vector<std::optional<Parameters>>;

// What a plugin or a backend states.
struct ParameterSet {
  std::vector<std::string> memory_types;
  Parameters parameters;
};

// What NIXL estimates for requests before they are posted.
struct CostEstimate {
  double duration_us;
  double margin_us;
  // The backend has a model; otherwise the numbers say nothing.
  bool known;
};

// What NIXL itself measured of the requests of a transfer.
struct NixlTelemetry {
  double length_bytes = 0;
  double descriptor_count = 0;
  double post_us = 0;
  double transfer_us = 0;
};

// Sizes and timings of a transfer that succeeded; see TransferResult of @kv/interface.
struct TransferOutcome {
  double length_bytes;
  double descriptor_count;
  double merged_count;
  double prepare_ms;
  double make_ms;
  double post_ms;
  double transfer_ms;
  // Only where the agent captures NIXL's telemetry.
  std::optional<NixlTelemetry> telemetry = {};
};

// What a command returns to JavaScript.
using EventValue = std::variant<std::monostate, double, std::string, Bytes, TransferOutcome, ParameterSet, QueryAnswers, CostEstimate>;

// What an agent's thread reports to JavaScript.
struct Event {
  // The values are those that native.ts of @kv/nixl knows.
  enum class Kind : int {
    settled = 0,       // the command of this ticket has succeeded with `value`, or failed
    done = 1,          // the transfer of this ticket has succeeded with a TransferOutcome and is released; or it has failed
    released = 2,      // a transfer that did not succeed: NIXL no longer touches its memory
    notification = 3,  // the peer `from` sent `value`; no ticket
    dropped = 4,       // `value` notifications that state `from` as their sender were dropped; no ticket
    refused = 5,       // `value` connections were refused for lack of file descriptors, by all agents of the process; no ticket
    unknown_ucx = 6,   // UCX is not as expected, and its errors may end the process; once, no ticket
  };

  Kind kind = Kind::settled;
  uint64_t ticket = 0;
  std::optional<Failure> failure = {};
  EventValue value = {};
  std::string from = {};

  // A command that has succeeded without a value.
  static Event settled(uint64_t ticket) { return {.kind = Kind::settled, .ticket = ticket}; }
  // A transfer that has succeeded and is released.
  static Event done(uint64_t ticket, TransferOutcome outcome) { return {.kind = Kind::done, .ticket = ticket, .value = outcome}; }
  // A transfer that did not succeed and is released.
  static Event released(uint64_t ticket) { return {.kind = Kind::released, .ticket = ticket}; }
  // A command (`kind` settled) or a transfer (done) that has failed.
  static Event failed(Kind kind, uint64_t ticket, Failure failure) { return {.kind = kind, .ticket = ticket, .failure = std::move(failure)}; }
  // A notification of a peer.
  static Event notification(std::string from, Bytes payload) {
    return {.kind = Kind::notification, .value = std::move(payload), .from = std::move(from)};
  }
  // Connections of peers were refused for lack of file descriptors.
  static Event refused(uint64_t count) { return {.kind = Kind::refused, .value = static_cast<double>(count)}; }
  // Notifications of a sender were dropped; an empty name stands for several senders.
  static Event dropped(std::string from, double count) { return {.kind = Kind::dropped, .value = count, .from = std::move(from)}; }
};

}  // namespace kv::nixl
