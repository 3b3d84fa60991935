#pragma once

#include "libfabric/peer_liveness.h"

namespace kv::nixl {

// While one exists, this thread's LIBFABRIC posts and sends end, although NIXL 1.5.0 repeats them
// as long as libfabric cannot connect to the peer. NIXL's wait for a new peer's greeting, up to a
// minute, ends too. Calls fail once the peer's process is gone, or lets no connection be made for a
// time.
// `peer` must outlive it; null leaves calls alone. Only for the tcp provider: EFA asks to try again
// while its queue is full.
class BoundedCalls {
 public:
  explicit BoundedCalls(PeerLiveness* peer);
  ~BoundedCalls();
  BoundedCalls(const BoundedCalls&) = delete;
  BoundedCalls& operator=(const BoundedCalls&) = delete;

  // Wraps libfabric objects that NIXL's LIBFABRIC plugin makes from now on. Call it between loading
  // the plugin and creating a backend. The repair `libfabric_endless_calls` says whether it took
  // hold.
  static void install();

  // Whether a call ended because the peer let no connection be made.
  bool gave_up() const { return gave_up_; }
  // Whether the call that libfabric asks to repeat must end.
  bool over();

 private:
  PeerLiveness* const peer_;
  BoundedCalls* const outer_;
  // When libfabric last asked to try again, and when the present run began.
  Clock::time_point asked_;
  Clock::time_point since_;
  Clock::time_point checked_;
  Clock::time_point asked_again_;
  bool gave_up_ = false;
};

}  // namespace kv::nixl
