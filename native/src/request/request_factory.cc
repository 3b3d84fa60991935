#include "request/request_factory.h"

#include <utility>

namespace kv::nixl {

namespace {

// Descriptors of a list that are prepared one by one for requests by index: 30 ms and 80 MB at
// most. Larger lists only have requests by extent.
constexpr uint32_t kMaxIndexed = 1'048'576;
// A list of more descriptors, which takes over 0.1 ms, is not prepared for a request of as few as
// these.
constexpr uint32_t kSmallList = 4096;
constexpr uint64_t kFewDescriptors = 16;

}  // namespace

PreparedHandle RequestFactory::prepare(const PreparedList& list, AddRows add, capi::Status& status) {
  const auto descriptors = Handle<capi::XferDlist>::make("KV_LIST_INVALID", "NIXL could not create a descriptor list", nixl_.destroy_xfer_dlist,
                                                         nixl_.create_xfer_dlist, list.type);
  add(nixl_, descriptors.get(), list.layout.rows());
  capi::PreparedDlist made = nullptr;
  status = nixl_.prep_xfer_dlist(agent_, list.remote ? list.remote->c_str() : capi::kSelf, descriptors.get(), &made, nullptr);
  return PreparedHandle(nixl_, agent_, status == capi::kSuccess ? made : nullptr);
}

bool RequestFactory::prepare_indices(PreparedList& local, PreparedList& remote, uint64_t descriptors) {
  for (PreparedList* list : {&local, &remote}) {
    if (list->indexed) continue;
    if (list->layout.count() > kSmallList && descriptors <= kFewDescriptors) return false;
    capi::Status status = capi::kSuccess;
    if (list->layout.count() <= kMaxIndexed) list->indexed = prepare(*list, add_each_descriptor, status);
    if (!list->indexed) return false;
  }
  return true;
}

// NIXL takes 1.4 ns per index and 33 ns per descriptor that is left after merging. Per extent it
// takes 48 ns, and needs no prepared lists.
capi::Request RequestFactory::make(capi::Operation operation, PreparedList& local, PreparedList& remote, Slice& slice, capi::Status& status) {
  if (slice.local_ids != nullptr) {
    return make_by_index(operation, local, slice.local_ids, remote, slice.remote_ids, slice.descriptors, status);
  }
  const bool scattered = slice.descriptors < kMinDescriptorsPerExtent * slice.extents.size();
  if (scattered && !slice.splits_descriptor && prepare_indices(local, remote, slice.descriptors)) {
    IndexBuffer& indices = slice.indices;
    indices.clear();
    for (const Run& run : slice.runs) indices.add(run);
    const auto request = make_by_index(operation, local, indices.local(), remote, indices.remote(), indices.count(), status);
    if (request != nullptr) return request;
  }
  return make_by_extent(operation, local, remote, slice, status);
}

capi::Request RequestFactory::make_by_index(capi::Operation operation, const PreparedList& local, const int32_t* local_ids,
                                            const PreparedList& remote, const int32_t* remote_ids, size_t count, capi::Status& status) {
  capi::Request request = nullptr;
  status = nixl_.make_xfer_req(agent_, operation, local.indexed.get(), local_ids, count, remote.indexed.get(), remote_ids, count, &request,
                               nullptr);
  return status == capi::kSuccess ? request : nullptr;
}

capi::Request RequestFactory::make_by_extent(capi::Operation operation, const PreparedList& local, const PreparedList& remote,
                                             const Slice& slice, capi::Status& status) {
  const auto empty_list = [&](auto& lists, capi::MemoryType type) {
    auto& list = lists[type];
    if (list) nixl_.xfer_dlist_clear(list.get());
    else list = Handle<capi::XferDlist>::make("KV_INTERNAL", "NIXL could not create a descriptor list", nixl_.destroy_xfer_dlist,
                                              nixl_.create_xfer_dlist, type);
    return list.get();
  };
  const capi::XferDlist here = empty_list(local_extents_, local.type);
  const capi::XferDlist there = empty_list(remote_extents_, remote.type);
  for (const Extent& extent : slice.extents) {
    nixl_.xfer_dlist_add_desc(here, extent.local, extent.length, extent.local_device);
    nixl_.xfer_dlist_add_desc(there, extent.remote, extent.length, extent.remote_device);
  }
  capi::Request request = nullptr;
  status = nixl_.create_xfer_req(agent_, operation, here, there, remote.remote->c_str(), &request, nullptr);
  return status == capi::kSuccess ? request : nullptr;
}

}  // namespace kv::nixl
