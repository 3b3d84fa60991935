#pragma once

#include <algorithm>

#include "agent/nixl_agent.h"
#include "libfabric/bounded_calls.h"
#include "libfabric/safeguards.h"
#include "node/js_event_queue.h"
#include "transfer/slice_poster.h"

namespace kv::nixl {

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
  Transfer(NixlAgent& agent, EventSender& events, shared_ptr<TransferRequest> request)
      : agent_(agent),
        events_(events),
        request_(std::move(request)),
        moves_(*request_->moves),
        peer_(moves_.peer()),
        safeguards_(agent.safeguards),
        counters_(agent.counters),
        poster_(agent, *request_),
        requests_(agent.handle()),
        failure_(safeguards_, peer_) {}
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Looks after requests, then posts a slice if `may_post`. Returns whether anything changed.
  bool advance(bool may_post) {
    if (!outcome_closed_ && safeguards_.known_dead(peer_)) fail(peer_gone());
    bool changed = poll_requests();
    notice_abort();
    if (state_ == State::resolving_failure && requests_.in_flight_count() == 0) resolve_failure();
    if (may_post && wants_to_post()) {
      post_slice();
      changed = true;
    }
    // A copy may be complete when its last post returns.
    if (state_ == State::posting && (outcome_closed_ || poster_.done())) state_ = State::draining;
    if (state_ == State::draining && idle() && must_confirm_landing()) {
      state_ = State::confirming_landing;
      post_landing_probe();
      changed = true;
    }
    if (state_ == State::posting || !idle()) return changed;
    finish();
    return true;
  }
  bool wants_to_post() const {
    return state_ == State::posting && !outcome_closed_ && !poster_.done() &&
           requests_.in_flight_count() < kMaxInFlight;
  }
  // Posts and reports nothing more, since the environment has ended.
  void abandon() { close_as_failed(); }
  // Fails and has NIXL cancel what is in flight, since the agent ends.
  void cancel(Failure failure) {
    fail(std::move(failure));
    requests_.cancel_in_flight();
    release_kept_requests();
    requests_.release_ended();
  }

  // Requests are in flight or not released, or it waits for something.
  bool under_way() const { return state_ != State::posting || requests_.count() > 0; }
  // Everything was reported and released.
  bool finished() const { return state_ == State::finished; }
  uint64_t ticket() const { return request_->ticket; }
  const TransferRequest& request() const { return *request_; }

 private:
  // Slices of one transfer in flight, where posts only start the copy.
  static constexpr size_t kMaxInFlight = 32;

  enum class State {
    posting,             // slices are left to post
    draining,            // all slices are posted; requests are in flight or not released
    confirming_landing,  // a READ of one byte shows that a WRITE has landed
    resolving_failure,   // a failure may be another peer's
    releasing,           // nothing is in flight; some requests are not released
    finished,
  };

  bool poll_requests() {
    const size_t before = requests_.count();
    requests_.poll([this] { return safeguards_.quarantine_over(peer_); },
                   [this](Request request, Status status) {
                     request_ended(request, status, " failed on the way: ");
                   });
    requests_.release_ended();
    return requests_.count() != before;
  }
  void notice_abort() {
    if (outcome_closed_ || !request_->outcome.aborted()) return;
    outcome_closed_ = true;
    ++counters_.transfers_failed;
  }
  void post_slice() {
    // Without memory the slice is not posted, since nothing is allocated after a post.
    const auto failure = failure_of([&] {
      requests_.make_room();
      if (moves_.remote->dropped) {
        throw Failure(
            "KV_TRANSFER_FAILED",
            moves_.describe() +
                " cannot continue: that agent no longer has the memory, or NIXL has dropped what it knew of that agent",
            "add the peer and prepare its lists again");
      }
      if (safeguards_.is_dead(peer_)) throw peer_gone();
      const auto [request, status, unanswered] = poster_.post_next();
      if (status == kInProgress)
        requests_.add_in_flight(request);
      else
        request_ended(request, status, " failed: ", unanswered);
    });
    if (failure) fail(*failure);
    // At once: the next request is made a fifth faster in this one's memory.
    requests_.release_ended();
  }
  // The peer must not reuse memory until a WRITE has landed, even after an abort.
  bool must_confirm_landing() const {
    return poster_.begun() && moves_.remote->probe && moves_.operation == Operation::write;
  }
  void post_landing_probe() {
    if (moves_.remote->dropped || safeguards_.is_dead(peer_)) return fail(peer_gone());
    requests_.make_room();
    const Request request = safeguards_.make_probe(*moves_.remote);
    const BoundedCalls bounded(safeguards_.watch_of(peer_));
    const Status status = request == nullptr
                              ? capi::kBackendError
                              : capi::post_xfer_req(agent_.handle(), request, nullptr);
    if (status == kInProgress) return requests_.add_in_flight(request);
    request_ended(request, status,
                  " was posted, but whether it landed is unknown: ", bounded.gave_up());
    requests_.release_ended();
  }
  void resolve_failure() {
    using Step = AmbiguousFailure::Step;
    const Step step = failure_.next_step(outcome_closed_);
    if (step == Step::wait) return;
    if (step == Step::probe && moves_.remote->probe && !moves_.remote->dropped) {
      failure_.probe_posted();
      return post_landing_probe();
    }
    if (step != Step::restart) fail(failure_.failure());
    release_kept_requests();
    requests_.release_ended();
    if (step == Step::restart) poster_.restart();
    state_ = step == Step::restart ? State::posting : State::releasing;
  }
  // Takes over an ended request; null if it could not be made. `problem` joins transfer and status
  // in the message. `unanswered`: the live peer let no connection be made, so the failure is no
  // other peer's, and nothing is under way.
  void request_ended(Request request, Status status, const char* problem, bool unanswered = false) {
    if (status == kSuccess) {
      failure_.request_succeeded();
      return return_request(request);
    }
    Failure failure("KV_TRANSFER_FAILED", moves_.describe() + problem + describe(status),
                    "the peer may have ended; NIXL's own log on stderr says more");
    if (unanswered) {
      failure.message =
          moves_.describe() + " failed: the peer's process is alive, and did not answer in time";
      failure.hint = "it may be stopped or overloaded; try again later";
    } else if (failure_.record(request, failure)) {
      state_ = State::resolving_failure;
      return;
    }
    const bool resolving = state_ == State::resolving_failure;
    const bool was_probe = state_ == State::confirming_landing || (resolving && failure_.probing());
    if (request != nullptr) discard_request(request);
    release_kept_requests();
    fail(std::move(failure));
    if (was_probe)
      state_ = State::releasing;
    else if (resolving)
      state_ = State::draining;
  }
  // A prepared transfer keeps a successful request for its next post.
  void return_request(Request request) {
    const bool is_probe = state_ == State::confirming_landing || state_ == State::resolving_failure;
    if (agent_.captures_telemetry && !is_probe) poster_.add_telemetry(request);
    if (request_->prepared == nullptr || !request_->prepared->give_back(request))
      requests_.add_ended(request);
  }
  void discard_request(Request request) {
    if (request_->prepared != nullptr) request_->prepared->forget(request);
    requests_.add_ended(request);
  }
  void release_kept_requests() {
    for (const Request request : failure_.clear()) discard_request(request);
  }
  void fail(Failure failure) {
    if (close_as_failed())
      events_.send(Event::failed(Event::Kind::done, ticket(), std::move(failure)));
  }
  // False after an abort: nothing is reported.
  bool close_as_failed() {
    if (outcome_closed_) return false;
    outcome_closed_ = true;
    ++counters_.transfers_failed;
    return request_->outcome.try_settle();
  }
  void finish() {
    state_ = State::finished;
    // Counters change before JavaScript hears of the outcome.
    --counters_.transfers_in_flight;
    const bool succeeded = !outcome_closed_ && report_success();
    if (!succeeded) events_.send(Event::released(ticket()));
  }
  // Returns false after a failure or an abort.
  bool report_success() {
    outcome_closed_ = true;
    // No abort is possible from here on, so the notification may leave.
    if (!request_->outcome.try_settle()) {
      ++counters_.transfers_failed;
      return false;
    }
    agent_.peers.mark_connected(peer_);
    try {
      if (poster_.sends_notification())
        ++counters_.notifications_sent;
      else if (request_->notification)
        agent_.peers.notify(peer_, *request_->notification);
    } catch (const Failure& failure) {
      ++counters_.transfers_failed;
      events_.send(Event::failed(Event::Kind::done, ticket(), failure));
      return false;
    }
    ++counters_.transfers_done;
    counters_.bytes_transferred += moves_.selection.bytes();
    events_.send({.kind = Event::Kind::done, .ticket = ticket(), .value = poster_.outcome()});
    return true;
  }
  bool idle() const { return requests_.empty() && state_ != State::resolving_failure; }
  Failure peer_gone() const {
    return Failure("KV_TRANSFER_FAILED", moves_.describe() + " failed: the peer's process is gone",
                   "if it was restarted, add it again with its new metadata");
  }

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
