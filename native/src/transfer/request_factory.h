// How NIXL is told what to move: by the indices of two lists, or by whole extents. Lives on the agent's thread.
#pragma once

#include <map>
#include <vector>

#include "library/handle.h"
#include "memory/prepared_list.h"
#include "library/nixl_capi.h"
#include "transfer/slicer.h"

namespace kv::nixl {

class RequestFactory {
 public:
  // Both outlive it.
  RequestFactory(const capi::Functions& nixl, capi::Agent agent) : nixl_(nixl), agent_(agent) {}

  // NIXL's word for the list's rows, as `add` puts them; null when it refuses.
  using AddRows = void (*)(const capi::Functions&, capi::XferDlist, const std::vector<Row>&);
  capi::PreparedDlist prepare(const PreparedList& list, AddRows add, capi::Status& status);
  // Whether requests of these two can be made by index. NIXL is told each of their descriptors at the first one that wants it.
  bool indexed(PreparedList& local, PreparedList& remote);
  // A request of NIXL for one slice, whose room for indices it may use. Null when NIXL refuses it, with its word for why in `status`.
  capi::Request make(capi::Operation operation, PreparedList& local, PreparedList& remote, Slice& slice, capi::Status& status);
  // Room for one slice, for whoever makes the next request.
  Slice& slice() { return slice_; }

 private:
  capi::Request of_ids(capi::Operation operation, const PreparedList& local, const int32_t* local_ids, const PreparedList& remote,
                       const int32_t* remote_ids, size_t count, capi::Status& status);
  capi::Request by_index(capi::Operation operation, const PreparedList& local, const PreparedList& remote, Slice& slice, capi::Status& status);
  capi::Request of_extents(capi::Operation operation, PreparedList& local, PreparedList& remote, const Slice& slice, capi::Status& status);

  const capi::Functions& nixl_;
  capi::Agent agent_;
  // Used again for each request: their memory is what making one takes longest for.
  std::map<capi::MemoryType, Handle<capi::XferDlist>> local_extents_;
  std::map<capi::MemoryType, Handle<capi::XferDlist>> remote_extents_;
  Slice slice_;
};

}  // namespace kv::nixl
