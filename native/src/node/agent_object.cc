#include "node/agent_object.h"

#include <chrono>
#include <utility>
#include <vector>

#include "node/js_values.h"
#include "node/memory_object.h"

namespace kv::nixl {

namespace {

uint64_t integer_of(Napi::Value value) { return static_cast<uint64_t>(value.As<Napi::Number>().Int64Value()); }

// A name for NIXL, which reads up to a NUL. `what` names it in error messages.
std::string name_of(Napi::Value value, const char* code, const char* what) {
  if (!value.IsString()) throw Failure(code, std::string(what) + " is not a string");
  std::string name = value.As<Napi::String>().Utf8Value();
  if (name.empty() || name.size() > 255 || name.find('\0') != std::string::npos) {
    throw Failure(code, std::string(what) + " must have 1 to 255 bytes and no NUL; this one has " + std::to_string(name.size()));
  }
  return name;
}

std::string peer_name_of(Napi::Value value) { return name_of(value, "KV_AGENT_UNKNOWN_REMOTE", "the peer's name"); }

capi::MemoryType memory_type_of(Napi::Value value) {
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

std::vector<int32_t> copy_of(const Napi::Int32Array& numbers) {
  return std::vector<int32_t>(numbers.Data(), numbers.Data() + numbers.ElementLength());
}

// Ids of both sides, or runs and perhaps offsets.
TransferSelection selection_of(Napi::Object options, const DescriptorLayout& local, const DescriptorLayout& remote) {
  const Napi::Value local_ids = options.Get("localIds");
  const Napi::Value remote_ids = options.Get("remoteIds");
  const Napi::Value runs = options.Get("runs");
  const Napi::Value offsets = options.Get("offsets");
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
  return TransferSelection::of_ids(locals.Data(), locals.ElementLength(), remotes.Data(), remotes.ElementLength(), local, remote);
}

}  // namespace

Napi::Function AgentObject::define(Napi::Env env) {
  return DefineClass(env, "Agent",
                     {
                         InstanceMethod<&AgentObject::register_allocated>("register"),
                         InstanceMethod<&AgentObject::register_external>("registerExternal"),
                         InstanceMethod<&AgentObject::deregister>("deregister"),
                         InstanceMethod<&AgentObject::local_metadata>("localMetadata"),
                         InstanceMethod<&AgentObject::add_remote>("addRemote"),
                         InstanceMethod<&AgentObject::remove_remote>("removeRemote"),
                         InstanceMethod<&AgentObject::prepare>("prepare"),
                         InstanceMethod<&AgentObject::close_list>("closeList"),
                         InstanceMethod<&AgentObject::notify>("notify"),
                         InstanceMethod<&AgentObject::transfer>("transfer"),
                         InstanceMethod<&AgentObject::abort>("abort"),
                         InstanceMethod<&AgentObject::close>("close"),
                         InstanceMethod<&AgentObject::take_events>("takeEvents"),
                         InstanceMethod<&AgentObject::counters>("counters"),
                         InstanceMethod<&AgentObject::keep_alive>("keepAlive"),
                         InstanceMethod<&AgentObject::detach>("detach"),
                     });
}

AgentObject::AgentObject(const Napi::CallbackInfo& info) : Napi::ObjectWrap<AgentObject>(info), env_(info.Env()) {
  with_js_errors(info.Env(), [&] {
    AgentConfig config = config_of(info[1].As<Napi::Object>());
    events_ = JsEventQueue::open(info.Env(), info[2].As<Napi::Function>());
    try {
      thread_ = AgentThread::start(std::move(config), events_, integer_of(info[0]));
    } catch (...) {
      // The destructor does not run for an object whose constructor throws.
      stop();
      throw;
    }
    // Hooks run in reverse order: this one runs before Node destroys the queue's thread-safe function.
    napi_add_env_cleanup_hook(env_, on_environment_end, this);
    return info.Env().Undefined();
  });
}

AgentObject::~AgentObject() { detach_from_environment(); }

// A worker may be terminated, or the process may end, while the agent is open. Waits for the thread: exit() and NIXL's destructors may follow.
void AgentObject::on_environment_end(void* data) {
  auto* agent = static_cast<AgentObject*>(data);
  agent->stop();
  await_thread_end(agent->thread_.get());
}

void AgentObject::detach_from_environment() {
  if (events_ == nullptr) return;
  napi_remove_env_cleanup_hook(env_, on_environment_end, this);
  stop();
}

void AgentObject::stop() {
  if (events_ != nullptr) std::exchange(events_, nullptr)->close();
  if (thread_ != nullptr) thread_->stop();
}

Napi::Value AgentObject::register_allocated(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    thread_->register_allocated(integer_of(info[0]), std::make_shared<Pin>(MemoryObject::mapping_of(info[1])));
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::register_external(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    const uint64_t ticket = integer_of(info[0]);
    const auto options = info[1].As<Napi::Object>();
    MemoryRange range{.type = memory_type_of(options.Get("memoryType")),
                      .address = integer_of(options.Get("address")),
                      .length = integer_of(options.Get("lengthBytes")),
                      .device = integer_of(options.Get("deviceId")),
                      .key = text_of(options.Get("key"))};
    const bool verify = options.Get("checkWithCuda").ToBoolean();
    thread_->run(ticket, [ticket, range = std::move(range), verify](NixlAgent& agent) {
      agent.registrations().add_external(ticket, range, verify);
      return EventValue();
    });
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::deregister(const Napi::CallbackInfo& info) {
  thread_->run(integer_of(info[0]), [registration = integer_of(info[1])](NixlAgent& agent) {
    agent.registrations().remove(registration);
    return EventValue();
  });
  return info.Env().Undefined();
}

Napi::Value AgentObject::local_metadata(const Napi::CallbackInfo& info) {
  thread_->run(integer_of(info[0]), [](NixlAgent& agent) { return agent.metadata(); });
  return info.Env().Undefined();
}

Napi::Value AgentObject::add_remote(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    thread_->add_remote(integer_of(info[0]), bytes_of(info[1], "KV_AGENT_METADATA_INVALID", "agent metadata"));
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::remove_remote(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    thread_->run(integer_of(info[0]), [name = peer_name_of(info[1])](NixlAgent& agent) {
      agent.peers().remove(name);
      return EventValue();
    });
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::prepare(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    std::optional<std::string> remote;
    if (!info[1].IsUndefined()) remote = peer_name_of(info[1]);
    const auto rows = float64_array(info[3], "KV_LIST_INVALID", "rows");
    const auto table = info[4].ToBoolean() ? DescriptorTable::view_of : DescriptorTable::copy_of;
    thread_->prepare_list(integer_of(info[0]), std::move(remote), memory_type_of(info[2]), table(rows.Data(), rows.ElementLength()));
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::close_list(const Napi::CallbackInfo& info) {
  thread_->close_list(integer_of(info[0]), integer_of(info[1]));
  return info.Env().Undefined();
}

Napi::Value AgentObject::notify(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    thread_->run(integer_of(info[0]), [remote = peer_name_of(info[1]),
                                       payload = bytes_of(info[2], "KV_NOTIFICATION_INVALID", "the notification")](NixlAgent& agent) {
      agent.peers().notify(remote, payload);
      return EventValue();
    });
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::transfer(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    const auto request = std::make_shared<TransferRequest>();
    const auto options = info[1].As<Napi::Object>();
    request->ticket = integer_of(info[0]);
    request->operation = options.Get("isWrite").ToBoolean() ? capi::Operation::write : capi::Operation::read;
    request->local = open_list(*thread_, options.Get("local"), false);
    request->remote = open_list(*thread_, options.Get("remote"), true);
    request->abortable = options.Get("abortable").ToBoolean();
    request->asked_at = time_of(options.Get("askedMs"));
    if (request->operation == capi::Operation::write && !request->remote->writable) {
      throw Failure("KV_TRANSFER_INVALID", "a WRITE replaces an object, and the remote list has rows that are parts of objects",
                    "prepare a list whose rows are whole objects: address 0, the object's length, count 1");
    }
    request->selection = selection_of(options, request->local->layout, request->remote->layout);
    const Napi::Value notification = options.Get("notification");
    if (!notification.IsUndefined()) request->notification = bytes_of(notification, "KV_NOTIFICATION_INVALID", "the notification");
    thread_->transfer(request);
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::abort(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), thread_->abort(integer_of(info[0])));
}

Napi::Value AgentObject::close(const Napi::CallbackInfo& info) {
  const auto timeout = static_cast<int64_t>(info[1].As<Napi::Number>().DoubleValue());
  thread_->close(integer_of(info[0]), std::chrono::milliseconds(timeout));
  return info.Env().Undefined();
}

Napi::Value AgentObject::take_events(const Napi::CallbackInfo& info) {
  const auto answer = Napi::Array::New(info.Env(), 2);
  auto [events, more] = events_ == nullptr ? std::pair(Napi::Array::New(info.Env()), false) : events_->take(info.Env());
  answer.Set(0u, events);
  answer.Set(1u, Napi::Boolean::New(info.Env(), more));
  return answer;
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
  if (events_ != nullptr) events_->keep_alive(info[0].ToBoolean());
  return info.Env().Undefined();
}

Napi::Value AgentObject::detach(const Napi::CallbackInfo& info) {
  detach_from_environment();
  return info.Env().Undefined();
}

}  // namespace kv::nixl
