// AmbiguousFailure over a transfer. A backend that keeps its errors in one queue gives them to whoever calls next: what failed is known, whose it
// was is not. Where the transfer's own peer lives and another one has died, the transfer is begun again, once a byte that was read
// after everything else has shown that nothing of it is under way. Lives on the agent's thread.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "library/failure.h"
#include "library/nixl_capi.h"
#include "peers/peers.h"

namespace kv::nixl {

class AmbiguousFailure {
 public:
  enum class Step { wait, probe, again, fail, release };

  // Whether the failure of `request` may be another's. It is kept then, with the request, and nothing more is posted but probes.
  bool keep(Peers& peers, const std::string& remote, capi::Request request, const Failure& failure);
  // Whether a failure is kept.
  bool any() const { return failure_.has_value(); }
  // What to do where nothing else of the transfer is under way.
  Step next(Peers& peers, const std::string& remote, bool over);
  // A probe was posted; what it reads comes after all that went before.
  void probing() { probing_ = true; }
  // What was posted has ended well.
  void landed() { settled_ = settled_ || probing_; }
  const Failure& failure() const { return *failure_; }
  // Ends the doubt. Answers the requests that it kept, of which nothing is under way any more.
  std::vector<capi::Request> clear();

 private:
  using Clock = std::chrono::steady_clock;

  std::optional<Failure> failure_;
  std::vector<capi::Request> requests_;
  Clock::time_point since_;
  bool probing_ = false;
  bool settled_ = false;
  int errors_ = 0;
};

}  // namespace kv::nixl
