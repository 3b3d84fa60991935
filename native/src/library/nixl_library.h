// The process's one libnixl_capi.so, which is never unloaded.
#pragma once

#include <type_traits>

#include "library/failure.h"
#include "library/nixl_capi.h"

namespace kv::nixl {

namespace capi {

// `load_nixl` sets these pointers before any agent exists.
#define KV_NIXL_POINTER(name, ...) inline Status (*name)(__VA_ARGS__) = nullptr;
KV_NIXL_CAPI_FUNCTIONS(KV_NIXL_POINTER)
#undef KV_NIXL_POINTER

}  // namespace capi

// Does nothing for the same file. Throws KV_LIBRARY_INCOMPATIBLE, also for another file: two copies
// of NIXL would share global state.
void load_nixl(const string& path);
// NIXL then ignores new environment variables.
bool is_nixl_loaded();
// For what plugins need and the loader would not find. A loaded library of the same soname serves
// as well. Throws KV_BACKEND_UNAVAILABLE.
void preload_library(const string& path);

template <auto& kRelease>
struct Release {
  void operator()(auto* handle) const { kRelease(handle); }
};
// Owns a handle whose release function needs only the handle.
template <typename T, auto& kRelease>
using Handle = unique_ptr<std::remove_pointer_t<T>, Release<kRelease>>;

using OwnedAgent = Handle<Agent, capi::destroy_agent>;
using OwnedBackend = Handle<capi::Backend, capi::destroy_backend>;
using OwnedMemList = Handle<capi::MemList, capi::destroy_mem_list>;
using OwnedNotifications = Handle<capi::NotifMap, capi::destroy_notif_map>;
using OwnedOptions = Handle<capi::OptArgs, capi::destroy_opt_args>;
using OwnedParams = Handle<capi::Params, capi::destroy_params>;
using OwnedRegList = Handle<capi::RegDlist, capi::destroy_reg_dlist>;
using OwnedXferList = Handle<XferDlist, capi::destroy_xfer_dlist>;

struct ReleasePrepared {
  Agent agent = nullptr;
  void operator()(capi::PreparedDlist list) const { capi::release_xfer_dlist_handle(agent, list); }
};
// Owns a prepared list. Must be released before the agent ends.
using PreparedHandle = unique_ptr<capi::PreparedDlistObject, ReleasePrepared>;

// Owns the handle that `create(arguments…, &handle)` makes. Throws a Failure with `code`, whose
// message begins with `what`.
template <typename Owner, typename Create, typename... Arguments>
Owner make(const char* code, const string& what, Create create, Arguments... arguments) {
  typename Owner::pointer handle = nullptr;
  const Status status = create(arguments..., &handle);
  if (status != kSuccess || handle == nullptr) throw Failure(code, what + ": " + describe(status));
  return Owner(handle);
}

}  // namespace kv::nixl
