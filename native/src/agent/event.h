// What an agent's thread tells JavaScript.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "library/failure.h"

namespace kv::nixl {

struct TransferOutcome {
  double length_bytes;
  double descriptor_count;
  double merged_count;
  double prepare_ms;
  double make_ms;
  double post_ms;
  double transfer_ms;
};

using Bytes = std::vector<uint8_t>;

struct Event {
  enum class Kind : int {
    settled = 0,       // the command of this ticket succeeded with `value`, or failed
    done = 1,          // the transfer of this ticket succeeded with a TransferOutcome, and is released; or it failed
    released = 2,      // NIXL touches the memory of this ticket's transfer no more, which did not succeed
    notification = 3,  // `from` sent `value`; no ticket
  };

  Kind kind;
  uint64_t ticket = 0;
  std::optional<Failure> failure;
  std::variant<std::monostate, double, std::string, Bytes, std::vector<std::string>, TransferOutcome> value;
  std::string from;
};

inline Event settled(uint64_t ticket) {
  return {.kind = Event::Kind::settled, .ticket = ticket, .failure = {}, .value = {}, .from = {}};
}

inline Event failed(Event::Kind kind, uint64_t ticket, Failure failure) {
  return {.kind = kind, .ticket = ticket, .failure = std::move(failure), .value = {}, .from = {}};
}

}  // namespace kv::nixl
