#include "node/agent_object.h"

#include <string.h>

#include <chrono>
#include <utility>
#include <vector>

#include "node/memory_object.h"
#include "node/js_values.h"

namespace kv::nixl {

namespace {

uint64_t ticket_of(Napi::Value value) { return static_cast<uint64_t>(value.As<Napi::Number>().Int64Value()); }

// A name that NIXL, which reads up to a NUL, takes whole.
std::string name_of(Napi::Value value, const char* code, const char* what) {
  if (!value.IsString()) throw Failure(code, std::string(what) + " is not a string");
  std::string name = value.As<Napi::String>().Utf8Value();
  if (name.empty() || name.size() > 255 || name.find('\0') != std::string::npos) {
    throw Failure(code, std::string(what) + " must have 1 to 255 bytes and no NUL; this one has " + std::to_string(name.size()));
  }
  return name;
}

capi::MemoryType type_of(Napi::Value value) {
  const std::string name = value.ToString().Utf8Value();
  const auto type = memory_type_named(name);
  if (!type) throw Failure("KV_LIST_INVALID", "memoryType is " + name + ", not DRAM, VRAM, FILE or OBJ");
  return *type;
}

std::string text_of(Napi::Value value) {
  std::string text = value.As<Napi::String>().Utf8Value();
  if (text.find('\0') != std::string::npos) throw Failure("KV_AGENT_INVALID", "a parameter or path contains NUL");
  return text;
}

AgentConfig config_of(Napi::Object options) {
  AgentConfig config{.library_path = text_of(options.Get("libraryPath")),
                     .name = name_of(options.Get("name"), "KV_AGENT_INVALID", "the agent's name"),
                     .backends = {},
                     .preload = {},
                     .watch_peers = options.Get("watchPeers").ToBoolean(),
                     .probe_writes = options.Get("probeWrites").ToBoolean(),
                     .notifies = options.Get("notifies").ToBoolean()};
  const auto preload = options.Get("preload").As<Napi::Array>();
  for (uint32_t index = 0; index < preload.Length(); ++index) config.preload.push_back(text_of(preload.Get(index)));
  const auto backends = options.Get("backends").As<Napi::Array>();
  for (uint32_t index = 0; index < backends.Length(); ++index) {
    const auto entry = backends.Get(index).As<Napi::Object>();
    BackendSpec spec{.name = name_of(entry.Get("name"), "KV_BACKEND_UNAVAILABLE", "a backend's name"), .parameters = {}};
    const auto parameters = entry.Get("parameters").As<Napi::Array>();
    for (uint32_t number = 0; number < parameters.Length(); ++number) {
      const auto pair = parameters.Get(number).As<Napi::Array>();
      spec.parameters.emplace_back(text_of(pair.Get(0u)), text_of(pair.Get(1u)));
    }
    config.backends.push_back(std::move(spec));
  }
  return config;
}

std::shared_ptr<PreparedList> list_of(const AgentThread& thread, Napi::Value id, bool remote) {
  std::shared_ptr<PreparedList> list = thread.list(ticket_of(id));
  if (list == nullptr) throw Failure("KV_LIST_CLOSED", std::string("the ") + (remote ? "remote" : "local") + " list is closed");
  if (list->remote.has_value() != remote) {
    throw Failure("KV_TRANSFER_INVALID", remote ? "the remote list describes local memory"
                                                : "the local list describes memory of \"" + *list->remote + "\"");
  }
  return list;
}

// From milliseconds of process.hrtime, which is this clock too.
std::chrono::steady_clock::time_point time_of(Napi::Value value) {
  const std::chrono::duration<double, std::milli> time(value.As<Napi::Number>().DoubleValue());
  return std::chrono::steady_clock::time_point(std::chrono::duration_cast<std::chrono::steady_clock::duration>(time));
}

std::vector<int32_t> copied(const Napi::Int32Array& numbers) {
  return std::vector<int32_t>(numbers.Data(), numbers.Data() + numbers.ElementLength());
}

// Ids of both sides, or runs and where they come again.
TransferSelection pairs_of(Napi::Value local_ids, Napi::Value remote_ids, Napi::Value runs, Napi::Value offsets, const DescriptorLayout& local,
               const DescriptorLayout& remote) {
  if (!runs.IsUndefined()) {
    if (!local_ids.IsUndefined() || !remote_ids.IsUndefined()) {
      throw Failure("KV_TRANSFER_INVALID", "a transfer has ids or runs, and this one has both");
    }
    const auto rows = int32_array(runs, "KV_TRANSFER_INVALID", "runs");
    return TransferSelection::of_runs(copied(rows),
                          offsets.IsUndefined() ? std::vector<int32_t>{0, 0}
                                                : copied(int32_array(offsets, "KV_TRANSFER_INVALID", "offsets")),
                          local, remote);
  }
  if (!offsets.IsUndefined()) throw Failure("KV_TRANSFER_INVALID", "offsets are for runs, and this transfer has ids");
  const auto locals = int32_array(local_ids, "KV_TRANSFER_INVALID", "localIds");
  const auto remotes = int32_array(remote_ids, "KV_TRANSFER_INVALID", "remoteIds");
  return TransferSelection::of_ids(locals.Data(), locals.ElementLength(), remotes.Data(), remotes.ElementLength(), local, remote);
}

}  // namespace

Napi::Function AgentObject::define(Napi::Env env) {
  return DefineClass(env, "Agent",
                     {
                         InstanceMethod<&AgentObject::register_memory>("register"),
                         InstanceMethod<&AgentObject::register_foreign>("registerForeign"),
                         InstanceMethod<&AgentObject::deregister_memory>("deregister"),
                         InstanceMethod<&AgentObject::local_metadata>("localMetadata"),
                         InstanceMethod<&AgentObject::add_remote>("addRemote"),
                         InstanceMethod<&AgentObject::remove_remote>("removeRemote"),
                         InstanceMethod<&AgentObject::prepare>("prepare"),
                         InstanceMethod<&AgentObject::close_list>("closeList"),
                         InstanceMethod<&AgentObject::notify>("notify"),
                         InstanceMethod<&AgentObject::transfer>("transfer"),
                         InstanceMethod<&AgentObject::abort>("abort"),
                         InstanceMethod<&AgentObject::close>("close"),
                         InstanceMethod<&AgentObject::counters>("counters"),
                         InstanceMethod<&AgentObject::keep_alive>("keepAlive"),
                         InstanceMethod<&AgentObject::detach>("detach"),
                     });
}

AgentObject::AgentObject(const Napi::CallbackInfo& info) : Napi::ObjectWrap<AgentObject>(info), env_(info.Env()) {
  guarded(info.Env(), [&] {
    AgentConfig config = config_of(info[1].As<Napi::Object>());
    outbox_ = JsEventQueue::open(info.Env(), info[2].As<Napi::Function>());
    // After the outbox, so that it runs before Node takes the thread-safe function away.
    napi_add_env_cleanup_hook(env_, at_environment_end, this);
    thread_ = AgentThread::start(std::move(config), outbox_, ticket_of(info[0]));
    return info.Env().Undefined();
  });
}

AgentObject::~AgentObject() { detach_now(); }

// A worker may be terminated, or the process end, with the agent alive. The thread is waited for, since what follows may be
// exit(), and NIXL's destructors with it.
void AgentObject::at_environment_end(void* data) {
  auto* agent = static_cast<AgentObject*>(data);
  agent->let_go();
  await_end(agent->thread_.get());
}

void AgentObject::detach_now() {
  if (outbox_ == nullptr) return;
  napi_remove_env_cleanup_hook(env_, at_environment_end, this);
  let_go();
}

void AgentObject::let_go() {
  if (outbox_ != nullptr) std::exchange(outbox_, nullptr)->close();
  if (thread_ != nullptr) thread_->stop();
}

Napi::Value AgentObject::register_memory(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] {
    thread_->register_memory(ticket_of(info[0]), std::make_shared<Pin>(MemoryObject::mapping_of(info[1])));
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::register_foreign(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] {
    const auto number = [&](size_t index) { return static_cast<uint64_t>(info[index].As<Napi::Number>().Int64Value()); };
    thread_->register_foreign(ticket_of(info[0]), {.type = type_of(info[1]),
                                                   .address = number(2),
                                                   .length = number(3),
                                                   .device = number(4),
                                                   .check = info[5].ToBoolean(),
                                                   .key = text_of(info[6])});
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::deregister_memory(const Napi::CallbackInfo& info) {
  thread_->deregister_memory(ticket_of(info[0]), ticket_of(info[1]));
  return info.Env().Undefined();
}

Napi::Value AgentObject::local_metadata(const Napi::CallbackInfo& info) {
  thread_->local_metadata(ticket_of(info[0]));
  return info.Env().Undefined();
}

Napi::Value AgentObject::add_remote(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] {
    thread_->add_remote(ticket_of(info[0]), bytes_of(info[1], "KV_AGENT_METADATA_INVALID", "agent metadata"));
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::remove_remote(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] {
    thread_->remove_remote(ticket_of(info[0]), name_of(info[1], "KV_AGENT_UNKNOWN_REMOTE", "the peer's name"));
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::prepare(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] {
    std::optional<std::string> remote;
    if (!info[1].IsUndefined()) remote = name_of(info[1], "KV_AGENT_UNKNOWN_REMOTE", "the peer's name");
    const auto rows = float64_array(info[3], "KV_LIST_INVALID", "rows");
    const auto numbers = info[4].ToBoolean() ? RowNumbers::kept : RowNumbers::copied;
    thread_->prepare(ticket_of(info[0]), std::move(remote), type_of(info[2]), numbers(rows.Data(), rows.ElementLength()));
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::close_list(const Napi::CallbackInfo& info) {
  thread_->close_list(ticket_of(info[0]), ticket_of(info[1]));
  return info.Env().Undefined();
}

Napi::Value AgentObject::notify(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] {
    thread_->notify(ticket_of(info[0]), name_of(info[1], "KV_AGENT_UNKNOWN_REMOTE", "the peer's name"),
                    bytes_of(info[2], "KV_NOTIFICATION_INVALID", "the notification"));
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::transfer(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] {
    TransferRequest request{.operation = info[1].ToBoolean() ? capi::Operation::write : capi::Operation::read,
                            .local = list_of(*thread_, info[2], false),
                            .remote = list_of(*thread_, info[3], true),
                            .pairs = {},
                            .notification = {},
                            .revocable = info[9].ToBoolean(),
                            .asked = time_of(info[10])};
    if (request.operation == capi::Operation::write && !request.remote->takes_writes) {
      throw Failure("KV_TRANSFER_INVALID", "a WRITE replaces an object, and the remote list has rows that are parts of objects",
                    "write by a list whose rows are whole objects: place 0, the length of the memory, count 1");
    }
    request.pairs = pairs_of(info[4], info[5], info[6], info[7], request.local->shape, request.remote->shape);
    if (!info[8].IsUndefined()) request.notification = bytes_of(info[8], "KV_NOTIFICATION_INVALID", "the notification");
    thread_->transfer(ticket_of(info[0]), std::move(request));
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::abort(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), thread_->abort(ticket_of(info[0])));
}

Napi::Value AgentObject::close(const Napi::CallbackInfo& info) {
  const auto patience = static_cast<int64_t>(info[1].As<Napi::Number>().DoubleValue());
  thread_->close(ticket_of(info[0]), std::chrono::milliseconds(patience));
  return info.Env().Undefined();
}

Napi::Value AgentObject::counters(const Napi::CallbackInfo& info) {
  const Counters& counters = thread_->counters();
  const auto object = Napi::Object::New(info.Env());
  const auto set = [&](const char* name, const std::atomic<uint64_t>& value) {
    object.Set(name, Napi::Number::New(info.Env(), static_cast<double>(value.load())));
  };
  set("transfersPosted", counters.transfers_posted);
  set("transfersDone", counters.transfers_done);
  set("transfersFailed", counters.transfers_failed);
  set("transfersInFlight", counters.transfers_in_flight);
  set("bytesTransferred", counters.bytes_transferred);
  set("notificationsSent", counters.notifications_sent);
  set("notificationsReceived", counters.notifications_received);
  set("registrations", counters.registrations);
  set("preparedLists", counters.prepared_lists);
  set("remotes", counters.remotes);
  set("polls", counters.polls);
  return object;
}

Napi::Value AgentObject::keep_alive(const Napi::CallbackInfo& info) {
  if (outbox_ != nullptr) outbox_->keep_alive(info[0].ToBoolean());
  return info.Env().Undefined();
}

Napi::Value AgentObject::detach(const Napi::CallbackInfo& info) {
  detach_now();
  return info.Env().Undefined();
}

}  // namespace kv::nixl
