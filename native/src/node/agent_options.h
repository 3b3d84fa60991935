// Reads the options of the methods of `Agent`; see native.ts of @kv/nixl for their shapes. All
// throw a Failure that names the value.
#pragma once

#include <napi.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "agent/agent_thread.h"

namespace kv::nixl {

// An integer below 2^53: a ticket, an address, or a length.
uint64_t integer_of(Napi::Value value);
// A path, a key, or a parameter.
std::string text_of(Napi::Value value);
std::vector<std::string> texts_of(Napi::Value value);
// The name of a peer. Throws KV_AGENT_UNKNOWN_REMOTE.
std::string peer_name_of(Napi::Value value);
// The name of a backend. Throws KV_BACKEND_UNAVAILABLE.
std::string backend_name_of(Napi::Value value);
// Throws KV_LIST_INVALID.
capi::MemoryType memory_type_of(Napi::Value value);
// NativeAgentOptions.
AgentConfig agent_config_of(Napi::Object options);
// NativeBackends.
BackendSelection backend_selection_of(Napi::Object options);
// NativeExternalMemory.
MemoryRange memory_range_of(Napi::Object options);
// A transfer that is to be made once, from NativeMoves.
std::shared_ptr<PreparedTransfer> prepared_transfer_of(const AgentThread& thread, Napi::Value moves);
// The arguments of `transfer`.
std::shared_ptr<TransferRequest> transfer_request_of(const AgentThread& thread, const Napi::CallbackInfo& info);

}  // namespace kv::nixl
