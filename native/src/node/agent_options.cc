#include "node/agent_options.h"

#include <chrono>
#include <utility>

#include "node/js_values.h"

namespace kv::nixl {

namespace {

// A name for NIXL, which reads up to a NUL. `what` names it in error messages.
std::string name_of(Napi::Value value, const char* code, const char* what) {
  if (!value.IsString()) throw Failure(code, std::string(what) + " is not a string");
  std::string name = value.As<Napi::String>().Utf8Value();
  if (name.empty() || name.size() > 255 || name.find('\0') != std::string::npos) {
    throw Failure(code, std::string(what) + " must have 1 to 255 bytes and no NUL; this one has " + std::to_string(name.size()));
  }
  return name;
}

std::shared_ptr<PreparedList> open_list(const AgentThread& thread, Napi::Value id, bool remote) {
  std::shared_ptr<PreparedList> list = thread.list(integer_of(id));
  if (list == nullptr) throw Failure("KV_LIST_CLOSED", std::string("the ") + (remote ? "remote" : "local") + " list is closed");
  if (list->remote.has_value() != remote) {
    throw Failure("KV_TRANSFER_INVALID", remote ? "the remote list describes local memory"
                                                : "the local list describes memory of \"" + *list->remote + "\"");
  }
  return list;
}

// From milliseconds of process.hrtime, which reads the same clock.
std::chrono::steady_clock::time_point time_of(Napi::Value value) {
  const std::chrono::duration<double, std::milli> time(value.As<Napi::Number>().DoubleValue());
  return std::chrono::steady_clock::time_point(std::chrono::duration_cast<std::chrono::steady_clock::duration>(time));
}

std::vector<int32_t> copy_of(Numbers<int32_t> numbers) { return {numbers.begin(), numbers.end()}; }

// The places of NativeMoves, an array: an element is read in a fifth of the time of a property, and
// a small transfer is as short as ten of those.
namespace at {
constexpr uint32_t is_write = 0, local = 1, remote = 2, local_ids = 3, remote_ids = 4, runs = 5, offsets = 6;
}

// Ids of both sides, or runs and perhaps offsets.
TransferSelection selection_of(Napi::Array from, const DescriptorLayout& local, const DescriptorLayout& remote) {
  const Napi::Value local_ids = from.Get(at::local_ids);
  const Napi::Value remote_ids = from.Get(at::remote_ids);
  const Napi::Value runs = from.Get(at::runs);
  const Napi::Value offsets = from.Get(at::offsets);
  if (!runs.IsUndefined()) {
    if (!local_ids.IsUndefined() || !remote_ids.IsUndefined()) {
      throw Failure("KV_TRANSFER_INVALID", "a transfer takes ids or runs, and this one has both");
    }
    auto rows = copy_of(int32_array(runs, "KV_TRANSFER_INVALID", "runs"));
    auto moves = offsets.IsUndefined() ? std::vector<int32_t>{0, 0} : copy_of(int32_array(offsets, "KV_TRANSFER_INVALID", "offsets"));
    return TransferSelection::of_runs(std::move(rows), std::move(moves), local, remote);
  }
  if (!offsets.IsUndefined()) throw Failure("KV_TRANSFER_INVALID", "offsets apply to runs, and this transfer has ids");
  const auto locals = int32_array(local_ids, "KV_TRANSFER_INVALID", "localIds");
  const auto remotes = int32_array(remote_ids, "KV_TRANSFER_INVALID", "remoteIds");
  return TransferSelection::of_ids(locals.data(), locals.size(), remotes.data(), remotes.size(), local, remote);
}

// The operation, the lists and the selection of a transfer.
struct Moves {
  capi::Operation operation;
  std::shared_ptr<PreparedList> local;
  std::shared_ptr<PreparedList> remote;
  TransferSelection selection;
};

Moves moves_of(const AgentThread& thread, Napi::Value value) {
  const auto from = value.As<Napi::Array>();
  Moves moves{.operation = from.Get(at::is_write).ToBoolean() ? capi::Operation::write : capi::Operation::read,
              .local = open_list(thread, from.Get(at::local), false),
              .remote = open_list(thread, from.Get(at::remote), true),
              .selection = {}};
  if (moves.operation == capi::Operation::write && !moves.remote->writable) {
    throw Failure("KV_TRANSFER_INVALID", "a WRITE replaces an object, and the remote list has rows that are parts of objects",
                  "prepare a list whose rows are whole objects: address 0, the object's length, count 1");
  }
  moves.selection = selection_of(from, moves.local->layout, moves.remote->layout);
  return moves;
}

}  // namespace

uint64_t integer_of(Napi::Value value) { return static_cast<uint64_t>(value.As<Napi::Number>().Int64Value()); }

std::string text_of(Napi::Value value) {
  std::string text = value.As<Napi::String>().Utf8Value();
  if (text.find('\0') != std::string::npos) throw Failure("KV_AGENT_INVALID", "a parameter or path contains NUL");
  return text;
}

std::vector<std::string> texts_of(Napi::Value value) {
  const auto array = value.As<Napi::Array>();
  std::vector<std::string> texts;
  for (uint32_t index = 0; index < array.Length(); ++index) texts.push_back(text_of(array.Get(index)));
  return texts;
}

std::string peer_name_of(Napi::Value value) { return name_of(value, "KV_AGENT_UNKNOWN_REMOTE", "the peer's name"); }

std::string backend_name_of(Napi::Value value) { return name_of(value, "KV_BACKEND_UNAVAILABLE", "a backend's name"); }

capi::MemoryType memory_type_of(Napi::Value value) {
  const std::string name = value.ToString().Utf8Value();
  const auto type = memory_type_named(name);
  if (!type) throw Failure("KV_LIST_INVALID", "memoryType is " + name + ", not DRAM, VRAM, FILE or OBJ");
  return *type;
}

AgentConfig agent_config_of(Napi::Object options) {
  return {.library_path = text_of(options.Get("libraryPath")),
          .name = name_of(options.Get("name"), "KV_AGENT_INVALID", "the agent's name"),
          .selection = backend_selection_of(options),
          .capture_telemetry = options.Get("captureTelemetry").ToBoolean()};
}

BackendSelection backend_selection_of(Napi::Object options) {
  BackendSelection selection{.backends = {},
                             .preload = texts_of(options.Get("preload")),
                             .watch_peers = options.Get("watchPeers").ToBoolean(),
                             .probe_writes = options.Get("probeWrites").ToBoolean(),
                             .notifies = options.Get("notifies").ToBoolean(),
                             .brief_calls = options.Get("briefCalls").ToBoolean()};
  const auto backends = options.Get("backends").As<Napi::Array>();
  for (uint32_t index = 0; index < backends.Length(); ++index) {
    const auto entry = backends.Get(index).As<Napi::Object>();
    BackendSpec spec{.name = backend_name_of(entry.Get("name")), .parameters = {}};
    const auto parameters = entry.Get("parameters").As<Napi::Array>();
    for (uint32_t number = 0; number < parameters.Length(); ++number) {
      const auto pair = parameters.Get(number).As<Napi::Array>();
      spec.parameters.emplace_back(text_of(pair.Get(0u)), text_of(pair.Get(1u)));
    }
    selection.backends.push_back(std::move(spec));
  }
  return selection;
}

MemoryRange memory_range_of(Napi::Object options) {
  return {.type = memory_type_of(options.Get("memoryType")),
          .address = integer_of(options.Get("address")),
          .length = integer_of(options.Get("lengthBytes")),
          .device = integer_of(options.Get("deviceId")),
          .key = text_of(options.Get("key"))};
}

std::shared_ptr<PreparedTransfer> prepared_transfer_of(const AgentThread& thread, Napi::Value from) {
  Moves moves = moves_of(thread, from);
  return std::make_shared<PreparedTransfer>(moves.operation, moves.local, moves.remote, std::move(moves.selection));
}

std::shared_ptr<TransferRequest> transfer_request_of(const AgentThread& thread, const Napi::CallbackInfo& info) {
  const auto request = std::make_shared<TransferRequest>();
  request->ticket = integer_of(info[0]);
  if (info[1].IsNumber()) {
    request->prepared = thread.prepared_transfer(integer_of(info[1]));
    if (request->prepared == nullptr) throw Failure("KV_LIST_CLOSED", "the prepared transfer is closed");
    request->operation = request->prepared->operation;
    request->local = request->prepared->local;
    request->remote = request->prepared->remote;
    request->selection = request->prepared->selection;
  } else {
    Moves moves = moves_of(thread, info[1]);
    request->operation = moves.operation;
    request->local = std::move(moves.local);
    request->remote = std::move(moves.remote);
    request->selection = std::make_shared<TransferSelection>(std::move(moves.selection));
  }
  request->asked_at = time_of(info[2]);
  request->abortable = info[3].ToBoolean();
  if (!info[4].IsUndefined()) request->notification = bytes_of(info[4], "KV_NOTIFICATION_INVALID", "the notification");
  return request;
}

}  // namespace kv::nixl
