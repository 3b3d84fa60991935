#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "events/event.h"
#include "library/nixl_capi.h"
#include "memory/prepared_list.h"
#include "request/prepared_transfer.h"
#include "transfer/transfer_selection.h"

namespace kv::nixl {

// Decides between the caller of a transfer, who may abort it, and the agent's thread, which reports
// its outcome: whoever comes first wins. Used on both threads.
class OutcomeLatch {
 public:
  // On the JavaScript thread. Returns false if the outcome is settled, and on its way to the
  // caller.
  bool try_abort() { return try_set(State::aborted); }
  // On the agent's thread. Returns false if the caller has aborted.
  bool try_settle() { return try_set(State::settled); }
  // Whether the caller has aborted.
  bool aborted() const { return state_.load() == State::aborted; }

 private:
  enum class State : int { open, aborted, settled };

  bool try_set(State wanted) {
    State expected = State::open;
    return state_.compare_exchange_strong(expected, wanted);
  }

  std::atomic<State> state_{State::open};
};

// What a caller asked to transfer.
struct TransferRequest {
  // The number by which JavaScript knows the transfer.
  uint64_t ticket = 0;
  capi::Operation operation = capi::Operation::read;
  std::shared_ptr<PreparedList> local;
  std::shared_ptr<PreparedList> remote;
  std::shared_ptr<const TransferSelection> selection;
  // The requests to post, where they were made before; null otherwise.
  std::shared_ptr<PreparedTransfer> prepared;
  // Sent to the peer once all bytes have landed.
  std::optional<Bytes> notification;
  // The caller may abort. The notification must not leave before the outcome is certain then, so it
  // cannot be sent with the data.
  bool abortable = false;
  // When the caller asked, for the timings of the outcome.
  std::chrono::steady_clock::time_point asked_at;

  OutcomeLatch outcome;

  // The peer, or this agent's own name for a transfer with storage.
  const std::string& peer() const { return *remote->remote; }
  // For error messages, such as `READ of 4 descriptors (65536 bytes) from agent "p0"`.
  std::string describe() const {
    const bool reads = operation == capi::Operation::read;
    return std::string(reads ? "READ" : "WRITE") + " of " + std::to_string(selection->count()) + " descriptors (" +
           std::to_string(selection->bytes()) + " bytes) " + (reads ? "from" : "to") + " agent \"" + peer() + "\"";
  }
};

}  // namespace kv::nixl
