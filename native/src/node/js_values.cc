#include "node/js_values.h"

#include <string.h>

#include <type_traits>

#include "node/memory_object.h"

namespace kv::nixl {

Napi::Value to_js(Napi::Env env, double number) { return Napi::Number::New(env, number); }
Napi::Value to_js(Napi::Env env, const string& text) { return Napi::String::New(env, text); }
Napi::Value to_js(Napi::Env env, const Bytes& bytes) {
  Napi::Uint8Array array = Napi::Uint8Array::New(env, bytes.size());
  if (!bytes.empty()) memcpy(array.Data(), bytes.data(), bytes.size());
  return array;
}

Napi::Error to_js(Napi::Env env, const Failure& failure) {
  Napi::Error error = Napi::Error::New(env, failure.message);
  error.Set("code", Napi::String::New(env, failure.code));
  if (!failure.hint.empty()) error.Set("hint", Napi::String::New(env, failure.hint));
  return error;
}

Napi::Value to_js(Napi::Env env, const EventValue& value) {
  return std::visit(
      [&](const auto& value) -> Napi::Value {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::monostate>) return env.Undefined();
        else if constexpr (std::is_same_v<T, vector<double>>) return array_of_each(env, value);
        else return to_js(env, value);
      },
      value);
}

Napi::Value to_js(Napi::Env env, const Event& event) {
  return array_of(env, static_cast<int>(event.kind), static_cast<double>(event.ticket),
                  event.failure ? to_js(env, *event.failure).Value() : env.Undefined(), to_js(env, event.value),
                  event.from.empty() ? env.Undefined() : to_js(env, event.from));
}

namespace {

// One call of Node-API tells most; each takes 20 to 50 ns.
template <typename T>
Numbers<T> typed_array(Napi::Value value, napi_typedarray_type wanted, const char* code, const char* name, const char* expected) {
  napi_typedarray_type type{};
  void* data = nullptr;
  size_t length = 0;
  napi_value buffer = nullptr;
  const napi_status status = napi_get_typedarray_info(value.Env(), value, &type, &length, &data, &buffer, nullptr);
  if (status != napi_ok || type != wanted) throw Failure(code, string(name) + " must be a " + expected);
  // Shared memory may change during the read. A resizable buffer cannot.
  bool plain = false;
  if (napi_is_arraybuffer(value.Env(), buffer, &plain) != napi_ok || !plain) throw Failure(code, string(name) + " must not be in shared memory");
  return {static_cast<const T*>(data), length};
}

}  // namespace

Numbers<double> float64_array(Napi::Value value, const char* code, const char* name) {
  return typed_array<double>(value, napi_float64_array, code, name, "Float64Array");
}

void read(Napi::Value value, Numbers<double>& to) { to = float64_array(value, "KV_LIST_INVALID", "rows"); }

Numbers<int32_t> int32_array(Napi::Value value, const char* code, const char* name) {
  return typed_array<int32_t>(value, napi_int32_array, code, name, "Int32Array");
}

Bytes bytes_of(Napi::Value value, const char* code, const char* name) {
  const auto bytes = typed_array<uint8_t>(value, napi_uint8_array, code, name, "Uint8Array");
  return Bytes(bytes.begin(), bytes.end());
}

namespace {

struct Members {
  Napi::Object object;

  template <typename T>
  void read(const char* name, T& to) const {
    nixl::read(object.Get(name), to);
  }
};

}  // namespace

void read(Napi::Value value, bool& to) { to = value.ToBoolean(); }

void read(Napi::Value value, uint64_t& to) { to = static_cast<uint64_t>(value.As<Napi::Number>().Int64Value()); }

void read(Napi::Value value, string& to) {
  to = value.As<Napi::String>().Utf8Value();
  if (to.find('\0') != string::npos) throw Failure("KV_AGENT_INVALID", "a parameter or path contains NUL");
}

void read(Napi::Value value, MemoryType& to) {
  const string name = value.ToString().Utf8Value();
  const auto type = memory_type_named(name);
  if (!type) throw Failure("KV_LIST_INVALID", "memoryType is " + name + ", not DRAM, VRAM, FILE or OBJ");
  to = *type;
}

// NIXL reads a name up to a NUL.
void read(Napi::Value value, PeerName& to) {
  constexpr const char* kCode = "KV_AGENT_UNKNOWN_REMOTE";
  if (!value.IsString()) throw Failure(kCode, "the peer's name is not a string");
  to.text = value.As<Napi::String>().Utf8Value();
  if (to.text.empty() || to.text.size() > 255 || to.text.find('\0') != string::npos) {
    throw Failure(kCode, "the peer's name must have 1 to 255 bytes and no NUL; this one has " + to_string(to.text.size()));
  }
}

void read(Napi::Value value, Metadata& to) { to.bytes = bytes_of(value, "KV_AGENT_METADATA_INVALID", "agent metadata"); }

void read(Napi::Value value, Payload& to) {
  to.bytes = bytes_of(value, "KV_NOTIFICATION_INVALID", "the notification");
  if (to.bytes.size() <= kMaxNotification) return;
  throw Failure("KV_NOTIFICATION_INVALID",
                "a notification of " + to_string(to.bytes.size()) + " bytes does not arrive: it may have " +
                    to_string(kMaxNotification),
                "WRITE the bytes into the peer's memory, and notify it of that");
}

void read(Napi::Value value, std::pair<string, string>& to) {
  const auto pair = value.As<Napi::Array>();
  read(pair.Get(0u), to.first);
  read(pair.Get(1u), to.second);
}

void read(Napi::Value value, BackendSpec& to) {
  const Members members{value.As<Napi::Object>()};
  members.read("name", to.name);
  members.read("parameters", to.parameters);
}

void read(Napi::Value value, BackendSelection& to) {
  const Members members{value.As<Napi::Object>()};
  members.read("backends", to.backends);
  members.read("preload", to.preload);
  members.read("watchPeers", to.watch_peers);
  members.read("probeWrites", to.probe_writes);
  members.read("notifies", to.notifies);
  members.read("briefCalls", to.brief_calls);
}

void read(Napi::Value value, AgentConfig& to) {
  const Members members{value.As<Napi::Object>()};
  members.read("libraryPath", to.library_path);
  members.read("name", to.name);
  members.read("captureTelemetry", to.capture_telemetry);
  read(value, to.selection);
}

void read(Napi::Value value, MemoryToRegister& to) {
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

namespace {

shared_ptr<PreparedList> open_list(const AgentThread& thread, Napi::Value id, bool remote) {
  uint64_t ticket = 0;
  read(id, ticket);
  shared_ptr<PreparedList> list = thread.list(ticket);
  if (list == nullptr) throw Failure("KV_LIST_CLOSED", string("the ") + (remote ? "remote" : "local") + " list is closed");
  if (list->remote.has_value() != remote) {
    throw Failure("KV_TRANSFER_INVALID", remote ? "the remote list describes local memory"
                                                : "the local list describes memory of \"" + *list->remote + "\"");
  }
  return list;
}

vector<int32_t> integers_of(Napi::Value value, const char* name) {
  const auto numbers = int32_array(value, "KV_TRANSFER_INVALID", name);
  return {numbers.begin(), numbers.end()};
}

// NativeMoves is an array: an element is read in a fifth of a property's time, and a small transfer
// takes only ten properties' time.
namespace at {
constexpr uint32_t is_write = 0, local = 1, remote = 2, local_ids = 3, remote_ids = 4, runs = 5, offsets = 6;
}

TransferSelection selection_of(Napi::Array from, const DescriptorLayout& local, const DescriptorLayout& remote) {
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
  if (!offsets.IsUndefined()) throw Failure("KV_TRANSFER_INVALID", "offsets apply to runs, and this transfer has ids");
  return TransferSelection::of_ids(integers_of(local_ids, "localIds"), integers_of(remote_ids, "remoteIds"), local, remote);
}

}  // namespace

shared_ptr<const Moves> moves_of(const AgentThread& thread, Napi::Value value) {
  const auto from = value.As<Napi::Array>();
  const auto moves = make_shared<Moves>();
  moves->operation = from.Get(at::is_write).ToBoolean() ? Operation::write : Operation::read;
  moves->local = open_list(thread, from.Get(at::local), false);
  moves->remote = open_list(thread, from.Get(at::remote), true);
  if (moves->operation == Operation::write && !moves->remote->writable) {
    throw Failure("KV_TRANSFER_INVALID", "a WRITE replaces an object, and the remote list has rows that are parts of objects",
                  "prepare a list whose rows are whole objects: address 0, the object's length, count 1");
  }
  moves->selection = selection_of(from, moves->local->layout, moves->remote->layout);
  return moves;
}

shared_ptr<TransferRequest> transfer_request_of(const AgentThread& thread, const Napi::CallbackInfo& info) {
  const auto request = make_shared<TransferRequest>();
  read(info[0], request->ticket);
  if (info[1].IsNumber()) {
    uint64_t prepared = 0;
    read(info[1], prepared);
    request->prepared = thread.prepared_transfer(prepared);
    if (request->prepared == nullptr) throw Failure("KV_LIST_CLOSED", "the prepared transfer is closed");
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
