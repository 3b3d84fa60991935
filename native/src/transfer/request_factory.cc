#include "transfer/request_factory.h"

#include <utility>

namespace kv::nixl {

namespace {

// Descriptors of a list that NIXL is told one by one, 30 ms and 80 MB for the most, where requests want it: more than that is read off the rows.
constexpr uint32_t kMostIndexed = 1'048'576;

}  // namespace

capi::PreparedDlist RequestFactory::prepare(const PreparedList& list, AddRows add, capi::Status& status) {
  const auto descriptors = Handle<capi::XferDlist>::make("KV_LIST_INVALID", "no descriptor list", nixl_.destroy_xfer_dlist,
                                                         nixl_.create_xfer_dlist, list.type);
  add(nixl_, descriptors.get(), list.shape.rows());
  capi::PreparedDlist made = nullptr;
  status = nixl_.prep_xfer_dlist(agent_, list.remote ? list.remote->c_str() : capi::kSelf, descriptors.get(), &made, nullptr);
  return status == capi::kSuccess ? made : nullptr;
}

// By index NIXL takes 1.4 ns for each descriptor and 33 for each that is left after merging; by extent 48 for each of those, and no list.
capi::Request RequestFactory::make(capi::Operation operation, PreparedList& local, PreparedList& remote, Slice& slice, capi::Status& status) {
  if (slice.local_ids != nullptr) {
    return of_ids(operation, local, slice.local_ids, remote, slice.remote_ids, slice.descriptors, status);
  }
  const bool scattered = slice.descriptors < kMergedEnough * slice.extents.size();
  if (scattered && !slice.cut && indexed(local, remote)) {
    const auto request = by_index(operation, local, remote, slice, status);
    if (request != nullptr) return request;
  }
  return of_extents(operation, local, remote, slice, status);
}

capi::Request RequestFactory::by_index(capi::Operation operation, const PreparedList& local, const PreparedList& remote, Slice& slice,
                                 capi::Status& status) {
  IndexBuffer& ids = slice.written;
  ids.clear();
  for (const Run& run : slice.runs) ids.add(run);
  return of_ids(operation, local, ids.local(), remote, ids.remote(), ids.count(), status);
}

bool RequestFactory::indexed(PreparedList& local, PreparedList& remote) {
  for (PreparedList* list : {&local, &remote}) {
    if (list->indexed != nullptr) continue;
    capi::Status status = capi::kSuccess;
    if (list->shape.count() <= kMostIndexed) list->indexed = prepare(*list, expand, status);
    if (list->indexed == nullptr) return false;
  }
  return true;
}

capi::Request RequestFactory::of_ids(capi::Operation operation, const PreparedList& local, const int32_t* local_ids, const PreparedList& remote,
                               const int32_t* remote_ids, size_t count, capi::Status& status) {
  capi::Request request = nullptr;
  status = nixl_.make_xfer_req(agent_, operation, local.indexed, local_ids, count, remote.indexed, remote_ids, count, &request,
                               nullptr);
  return status == capi::kSuccess ? request : nullptr;
}

capi::Request RequestFactory::of_extents(capi::Operation operation, PreparedList& local, PreparedList& remote, const Slice& slice,
                                   capi::Status& status) {
  const auto emptied = [&](auto& lists, capi::MemoryType type) {
    auto& list = lists[type];
    if (list) nixl_.xfer_dlist_clear(list.get());
    else list = Handle<capi::XferDlist>::make("KV_INTERNAL", "no descriptor list", nixl_.destroy_xfer_dlist,
                                              nixl_.create_xfer_dlist, type);
    return list.get();
  };
  const capi::XferDlist here = emptied(local_extents_, local.type);
  const capi::XferDlist there = emptied(remote_extents_, remote.type);
  for (const Extent& extent : slice.extents) {
    nixl_.xfer_dlist_add_desc(here, extent.local, extent.length, extent.local_device);
    nixl_.xfer_dlist_add_desc(there, extent.remote, extent.length, extent.remote_device);
  }
  capi::Request request = nullptr;
  status = nixl_.create_xfer_req(agent_, operation, here, there, remote.remote->c_str(), &request, nullptr);
  return status == capi::kSuccess ? request : nullptr;
}

}  // namespace kv::nixl
