#pragma once

#include <cstdint>
#include <memory>

#include "library/failure.h"
#include "library/nixl_capi.h"
#include "libfabric/ambiguous_failure.h"
#include "request/request_tracker.h"
#include "transfer/slice_poster.h"
#include "transfer/transfer_request.h"

namespace kv::nixl {

class EventSender;
class NixlAgent;

// One transfer, from its first slice to the release of its last NIXL request. Sends JavaScript
// `done` with the outcome, or `done` with a failure and later `released`, or `released` alone after
// an abort. Used by the thread that has the agent's turn.
class Transfer {
 public:
  // The agent and the sender outlive it.
  Transfer(NixlAgent& agent, EventSender& events, std::shared_ptr<TransferRequest> request);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Looks after the requests in flight, then posts one slice if `may_post`. Returns whether
  // anything changed.
  bool advance(bool may_post);
  // Whether a slice can be posted now.
  bool wants_to_post() const;
  // Posts no more slices and reports nothing more, since the environment has ended.
  void abandon();
  // Fails the transfer and has NIXL cancel what is in flight, since the agent ends.
  void cancel(Failure failure);

  // Whether it must be looked after although it posts nothing: requests are in flight or not
  // released, or it waits for something.
  bool under_way() const { return state_ != State::posting || requests_.count() > 0; }
  // Whether everything was reported and released.
  bool finished() const { return state_ == State::finished; }
  // The number by which JavaScript knows it.
  uint64_t ticket() const { return request_->ticket; }
  // What the caller asked for.
  const TransferRequest& request() const { return *request_; }

 private:
  enum class State {
    posting,             // slices are left to post
    draining,            // no more slices are posted; their requests are in flight or not yet released
    confirming_landing,  // a READ of one byte shows that a WRITE has landed
    resolving_failure,   // a failure may be another peer's, see AmbiguousFailure
    releasing,           // nothing is in flight; NIXL has not yet released every request
    finished,
  };

  bool poll_requests();
  void notice_abort();
  void post_slice();
  bool must_confirm_landing() const;
  void post_landing_probe();
  void resolve_failure();
  void request_ended(capi::Request request, capi::Status status, const char* problem, bool unanswered = false);
  void return_request(capi::Request request);
  void discard_request(capi::Request request);
  void release_kept_requests();
  void fail(Failure failure);
  bool close_as_failed();
  void finish();
  bool report_success();
  bool idle() const { return requests_.empty() && state_ != State::resolving_failure; }
  Failure peer_gone() const;

  NixlAgent& agent_;
  EventSender& events_;
  const std::shared_ptr<TransferRequest> request_;
  SlicePoster poster_;
  RequestTracker requests_;
  AmbiguousFailure failure_;
  State state_ = State::posting;
  // The outcome was reported, or the caller has aborted: no slice is posted any more, and only
  // `released` is still to be sent.
  bool outcome_closed_ = false;
};

}  // namespace kv::nixl
