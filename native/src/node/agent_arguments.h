#pragma once

#include "agent/agent_thread.h"
#include "node/js_values.h"
#include "node/memory_object.h"

// The arguments of an agent's methods. All readers throw a Failure that names the value.
namespace kv::nixl {

inline void read(Napi::Value value, MemoryType& to) {
  const string name = value.ToString().Utf8Value();
  const auto type = memory_type_named(name);
  if (!type)
    throw Failure("KV_LIST_INVALID", "memoryType is " + name + ", not DRAM, VRAM, FILE or OBJ");
  to = *type;
}

// NIXL reads a name up to a NUL.
inline void read(Napi::Value value, PeerName& to) {
  constexpr const char* kCode = "KV_AGENT_UNKNOWN_REMOTE";
  if (!value.IsString()) throw Failure(kCode, "the peer's name is not a string");
  to.text = value.As<Napi::String>().Utf8Value();
  if (to.text.empty() || to.text.size() > 255 || to.text.find('\0') != string::npos) {
    throw Failure(kCode, "the peer's name must have 1 to 255 bytes and no NUL; this one has " +
                             to_string(to.text.size()));
  }
}

inline void read(Napi::Value value, Metadata& to) {
  to.bytes = bytes_of(value, "KV_AGENT_METADATA_INVALID", "agent metadata");
}

inline void read(Napi::Value value, Payload& to) {
  to.bytes = bytes_of(value, "KV_NOTIFICATION_INVALID", "the notification");
  if (to.bytes.size() <= kMaxNotification) return;
  throw Failure("KV_NOTIFICATION_INVALID",
                "a notification of " + to_string(to.bytes.size()) +
                    " bytes does not arrive: it may have " + to_string(kMaxNotification),
                "WRITE the bytes into the peer's memory, and notify it of that");
}

struct Members {
  Napi::Object object;

  template <typename T>
  void read(const char* name, T& to) const {
    nixl::read(object.Get(name), to);
  }
};

inline void read(Napi::Value value, BackendSpec& to) {
  const Members members{value.As<Napi::Object>()};
  members.read("name", to.name);
  members.read("parameters", to.parameters);
}

inline void read(Napi::Value value, BackendSelection& to) {
  const Members members{value.As<Napi::Object>()};
  members.read("backends", to.backends);
  members.read("preload", to.preload);
  members.read("watchPeers", to.watch_peers);
  members.read("probeWrites", to.probe_writes);
  members.read("notifies", to.notifies);
  members.read("briefCalls", to.brief_calls);
}

inline void read(Napi::Value value, AgentConfig& to) {
  const Members members{value.As<Napi::Object>()};
  members.read("libraryPath", to.library_path);
  members.read("name", to.name);
  members.read("captureTelemetry", to.capture_telemetry);
  read(value, to.selection);
}

inline void read(Napi::Value value, MemoryToRegister& to) {
  const Members members{value.As<Napi::Object>()};
  members.read("memoryType", to.range.type);
  members.read("address", to.range.address);
  members.read("lengthBytes", to.range.length);
  members.read("deviceId", to.range.device);
  members.read("key", to.range.key);
  members.read("checkWithCuda", to.ask_cuda);
  members.read("backends", to.backends);
  to.pin = MemoryObject::pin_of(members.object.Get("kept"));
}

inline shared_ptr<PreparedList> open_list(const AgentThread& thread, Napi::Value id, bool remote) {
  uint64_t ticket = 0;
  read(id, ticket);
  shared_ptr<PreparedList> list = thread.list(ticket);
  if (list == nullptr)
    throw Failure("KV_LIST_CLOSED",
                  string("the ") + (remote ? "remote" : "local") + " list is closed");
  if (list->remote.has_value() != remote) {
    throw Failure("KV_TRANSFER_INVALID",
                  remote ? "the remote list describes local memory"
                         : "the local list describes memory of \"" + *list->remote + "\"");
  }
  return list;
}

inline vector<int32_t> integers_of(Napi::Value value, const char* name) {
  const auto numbers =
      typed_array<int32_t>(value, napi_int32_array, "KV_TRANSFER_INVALID", name, "Int32Array");
  return {numbers.begin(), numbers.end()};
}

// NativeMoves is an array: an element is read in a fifth of a property's time, and a small transfer
// takes only ten properties' time.
namespace at {
constexpr uint32_t is_write = 0, local = 1, remote = 2, local_ids = 3, remote_ids = 4, runs = 5,
                   offsets = 6;
}

inline TransferSelection selection_of(Napi::Array from, const DescriptorLayout& local,
                                      const DescriptorLayout& remote) {
  const Napi::Value local_ids = from.Get(at::local_ids);
  const Napi::Value remote_ids = from.Get(at::remote_ids);
  const Napi::Value runs = from.Get(at::runs);
  const Napi::Value offsets = from.Get(at::offsets);
  if (!runs.IsUndefined()) {
    if (!local_ids.IsUndefined() || !remote_ids.IsUndefined()) {
      throw Failure("KV_TRANSFER_INVALID", "a transfer takes ids or runs, and this one has both");
    }
    auto moves = offsets.IsUndefined() ? vector<int32_t>{0, 0} : integers_of(offsets, "offsets");
    return TransferSelection::of_runs(integers_of(runs, "runs"), std::move(moves), local, remote);
  }
  if (!offsets.IsUndefined())
    throw Failure("KV_TRANSFER_INVALID", "offsets apply to runs, and this transfer has ids");
  return TransferSelection::of_ids(integers_of(local_ids, "localIds"),
                                   integers_of(remote_ids, "remoteIds"), local, remote);
}

inline shared_ptr<const Moves> moves_of(const AgentThread& thread, Napi::Value value) {
  const auto from = value.As<Napi::Array>();
  const auto moves = make_shared<Moves>();
  moves->operation = from.Get(at::is_write).ToBoolean() ? Operation::write : Operation::read;
  moves->local = open_list(thread, from.Get(at::local), false);
  moves->remote = open_list(thread, from.Get(at::remote), true);
  if (moves->operation == Operation::write && !moves->remote->writable) {
    throw Failure(
        "KV_TRANSFER_INVALID",
        "a WRITE replaces an object, and the remote list has rows that are parts of objects",
        "prepare a list whose rows are whole objects: address 0, the object's length, count 1");
  }
  moves->selection = selection_of(from, moves->local->layout, moves->remote->layout);
  return moves;
}

inline shared_ptr<TransferRequest> transfer_request_of(const AgentThread& thread,
                                                       const Napi::CallbackInfo& info) {
  const auto request = make_shared<TransferRequest>();
  read(info[0], request->ticket);
  if (info[1].IsNumber()) {
    uint64_t prepared = 0;
    read(info[1], prepared);
    request->prepared = thread.prepared_transfer(prepared);
    if (request->prepared == nullptr)
      throw Failure("KV_LIST_CLOSED", "the prepared transfer is closed");
    request->moves = request->prepared->moves;
  } else {
    request->moves = moves_of(thread, info[1]);
  }
  // Milliseconds of process.hrtime, which reads the same clock.
  const std::chrono::duration<double, std::milli> asked(info[2].As<Napi::Number>().DoubleValue());
  request->asked_at = Clock::time_point(std::chrono::duration_cast<Clock::duration>(asked));
  read(info[3], request->abortable);
  optional<Payload> notification;
  read(info[4], notification);
  if (notification) request->notification = std::move(notification->bytes);
  return request;
}

}  // namespace kv::nixl
