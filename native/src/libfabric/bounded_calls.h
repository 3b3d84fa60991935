#pragma once

#include <chrono>

#include "libfabric/peer_liveness.h"

namespace kv::nixl {

// While one exists, posts and sends of LIBFABRIC on this thread end although libfabric keeps asking
// to try again: NIXL 1.5.0 does so for ever, and libfabric asks for it as long as its connection to
// the peer cannot be made. So does NIXL's wait for a new peer's greeting, which reads an empty
// queue for a minute. They fail once the peer's process is gone, or has not let the connection be
// made for a time. `peer` outlives it; null leaves the calls alone. For the tcp provider only: EFA
// asks to try again while its queue is full.
class BoundedCalls {
 public:
  explicit BoundedCalls(PeerLiveness* peer);
  ~BoundedCalls();
  BoundedCalls(const BoundedCalls&) = delete;
  BoundedCalls& operator=(const BoundedCalls&) = delete;

  // Wraps the objects that NIXL's LIBFABRIC plugin makes of libfabric from now on. Call it when the
  // plugin is loaded, before a backend of it is created. Where libfabric or its `fi_fabric` is not
  // found by name, calls stay without a limit.
  static void install();

  // Whether a call was ended because the peer did not let a connection be made.
  bool gave_up() const { return gave_up_; }
  // Whether the present call, which libfabric asks to make again, is to end.
  bool over();

 private:
  using Clock = std::chrono::steady_clock;

  PeerLiveness* const peer_;
  BoundedCalls* const outer_;
  // The last time that libfabric asked to try again, and the first of those that follow each other.
  Clock::time_point asked_;
  Clock::time_point since_;
  Clock::time_point checked_;
  Clock::time_point asked_again_;
  bool gave_up_ = false;
};

}  // namespace kv::nixl
