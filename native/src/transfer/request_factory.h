#pragma once

#include <map>
#include <vector>

#include "transfer/slicer.h"
#include "transfer/transfer_request.h"

namespace kv::nixl {

// Makes NIXL's prepared lists, and requests by indices into them or by extents. Lives on the
// agent's thread.
class RequestFactory {
 public:
  explicit RequestFactory(capi::Agent agent) : agent_(agent) {}

  // `add_each_descriptor` or `add_row_spans`.
  using AddRows = void (*)(capi::XferDlist, const std::vector<Row>&);
  // Empty when NIXL refuses; `status` says why. Throws KV_LIST_INVALID.
  PreparedHandle prepare(const PreparedList& list, AddRows add, capi::Status& status);
  // Prepares both lists for requests of `descriptors` by index. Returns whether that is possible
  // and worth it.
  bool prepare_indices(const Moves& moves, uint64_t descriptors);
  // The caller owns the request. Uses `slice.indices`. Null when NIXL refuses; `status` says why.
  capi::Request make(const Moves& moves, Slice& slice, capi::Status& status);
  // Its memory is reused from request to request.
  Slice& scratch_slice() { return slice_; }

 private:
  capi::Request make_by_index(const Moves& moves, const int32_t* local_ids, const int32_t* remote_ids, size_t count, capi::Status& status);
  capi::Request make_by_extent(const Moves& moves, const Slice& slice, capi::Status& status);

  capi::Agent agent_;
  // Reused, since allocation is most of a request's cost.
  std::map<capi::MemoryType, OwnedXferList> local_extents_;
  std::map<capi::MemoryType, OwnedXferList> remote_extents_;
  Slice slice_;
};

}  // namespace kv::nixl
