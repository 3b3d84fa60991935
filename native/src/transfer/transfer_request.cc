#include "transfer/transfer_request.h"

#include <algorithm>

#include "agent/nixl_agent.h"

namespace kv::nixl {

string Moves::describe() const {
  const bool reads = operation == Operation::read;
  return string(reads ? "READ" : "WRITE") + " of " + to_string(selection.count()) +
         " descriptors (" + to_string(selection.bytes()) + " bytes) " + (reads ? "from" : "to") +
         " agent \"" + peer() + "\"";
}

void PreparedTransfer::make(NixlAgent& agent) {
  release(agent);
  Slicer slicer(moves->selection, *moves->local, *moves->remote);
  agent.start_slicing(slicer, *moves);
  while (!slicer.done()) {
    Slice& slice = agent.requests.scratch_slice();
    slicer.next(slice);
    Status status = kSuccess;
    requests_.push_back(nullptr);
    requests_.back() = agent.requests.make(*moves, slice, status);
    if (requests_.back() == nullptr) {
      release(agent);
      throw Failure("KV_TRANSFER_FAILED",
                    string("NIXL refused to make a request of the prepared transfer: ") +
                        nixl::describe(status));
    }
    merged_ += slice.merged;
  }
  // Reserves memory, since a post must not allocate.
  handed_out_.reserve(requests_.size());
}

bool PreparedTransfer::complete() const {
  return !requests_.empty() && std::ranges::count(requests_, nullptr) == 0;
}

string PreparedTransfer::backend(NixlAgent& agent) const {
  if (users > 0 || !complete() || moves->remote->dropped) {
    throw Failure(
        "KV_TRANSFER_INVALID",
        "the backend of a prepared transfer is not known while it is under way, or after it failed",
        "ask before the first post");
  }
  return agent.backends.of_request(requests_.front());
}

Request PreparedTransfer::take(size_t slice) {
  handed_out_[requests_[slice]] = slice;
  return std::exchange(requests_[slice], nullptr);
}

bool PreparedTransfer::give_back(Request request) {
  const auto found = handed_out_.find(request);
  if (found == handed_out_.end()) return false;
  requests_[found->second] = request;
  handed_out_.erase(found);
  return true;
}

void PreparedTransfer::release(NixlAgent& agent) {
  for (const Request request : std::exchange(requests_, {})) {
    // Nothing is under way, so NIXL releases it at once.
    if (request != nullptr && capi::release_xfer_req(agent.handle(), request) == kSuccess)
      capi::destroy_xfer_req(request);
  }
  handed_out_.clear();
  merged_ = 0;
}

}  // namespace kv::nixl
