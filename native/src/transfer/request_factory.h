#pragma once

#include <map>

#include "transfer/slicer.h"
#include "transfer/transfer_request.h"

namespace kv::nixl {

// Makes NIXL's prepared lists, and requests by indices into them or by extents. Lives on the
// agent's thread.
class RequestFactory {
 public:
  explicit RequestFactory(Agent agent) : agent_(agent) {}

  // `add_each_descriptor` or `add_row_spans`.
  using AddRows = void (*)(XferDlist, const vector<Row>&);
  // Empty when NIXL refuses; `status` says why. Throws KV_LIST_INVALID.
  PreparedHandle prepare(const PreparedList& list, AddRows add, Status& status) {
    const auto descriptors =
        nixl::make<OwnedXferList>("KV_LIST_INVALID", "NIXL could not create a descriptor list",
                                  capi::create_xfer_dlist, list.type);
    add(descriptors.get(), list.layout.rows());
    capi::PreparedDlist made = nullptr;
    status = capi::prep_xfer_dlist(agent_, list.remote ? list.remote->c_str() : capi::kSelf,
                                   descriptors.get(), &made, nullptr);
    return PreparedHandle(status == kSuccess ? made : nullptr, {agent_});
  }
  // Prepares both lists for requests of `descriptors` by index. Returns whether that is possible
  // and worth it.
  bool prepare_indices(const Moves& moves, uint64_t descriptors) {
    for (const auto& list : {moves.local, moves.remote}) {
      if (list->indexed) continue;
      if (list->layout.count() > kSmallList && descriptors <= kFewDescriptors) return false;
      Status status = kSuccess;
      if (list->layout.count() <= kMaxIndexed)
        list->indexed = prepare(*list, add_each_descriptor, status);
      if (!list->indexed) return false;
    }
    return true;
  }
  // The caller owns the request. Uses `slice.indices`. Null when NIXL refuses; `status` says why.
  // NIXL takes 1.4 ns per index and 33 ns per descriptor left after merging, or 48 ns per extent.
  Request make(const Moves& moves, Slice& slice, Status& status) {
    if (slice.local_ids != nullptr)
      return make_by_index(moves, slice.local_ids, slice.remote_ids, slice.descriptors, status);
    const bool scattered = slice.descriptors < kMinDescriptorsPerExtent * slice.extents.size();
    if (scattered && !slice.splits_descriptor && prepare_indices(moves, slice.descriptors)) {
      IndexBuffer& indices = slice.indices;
      indices.clear();
      for (const Run& run : slice.runs) indices.add(run);
      const auto request =
          make_by_index(moves, indices.local(), indices.remote(), indices.count(), status);
      if (request != nullptr) return request;
    }
    return make_by_extent(moves, slice, status);
  }
  // Its memory is reused from request to request.
  Slice& scratch_slice() { return slice_; }

 private:
  // Larger lists have requests by extent only: preparing so many descriptors for indices takes 30
  // ms and 80 MB.
  static constexpr uint32_t kMaxIndexed = 1'048'576;
  // Preparing a larger list takes over 0.1 ms, too long for so few descriptors.
  static constexpr uint32_t kSmallList = 4096;
  static constexpr uint64_t kFewDescriptors = 16;

  Request make_by_index(const Moves& moves, const int32_t* local_ids, const int32_t* remote_ids,
                        size_t count, Status& status) {
    Request request = nullptr;
    status =
        capi::make_xfer_req(agent_, moves.operation, moves.local->indexed.get(), local_ids, count,
                            moves.remote->indexed.get(), remote_ids, count, &request, nullptr);
    return status == kSuccess ? request : nullptr;
  }
  Request make_by_extent(const Moves& moves, const Slice& slice, Status& status) {
    const auto empty_list = [](auto& lists, MemoryType type) {
      auto& list = lists[type];
      if (list)
        check(capi::xfer_dlist_clear(list.get()), "KV_INTERNAL",
              "NIXL could not clear a descriptor list");
      else
        list = nixl::make<OwnedXferList>("KV_INTERNAL", "NIXL could not create a descriptor list",
                                         capi::create_xfer_dlist, type);
      return list.get();
    };
    const XferDlist here = empty_list(local_extents_, moves.local->type);
    const XferDlist there = empty_list(remote_extents_, moves.remote->type);
    for (const Extent& extent : slice.extents) {
      add_descriptor(here, extent.local, extent.length, extent.local_device);
      add_descriptor(there, extent.remote, extent.length, extent.remote_device);
    }
    Request request = nullptr;
    status = capi::create_xfer_req(agent_, moves.operation, here, there, moves.peer().c_str(),
                                   &request, nullptr);
    return status == kSuccess ? request : nullptr;
  }

  Agent agent_;
  // Reused, since allocation is most of a request's cost.
  std::map<MemoryType, OwnedXferList> local_extents_;
  std::map<MemoryType, OwnedXferList> remote_extents_;
  Slice slice_;
};

}  // namespace kv::nixl
