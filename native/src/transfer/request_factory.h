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
  PreparedHandle prepare(const PreparedList& list, AddRows add, Status& status);
  // Prepares both lists for requests of `descriptors` by index. Returns whether that is possible
  // and worth it.
  bool prepare_indices(const Moves& moves, uint64_t descriptors);
  // The caller owns the request. Uses `slice.indices`. Null when NIXL refuses; `status` says why.
  Request make(const Moves& moves, Slice& slice, Status& status);
  // Its memory is reused from request to request.
  Slice& scratch_slice() { return slice_; }

 private:
  Request make_by_index(const Moves& moves, const int32_t* local_ids, const int32_t* remote_ids, size_t count, Status& status);
  Request make_by_extent(const Moves& moves, const Slice& slice, Status& status);

  Agent agent_;
  // Reused, since allocation is most of a request's cost.
  std::map<MemoryType, OwnedXferList> local_extents_;
  std::map<MemoryType, OwnedXferList> remote_extents_;
  Slice slice_;
};

}  // namespace kv::nixl
