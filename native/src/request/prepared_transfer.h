#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "events/event.h"
#include "library/nixl_capi.h"
#include "memory/prepared_list.h"
#include "transfer/transfer_selection.h"

namespace kv::nixl {

class NixlAgent;

// A transfer whose NIXL requests are made once, one for each slice, and posted many times, once at
// a time. What it moves is immutable; the rest belongs to the agent's thread.
class PreparedTransfer {
 public:
  // No requests yet.
  PreparedTransfer(capi::Operation operation, std::shared_ptr<PreparedList> local, std::shared_ptr<PreparedList> remote,
                   TransferSelection selection)
      : operation(operation), local(std::move(local)), remote(std::move(remote)), selection(std::make_shared<TransferSelection>(std::move(selection))) {}

  const capi::Operation operation;
  const std::shared_ptr<PreparedList> local;
  const std::shared_ptr<PreparedList> remote;
  const std::shared_ptr<const TransferSelection> selection;

  // Makes all requests again, after releasing those that are left. Throws KV_TRANSFER_FAILED; no
  // request is left then.
  void make(NixlAgent& agent);
  // Whether every request is here. Those that failed were released.
  bool complete() const;
  // Requests, or the number of slices.
  size_t count() const { return requests_.size(); }
  // Descriptors that are left after merging, in all slices.
  uint64_t merged() const { return merged_; }
  // Hands out the request of a slice, to be posted. The caller owns it.
  capi::Request take(size_t slice);
  // Takes back a request that has succeeded; false for one that was not handed out.
  bool give_back(capi::Request request);
  // A request that was handed out has failed, and will not be given back.
  void forget(capi::Request request) { handed_out_.erase(request); }
  // What NIXL estimates for all requests together. Throws KV_TRANSFER_INVALID while requests are
  // handed out, and KV_TRANSFER_FAILED.
  CostEstimate estimate(NixlAgent& agent) const;
  // Releases the requests.
  void release(NixlAgent& agent);

  // A transfer of it was posted and is not released.
  bool under_way = false;
  // The ticket of a close that waits for that transfer.
  std::optional<uint64_t> close_ticket;

 private:
  // Null where the request is handed out, or failed.
  std::vector<capi::Request> requests_;
  std::unordered_map<capi::Request, size_t> handed_out_;
  uint64_t merged_ = 0;
};

}  // namespace kv::nixl
