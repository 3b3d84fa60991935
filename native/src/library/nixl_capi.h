// What the addon calls of NIXL's C API (libnixl_capi.so, 0.10 and later). Declared by hand and
// bound with dlsym: a build needs no NIXL.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv::nixl::capi {

struct AgentObject;
struct ParamsObject;
struct MemListObject;
struct BackendObject;
struct OptArgsObject;
struct XferDlistObject;
struct PreparedDlistObject;
struct RegDlistObject;
struct RequestObject;
struct NotifMapObject;

using Agent = AgentObject*;
using Params = ParamsObject*;
using MemList = MemListObject*;
using Backend = BackendObject*;
using OptArgs = OptArgsObject*;
using XferDlist = XferDlistObject*;
using PreparedDlist = PreparedDlistObject*;
using RegDlist = RegDlistObject*;
using Request = RequestObject*;
using NotifMap = NotifMapObject*;

// The library's C enums have the size of an int.
using Status = int;
inline constexpr Status kInProgress = 1;
inline constexpr Status kSuccess = 0;
inline constexpr Status kInvalidParam = -1;
inline constexpr Status kBackendError = -2;
inline constexpr Status kInvalidState = -3;
inline constexpr Status kException = -4;
inline constexpr Status kNoTelemetry = -5;
inline constexpr Status kNotFound = -6;

// Names the agent itself where NIXL expects a peer.
inline constexpr const char* kSelf = "";

enum class MemoryType : int { dram = 0, vram = 1, block = 2, object = 3, file = 4 };
enum class Operation : int { read = 0, write = 1 };
enum class ThreadSync : int { none = 0 };

// The library's nixl_capi_agent_config_s: same fields in the same order.
struct AgentConfig {
  bool progress_thread;
  bool listen_thread;
  int listen_port;
  ThreadSync thread_sync;
  unsigned int num_workers;
  uint64_t progress_delay_us;
  uint64_t listen_delay_us;
  bool capture_telemetry;
};

// The library's nixl_capi_xfer_telemetry_s: one request, in microseconds and bytes.
struct XferTelemetry {
  uint64_t start_time_us;
  uint64_t post_duration_us;
  uint64_t xfer_duration_us;
  uint64_t total_bytes;
  uint64_t desc_count;
};

// Names without the prefix nixl_capi_, and parameters.
#define KV_NIXL_CAPI_FUNCTIONS(FUNCTION)                                                           \
  FUNCTION(create_configured_agent, const char* name, const AgentConfig* config, Agent* out)       \
  FUNCTION(destroy_agent, Agent)                                                                   \
  FUNCTION(get_local_md, Agent, void** data, size_t* length)                                       \
  FUNCTION(get_local_partial_md, Agent, RegDlist, void** data, size_t* length, OptArgs)            \
  FUNCTION(load_remote_md, Agent, const void* data, size_t length, char** name)                    \
  FUNCTION(invalidate_remote_md, Agent, const char* name)                                          \
  FUNCTION(get_plugin_params, Agent, const char* plugin, MemList* memory_types, Params* out)       \
  FUNCTION(get_backend_params, Agent, Backend, MemList* memory_types, Params* out)                 \
  FUNCTION(mem_list_size, MemList, size_t* out)                                                    \
  FUNCTION(mem_list_get, MemList, size_t index, MemoryType* out)                                   \
  FUNCTION(destroy_mem_list, MemList)                                                              \
  FUNCTION(destroy_params, Params)                                                                 \
  FUNCTION(params_add, Params, const char* key, const char* value)                                 \
  FUNCTION(create_backend, Agent, const char* plugin, Params, Backend* out)                        \
  FUNCTION(destroy_backend, Backend)                                                               \
  FUNCTION(create_opt_args, OptArgs* out)                                                          \
  FUNCTION(destroy_opt_args, OptArgs)                                                              \
  FUNCTION(opt_args_add_backend, OptArgs, Backend)                                                 \
  FUNCTION(opt_args_set_notif_msg, OptArgs, const void* data, size_t length)                       \
  FUNCTION(opt_args_set_has_notif, OptArgs, bool)                                                  \
  FUNCTION(create_reg_dlist, MemoryType, RegDlist* out)                                            \
  FUNCTION(destroy_reg_dlist, RegDlist)                                                            \
  FUNCTION(reg_dlist_add_desc, RegDlist, uintptr_t address, size_t length, uint64_t device,        \
           const void* metadata, size_t metadata_length)                                           \
  FUNCTION(register_mem, Agent, RegDlist, OptArgs)                                                 \
  FUNCTION(deregister_mem, Agent, RegDlist, OptArgs)                                               \
  FUNCTION(create_xfer_dlist, MemoryType, XferDlist* out)                                          \
  FUNCTION(destroy_xfer_dlist, XferDlist)                                                          \
  FUNCTION(xfer_dlist_add_desc, XferDlist, uintptr_t address, size_t length, uint64_t device)      \
  FUNCTION(xfer_dlist_clear, XferDlist)                                                            \
  FUNCTION(prep_xfer_dlist, Agent, const char* name, XferDlist, PreparedDlist* out, OptArgs)       \
  FUNCTION(release_xfer_dlist_handle, Agent, PreparedDlist)                                        \
  FUNCTION(make_xfer_req, Agent, Operation, PreparedDlist local, const int* local_indices,         \
           size_t local_count, PreparedDlist remote, const int* remote_indices,                    \
           size_t remote_count, Request* out, OptArgs)                                             \
  FUNCTION(create_xfer_req, Agent, Operation, XferDlist local, XferDlist remote, const char* name, \
           Request* out, OptArgs)                                                                  \
  FUNCTION(query_xfer_backend, Agent, Request, Backend* out)                                       \
  FUNCTION(get_xfer_telemetry, Agent, Request, XferTelemetry*)                                     \
  FUNCTION(post_xfer_req, Agent, Request, OptArgs)                                                 \
  FUNCTION(get_xfer_status, Agent, Request)                                                        \
  FUNCTION(release_xfer_req, Agent, Request)                                                       \
  FUNCTION(destroy_xfer_req, Request)                                                              \
  FUNCTION(gen_notif, Agent, const char* name, const void* data, size_t length, OptArgs)           \
  FUNCTION(get_notifs, Agent, NotifMap, OptArgs)                                                   \
  FUNCTION(create_notif_map, NotifMap* out)                                                        \
  FUNCTION(destroy_notif_map, NotifMap)                                                            \
  FUNCTION(notif_map_size, NotifMap, size_t* out)                                                  \
  FUNCTION(notif_map_get_agent_at, NotifMap, size_t index, const char** out)                       \
  FUNCTION(notif_map_get_notifs_size, NotifMap, const char* name, size_t* out)                     \
  FUNCTION(notif_map_get_notif, NotifMap, const char* name, size_t index, const void** data,       \
           size_t* length)                                                                         \
  FUNCTION(notif_map_clear, NotifMap)

}  // namespace kv::nixl::capi

namespace kv::nixl {

using capi::Agent;
using capi::kInProgress;
using capi::kSuccess;
using capi::MemoryType;
using capi::Operation;
using capi::Request;
using capi::Status;
using capi::XferDlist;

}  // namespace kv::nixl
