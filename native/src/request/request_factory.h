#pragma once

#include <map>
#include <vector>

#include "library/handle.h"
#include "library/nixl_capi.h"
#include "memory/prepared_list.h"
#include "transfer/slicer.h"

namespace kv::nixl {

// Makes NIXL's prepared lists and transfer requests. A request is made by indices into two prepared
// lists, or by extents. Lives on the agent's thread.
class RequestFactory {
 public:
  // Both arguments outlive it.
  RequestFactory(const capi::Functions& nixl, capi::Agent agent) : nixl_(nixl), agent_(agent) {}

  // Adds rows to a list of NIXL: `add_each_descriptor` or `add_row_spans`.
  using AddRows = void (*)(const capi::Functions&, capi::XferDlist, const std::vector<Row>&);
  // Prepares the list's rows with NIXL. Empty when NIXL refuses; `status` says why. Throws
  // KV_LIST_INVALID.
  PreparedHandle prepare(const PreparedList& list, AddRows add, capi::Status& status);
  // Prepares both lists for requests of `descriptors` by index, where that was not done yet.
  // Returns whether such requests are possible, and worth it: few descriptors of a large list are
  // not.
  bool prepare_indices(PreparedList& local, PreparedList& remote, uint64_t descriptors);
  // A request for one slice; the caller owns it. Uses `slice.indices`. Null when NIXL refuses;
  // `status` says why.
  capi::Request make(capi::Operation operation, PreparedList& local, PreparedList& remote, Slice& slice, capi::Status& status);
  // A slice for the next request. Its memory is reused from request to request.
  Slice& scratch_slice() { return slice_; }

 private:
  capi::Request make_by_index(capi::Operation operation, const PreparedList& local, const int32_t* local_ids, const PreparedList& remote,
                              const int32_t* remote_ids, size_t count, capi::Status& status);
  capi::Request make_by_extent(capi::Operation operation, const PreparedList& local, const PreparedList& remote, const Slice& slice,
                               capi::Status& status);

  const capi::Functions& nixl_;
  capi::Agent agent_;
  // Reused, since allocating their memory is most of what making a request costs.
  std::map<capi::MemoryType, Handle<capi::XferDlist>> local_extents_;
  std::map<capi::MemoryType, Handle<capi::XferDlist>> remote_extents_;
  Slice slice_;
};

}  // namespace kv::nixl
