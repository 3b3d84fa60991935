#pragma once

#include <algorithm>

#include "libfabric/safeguards.h"
#include "transfer/slice_poster.h"

namespace kv::nixl {

class EventSender;
class NixlAgent;

// Owns one transfer's NIXL requests: in flight, or ended and not released. Lives on the agent's
// thread. A request that NIXL does not release ends with the agent, and no call may name it then.
class RequestTracker {
 public:
  explicit RequestTracker(Agent agent) : agent_(agent) {}

  // Allocates beforehand: a posted request must not be lost for want of memory.
  void make_room() {
    in_flight_.reserve(in_flight_.size() + 1);
    ended_.reserve(count() + 1);
  }

  void add_in_flight(Request request) { in_flight_.push_back(request); }
  // Nothing of the request may be under way.
  void add_ended(Request request) { ended_.push_back(request); }

  size_t in_flight_count() const { return in_flight_.size(); }
  // In flight or not released.
  size_t count() const { return in_flight_.size() + ended_.size(); }
  bool empty() const { return in_flight_.empty() && ended_.empty(); }

  // Calls `on_end(request, status)`, which takes over an ended request. With `give_up()` true,
  // requests in progress count as ended.
  template <typename GiveUp, typename OnEnd>
  void poll(GiveUp give_up, OnEnd on_end) {
    for (size_t index = 0; index < in_flight_.size();) {
      const Status status = capi::get_xfer_status(agent_, in_flight_[index]);
      if (status == kInProgress && !give_up()) {
        ++index;
        continue;
      }
      const Request request = in_flight_[index];
      in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(index));
      on_end(request, status);
    }
  }

  // Keeps requests that NIXL still holds for the next attempt.
  void release_ended() {
    std::erase_if(ended_, [this](Request request) {
      if (capi::release_xfer_req(agent_, request) != kSuccess) return false;
      capi::destroy_xfer_req(request);
      return true;
    });
  }

  // Treats requests in flight as ended. Releasing them cancels them, if NIXL can.
  void cancel_in_flight() {
    for (const Request request : std::exchange(in_flight_, {})) ended_.push_back(request);
  }

 private:
  Agent agent_;
  vector<Request> in_flight_;
  vector<Request> ended_;
};

// From the first slice to the release of the last NIXL request. Sends JavaScript `done`; `done`
// with a failure and later `released`; or only `released` after an abort. For the thread that has
// the agent's turn.
class Transfer {
 public:
  // The agent and the sender must outlive it.
  Transfer(NixlAgent& agent, EventSender& events, shared_ptr<TransferRequest> request);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Looks after requests, then posts a slice if `may_post`. Returns whether anything changed.
  bool advance(bool may_post);
  bool wants_to_post() const;
  // Posts and reports nothing more, since the environment has ended.
  void abandon();
  // Fails and has NIXL cancel what is in flight, since the agent ends.
  void cancel(Failure failure);

  // Requests are in flight or not released, or it waits for something.
  bool under_way() const { return state_ != State::posting || requests_.count() > 0; }
  // Everything was reported and released.
  bool finished() const { return state_ == State::finished; }
  uint64_t ticket() const { return request_->ticket; }
  const TransferRequest& request() const { return *request_; }

 private:
  enum class State {
    posting,             // slices are left to post
    draining,            // all slices are posted; requests are in flight or not released
    confirming_landing,  // a READ of one byte shows that a WRITE has landed
    resolving_failure,   // a failure may be another peer's
    releasing,           // nothing is in flight; some requests are not released
    finished,
  };

  bool poll_requests();
  void notice_abort();
  void post_slice();
  bool must_confirm_landing() const;
  void post_landing_probe();
  void resolve_failure();
  void request_ended(Request request, Status status, const char* problem, bool unanswered = false);
  void return_request(Request request);
  void discard_request(Request request);
  void release_kept_requests();
  void fail(Failure failure);
  bool close_as_failed();
  void finish();
  bool report_success();
  bool idle() const { return requests_.empty() && state_ != State::resolving_failure; }
  Failure peer_gone() const;

  NixlAgent& agent_;
  EventSender& events_;
  const shared_ptr<TransferRequest> request_;
  const Moves& moves_;
  const string& peer_;
  LibfabricSafeguards& safeguards_;
  Counters& counters_;
  SlicePoster poster_;
  RequestTracker requests_;
  AmbiguousFailure failure_;
  State state_ = State::posting;
  // After the outcome or an abort: posts no slice, and sends only `released`.
  bool outcome_closed_ = false;
};

}  // namespace kv::nixl
