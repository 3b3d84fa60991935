#pragma once

#include "events/event.h"
#include "memory/prepared_list.h"
#include "transfer/transfer_selection.h"

namespace kv::nixl {

class NixlAgent;

// Immutable once made.
struct Moves {
  Operation operation = Operation::read;
  shared_ptr<PreparedList> local;
  shared_ptr<PreparedList> remote;
  TransferSelection selection;

  // The agent's own name for storage.
  const string& peer() const { return *remote->remote; }
  // For error messages, such as `READ of 4 descriptors (65536 bytes) from agent "p0"`.
  string describe() const;
};

// NIXL requests, one per slice, that are made once and posted many times, by one user at a time.
// Belongs to the agent's thread.
class PreparedTransfer : public Closable {
 public:
  explicit PreparedTransfer(shared_ptr<const Moves> moves) : moves(std::move(moves)) {}

  const shared_ptr<const Moves> moves;

  // Makes all requests anew. Throws KV_TRANSFER_FAILED; no request is left then.
  void make(NixlAgent& agent);
  // Whether every request is here. Failed ones were released.
  bool complete() const;
  // One request per slice.
  size_t count() const { return requests_.size(); }
  // Descriptors left after merging.
  uint64_t merged() const { return merged_; }
  // Empty where NIXL does not say. Throws KV_TRANSFER_INVALID while it is posted, and after a post
  // has failed.
  string backend(NixlAgent& agent) const;
  // Hands out a slice's request. The caller owns it.
  Request take(size_t slice);
  // Takes back a successful request. False if it was not handed out.
  bool give_back(Request request);
  // A request that was handed out has failed.
  void forget(Request request) { handed_out_.erase(request); }
  void release(NixlAgent& agent);

 private:
  // Null for a request that is handed out, or failed.
  vector<Request> requests_;
  unordered_map<Request, size_t> handed_out_;
  uint64_t merged_ = 0;
};

// The first wins: the caller with an abort, or the agent's thread with an outcome. For both
// threads.
class OutcomeLatch {
 public:
  // On the JavaScript thread. False if the outcome is on its way.
  bool try_abort() { return try_set(State::aborted); }
  // On the agent's thread. False after an abort.
  bool try_settle() { return try_set(State::settled); }
  bool aborted() const { return state_.load() == State::aborted; }

 private:
  enum class State : int { open, aborted, settled };

  bool try_set(State wanted) {
    State expected = State::open;
    return state_.compare_exchange_strong(expected, wanted);
  }

  atomic<State> state_{State::open};
};

struct TransferRequest {
  uint64_t ticket = 0;
  shared_ptr<const Moves> moves;
  // Requests made before, or null.
  shared_ptr<PreparedTransfer> prepared;
  // Sent once all bytes have landed.
  optional<Bytes> notification;
  // The caller may abort, so the notification must await the outcome.
  bool abortable = false;
  // For the outcome's timings.
  Clock::time_point asked_at;

  OutcomeLatch outcome;
};

}  // namespace kv::nixl
