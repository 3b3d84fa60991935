#pragma once

#include "transfer/slicer.h"
#include "transfer/transfer_request.h"

namespace kv::nixl {

class NixlAgent;

// Posts a transfer slice by slice, one NIXL request each, and takes the time. Lives on the agent's
// thread.
class SlicePoster {
 public:
  // Both arguments must outlive it.
  SlicePoster(NixlAgent& agent, const TransferRequest& request);

  bool done() const { return prepared() == nullptr ? slicer_.done() : begun_ && next_prepared_ == prepared()->count(); }
  // Whether a request was made since the last `restart`.
  bool begun() const { return begun_; }
  // NIXL sends the notification with the only request. Otherwise it must be sent after all slices.
  bool sends_notification() const { return sends_notification_; }

  // The caller owns the request.
  struct Posted {
    Request request;
    Status status;
    // The live peer did not let a connection be made.
    bool unanswered;
  };
  // Throws KV_TRANSFER_FAILED or KV_NOTIFICATION_FAILED when NIXL refuses to make the request; none
  // is left then.
  Posted post_next();
  void restart();

  // Adds NIXL's measurements of a request that has succeeded.
  void add_telemetry(Request request);
  // The numbers of NativeOutcome for a transfer that has just succeeded.
  vector<double> outcome() const;

 private:
  PreparedTransfer* prepared() const { return request_.prepared.get(); }
  void begin();
  Request next_request();

  NixlAgent& agent_;
  const TransferRequest& request_;
  const Moves& moves_;
  Slicer slicer_;
  bool begun_ = false;
  bool sends_notification_ = false;
  uint64_t merged_ = 0;
  size_t next_prepared_ = 0;

  optional<Clock::time_point> first_post_;
  // From the call to the first post, plus the making of later requests.
  Clock::duration preparing_{};
  // For the first request.
  Clock::duration making_{};
  // Inside NIXL's post.
  Clock::duration posting_{};
  // The last numbers of NativeOutcome, or empty.
  vector<double> telemetry_;
  // From the first request's beginning to the last one's end, in microseconds.
  uint64_t telemetry_from_ = 0;
  uint64_t telemetry_until_ = 0;
};

}  // namespace kv::nixl
