#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "events/event.h"
#include "library/nixl_capi.h"
#include "transfer/slicer.h"
#include "transfer/transfer_request.h"

namespace kv::nixl {

class NixlAgent;

// Posts one transfer slice by slice, each as one NIXL request, and measures the time it takes.
// Lives on the agent's thread.
class SlicePoster {
 public:
  // Both arguments outlive it.
  SlicePoster(NixlAgent& agent, const TransferRequest& request);

  // Whether every slice was posted.
  bool done() const { return prepared() == nullptr ? slicer_.done() : begun_ && next_prepared_ == prepared()->count(); }
  // Whether a request was made since the beginning or the last `restart`.
  bool begun() const { return begun_; }
  // Whether NIXL sends the notification with the only request. Otherwise it has to be sent once all
  // slices are done.
  bool sends_notification() const { return sends_notification_; }

  // A request that was posted, and NIXL's status of the post. The caller owns the request.
  struct Posted {
    capi::Request request;
    capi::Status status;
    // The peer is alive, and did not let a connection be made.
    bool unanswered;
  };
  // Posts the next slice. Throws KV_TRANSFER_FAILED or KV_NOTIFICATION_FAILED when NIXL refuses to
  // make the request; no request is left then.
  Posted post_next();
  // Begins again with the first slice.
  void restart();

  // Adds what NIXL has measured of a request that has succeeded.
  void add_telemetry(capi::Request request);
  // The outcome of a transfer that has succeeded now.
  TransferOutcome outcome() const;

 private:
  using Clock = std::chrono::steady_clock;

  PreparedTransfer* prepared() const { return request_.prepared.get(); }
  void begin();
  capi::Request next_request();

  NixlAgent& agent_;
  const TransferRequest& request_;
  Slicer slicer_;
  bool begun_ = false;
  bool sends_notification_ = false;
  uint64_t merged_ = 0;
  // The next request of a prepared transfer.
  size_t next_prepared_ = 0;

  std::optional<Clock::time_point> first_post_;
  // Time until the first post since the caller asked, and the time to make each later request.
  Clock::duration preparing_{};
  // Time to make the first request.
  Clock::duration making_{};
  // Time inside NIXL's post.
  Clock::duration posting_{};
  std::optional<NixlTelemetry> telemetry_;
  // When NIXL began with the first request, and ended with the last, in microseconds.
  uint64_t telemetry_from_ = 0;
  uint64_t telemetry_until_ = 0;
};

}  // namespace kv::nixl
