#include "libfabric/ambiguous_failure.h"

#include <utility>

#include "libfabric/safeguards.h"

namespace kv::nixl {

namespace {

// Errors that one transfer attributes to other peers. A death gives one error to the first call on
// each connection, and rarely more.
constexpr int kMaxErrors = 16;
// A death explains an error if it was noticed up to 5 s before it or up to 500 ms after it: the
// kernel ends a process's connections one after another.
constexpr auto kDeathBefore = std::chrono::seconds(5);
constexpr auto kDeathAfter = std::chrono::milliseconds(500);

}  // namespace

bool AmbiguousFailure::record(capi::Request request, const Failure& failure) {
  if (errors_ >= kMaxErrors || !safeguards_.error_may_be_anothers(peer_)) return false;
  ++errors_;
  if (!failure_) {
    failed_at_ = Clock::now();
    failure_ = failure;
  }
  if (request != nullptr) requests_.push_back(request);
  probing_ = false;
  return true;
}

AmbiguousFailure::Step AmbiguousFailure::next_step(bool outcome_closed) {
  if (safeguards_.is_dead(peer_)) return safeguards_.quarantine_over(peer_) ? Step::release : Step::wait;
  if (!probe_succeeded_) return Step::probe;
  if (outcome_closed) return Step::release;
  if (safeguards_.any_death_after(failed_at_ - kDeathBefore)) return Step::restart;
  return Clock::now() - failed_at_ < kDeathAfter ? Step::wait : Step::fail;
}

std::vector<capi::Request> AmbiguousFailure::clear() {
  failure_.reset();
  probing_ = false;
  probe_succeeded_ = false;
  return std::exchange(requests_, {});
}

}  // namespace kv::nixl
