#include "libfabric/ambiguous_failure.h"

#include <utility>

namespace kv::nixl {

namespace {

// A transfer takes this many errors for another's. A death gives one to each connection's first caller, and rarely more.
constexpr int kMostErrors = 16;
// A death that is known for longer than this explains no error, and one that is found out later than this neither: the kernel ends
// a process's connections one after another.
constexpr auto kAfterDeath = std::chrono::seconds(5);
constexpr auto kBeforeDeath = std::chrono::milliseconds(500);

}  // namespace

bool AmbiguousFailure::keep(Peers& peers, const std::string& remote, capi::Request request, const Failure& failure) {
  if (errors_ >= kMostErrors || !peers.errors_of_anyone(remote)) return false;
  ++errors_;
  if (!failure_) since_ = Clock::now();
  if (!failure_) failure_ = failure;
  if (request != nullptr) requests_.push_back(request);
  probing_ = false;
  return true;
}

AmbiguousFailure::Step AmbiguousFailure::next(Peers& peers, const std::string& remote, bool over) {
  if (peers.lost(remote)) return peers.quiet(remote) ? Step::release : Step::wait;
  if (!settled_) return Step::probe;
  if (over) return Step::release;
  if (peers.somebody_died_after(since_ - kAfterDeath)) return Step::again;
  return Clock::now() - since_ < kBeforeDeath ? Step::wait : Step::fail;
}

std::vector<capi::Request> AmbiguousFailure::clear() {
  failure_.reset();
  probing_ = false;
  settled_ = false;
  return std::exchange(requests_, {});
}

}  // namespace kv::nixl
