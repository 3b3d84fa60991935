#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "library/nixl_capi.h"

namespace kv::nixl {

// Owns the NIXL requests of one transfer: those in flight, and those that have ended and are to be
// released. Lives on the agent's thread. A request that NIXL does not release before the agent ends
// is left to NIXL: destroying the agent ends it, and no call may name it afterwards.
class RequestTracker {
 public:
  // Both arguments outlive it.
  RequestTracker(const capi::Functions& nixl, capi::Agent agent) : nixl_(nixl), agent_(agent) {}

  // Takes over a request that was posted and has not ended.
  void add_in_flight(capi::Request request) { in_flight_.push_back(request); }
  // Takes over a request of which nothing is under way.
  void add_ended(capi::Request request) { ended_.push_back(request); }

  // Requests in flight.
  size_t in_flight_count() const { return in_flight_.size(); }
  // Requests in flight or not yet released.
  size_t count() const { return in_flight_.size() + ended_.size(); }
  // Whether every request was released.
  bool empty() const { return in_flight_.empty() && ended_.empty(); }

  // Asks NIXL about each request in flight. Calls `on_end(request, status)` for each that has
  // ended, with success or an error; the callback takes the request over. With `give_up()` true, a
  // request still in progress counts as ended.
  template <typename GiveUp, typename OnEnd>
  void poll(GiveUp give_up, OnEnd on_end) {
    for (size_t index = 0; index < in_flight_.size();) {
      const capi::Status status = nixl_.get_xfer_status(agent_, in_flight_[index]);
      if (status == capi::kInProgress && !give_up()) {
        ++index;
        continue;
      }
      const capi::Request request = in_flight_[index];
      in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(index));
      on_end(request, status);
    }
  }

  // Releases the requests that have ended. Those that NIXL still holds are kept for the next
  // attempt.
  void release_ended() {
    std::erase_if(ended_, [this](capi::Request request) {
      if (nixl_.release_xfer_req(agent_, request) != capi::kSuccess) return false;
      nixl_.destroy_xfer_req(request);
      return true;
    });
  }

  // Treats the requests in flight as ended: releasing one that is in progress cancels it, if NIXL
  // can.
  void cancel_in_flight() {
    for (const capi::Request request : std::exchange(in_flight_, {})) ended_.push_back(request);
  }

 private:
  const capi::Functions& nixl_;
  capi::Agent agent_;
  std::vector<capi::Request> in_flight_;
  std::vector<capi::Request> ended_;
};

}  // namespace kv::nixl
