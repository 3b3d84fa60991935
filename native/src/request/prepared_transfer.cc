#include "request/prepared_transfer.h"

#include <algorithm>

#include "agent/nixl_agent.h"
#include "library/failure.h"
#include "transfer/slicer.h"

namespace kv::nixl {

void PreparedTransfer::make(NixlAgent& agent) {
  release(agent);
  Slicer slicer(*selection, *local, *remote);
  agent.start_slicing(slicer, *local, *remote);
  while (!slicer.done()) {
    Slice& slice = agent.requests().scratch_slice();
    slicer.next(slice);
    capi::Status status = capi::kSuccess;
    const capi::Request request = agent.requests().make(operation, *local, *remote, slice, status);
    if (request == nullptr) {
      release(agent);
      throw Failure("KV_TRANSFER_FAILED", std::string("NIXL refused to make a request of the prepared transfer: ") + nixl::describe(status));
    }
    requests_.push_back(request);
    merged_ += slice.merged;
  }
}

bool PreparedTransfer::complete() const { return !requests_.empty() && std::ranges::count(requests_, nullptr) == 0; }

capi::Request PreparedTransfer::take(size_t slice) {
  const capi::Request request = std::exchange(requests_[slice], nullptr);
  handed_out_[request] = slice;
  return request;
}

bool PreparedTransfer::give_back(capi::Request request) {
  const auto found = handed_out_.find(request);
  if (found == handed_out_.end()) return false;
  requests_[found->second] = request;
  handed_out_.erase(found);
  return true;
}

CostEstimate PreparedTransfer::estimate(NixlAgent& agent) const {
  if (under_way || !complete()) {
    throw Failure("KV_TRANSFER_INVALID", "the cost of a prepared transfer cannot be estimated while it is under way, or after it failed",
                  "estimate it before the first post");
  }
  if (remote->dropped) throw Failure("KV_TRANSFER_FAILED", "the peer of the prepared transfer was dropped", "prepare its lists again");
  CostEstimate sum{.duration_us = 0, .margin_us = 0, .known = true};
  for (const capi::Request request : requests_) {
    int64_t duration = 0;
    int64_t margin = 0;
    auto method = capi::CostMethod::unknown;
    check(agent.nixl().estimate_xfer_cost(agent.handle(), request, nullptr, &duration, &margin, &method), "KV_TRANSFER_FAILED",
          "the backend cannot estimate the cost of a transfer");
    sum.duration_us += static_cast<double>(duration);
    sum.margin_us += static_cast<double>(margin);
    sum.known = sum.known && method == capi::CostMethod::analytical;
  }
  return sum;
}

void PreparedTransfer::release(NixlAgent& agent) {
  for (const capi::Request request : std::exchange(requests_, {})) {
    // Nothing of it is under way, so NIXL releases it at once.
    if (request != nullptr && agent.nixl().release_xfer_req(agent.handle(), request) == capi::kSuccess) agent.nixl().destroy_xfer_req(request);
  }
  handed_out_.clear();
  merged_ = 0;
}

}  // namespace kv::nixl
