#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "library/failure.h"
#include "library/nixl_capi.h"

namespace kv::nixl {

class LibfabricSafeguards;

// A failure of one transfer that may belong to another peer. LIBFABRIC keeps its errors in one
// queue and returns them from the next call, for any peer. If the transfer's own peer is alive and
// another peer died, the transfer is restarted, once a one-byte READ has shown that nothing of it
// is still under way. Lives on the agent's thread.
class AmbiguousFailure {
 public:
  // What the transfer has to do next.
  enum class Step {
    wait,     // nothing yet
    probe,    // post a landing probe
    restart,  // another peer died: begin again with the first slice
    fail,     // the failure is the transfer's own
    release,  // nothing is under way any more: release the requests
  };

  // Both arguments outlive it. `peer`: the transfer's peer.
  AmbiguousFailure(LibfabricSafeguards& safeguards, const std::string& peer) : safeguards_(safeguards), peer_(peer) {}

  // Records the failure of `request` (null is allowed) if it may be another peer's; keeps the
  // request then. Returns false if it is the transfer's own. While a failure is recorded, the
  // transfer posts nothing but probes.
  bool record(capi::Request request, const Failure& failure);
  // Whether a failure is recorded.
  bool pending() const { return failure_.has_value(); }
  // The next step, when no request of the transfer is in flight. `outcome_closed`: the transfer is
  // not to be restarted.
  Step next_step(bool outcome_closed);
  // A probe was posted: its READ comes after everything that was posted before.
  void probe_posted() { probing_ = true; }
  // Whether the last request that was posted is a probe.
  bool probing() const { return probing_; }
  // A request that was in flight has succeeded.
  void request_succeeded() { probe_succeeded_ = probe_succeeded_ || probing_; }
  // The recorded failure.
  const Failure& failure() const { return *failure_; }
  // Forgets the failure. Returns the requests that were kept, none of which is under way any more.
  std::vector<capi::Request> clear();

 private:
  using Clock = std::chrono::steady_clock;

  LibfabricSafeguards& safeguards_;
  const std::string& peer_;
  std::optional<Failure> failure_;
  std::vector<capi::Request> requests_;
  Clock::time_point failed_at_;
  bool probing_ = false;
  bool probe_succeeded_ = false;
  int errors_ = 0;
};

}  // namespace kv::nixl
