#include "node/agent_object.h"

#include <chrono>
#include <utility>
#include <vector>

#include "node/agent_options.h"
#include "node/device_memory_object.h"
#include "node/js_values.h"
#include "library/environment.h"
#include "node/memory_object.h"

namespace kv::nixl {

namespace {

// The answer of a command that has run already, as an array of its value. Throws its failure.
// Undefined if an event will answer.
Napi::Value answer_of(Napi::Env env, const std::optional<Event>& event) {
  if (!event) return env.Undefined();
  if (event->failure) throw *event->failure;
  const auto answer = Napi::Array::New(env, 1);
  answer.Set(0u, to_js(env, event->value));
  return answer;
}

}  // namespace

Napi::Function AgentObject::define(Napi::Env env) {
  return DefineClass(env, "Agent",
                     {
                         InstanceMethod<&AgentObject::register_allocated>("register"),
                         InstanceMethod<&AgentObject::register_external>("registerExternal"),
                         InstanceMethod<&AgentObject::deregister>("deregister"),
                         InstanceMethod<&AgentObject::add_backends>("addBackends"),
                         InstanceMethod<&AgentObject::describe_backend>("describeBackend"),
                         InstanceMethod<&AgentObject::query_memory>("queryMemory"),
                         InstanceMethod<&AgentObject::local_metadata>("localMetadata"),
                         InstanceMethod<&AgentObject::add_remote>("addRemote"),
                         InstanceMethod<&AgentObject::remove_remote>("removeRemote"),
                         InstanceMethod<&AgentObject::prepare>("prepare"),
                         InstanceMethod<&AgentObject::close_list>("closeList"),
                         InstanceMethod<&AgentObject::notify>("notify"),
                         InstanceMethod<&AgentObject::transfer>("transfer"),
                         InstanceMethod<&AgentObject::prepare_transfer>("prepareTransfer"),
                         InstanceMethod<&AgentObject::close_prepared_transfer>("closePreparedTransfer"),
                         InstanceMethod<&AgentObject::estimate_cost>("estimateCost"),
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
    AgentConfig config = agent_config_of(info[1].As<Napi::Object>());
    events_ = JsEventQueue::open(info.Env(), info[2].As<Napi::Function>());
    try {
      thread_ = AgentThread::start(std::move(config), events_, integer_of(info[0]));
    } catch (...) {
      // The destructor does not run for an object whose constructor throws.
      stop();
      throw;
    }
    // Hooks run in reverse order: this one runs before Node destroys the queue's thread-safe
    // function.
    napi_add_env_cleanup_hook(env_, on_environment_end, this);
    return info.Env().Undefined();
  });
}

AgentObject::~AgentObject() { detach_from_environment(); }

// A worker may be terminated, or the process may end, while the agent is open. Waits for the
// thread: exit() and NIXL's destructors may follow.
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
    thread_->register_allocated(integer_of(info[0]), std::make_shared<Pin>(MemoryObject::mapping_of(info[1])), texts_of(info[2]));
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::register_external(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    const uint64_t ticket = integer_of(info[0]);
    const auto options = info[1].As<Napi::Object>();
    const bool ask_cuda = options.Get("checkWithCuda").ToBoolean();
    // Handed on, since the command itself may outlive its answer.
    thread_->run(ticket, [ticket, range = memory_range_of(options), ask_cuda, kept = DeviceMemoryObject::memory_of(options.Get("kept")),
                          backends = texts_of(options.Get("backends"))](NixlAgent& agent) mutable {
      agent.registrations().add_external(ticket, range, ask_cuda, std::move(kept), backends);
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

Napi::Value AgentObject::add_backends(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    thread_->add_backends(integer_of(info[0]), backend_selection_of(info[1].As<Napi::Object>()));
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::describe_backend(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    thread_->run(integer_of(info[0]), [name = backend_name_of(info[1]), plugin = info[2].ToBoolean().Value()](NixlAgent& agent) {
      const auto reading = reading_environment();
      return plugin ? agent.backends().describe_plugin(name) : agent.backends().describe(name);
    });
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::query_memory(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    const auto options = info[1].As<Napi::Object>();
    thread_->run(integer_of(info[0]), [backend = backend_name_of(options.Get("backend")), type = memory_type_of(options.Get("memoryType")),
                                       keys = texts_of(options.Get("keys"))](NixlAgent& agent) {
      return agent.backends().query(backend, type, keys);
    });
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::local_metadata(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    const uint64_t ticket = integer_of(info[0]);
    if (info[1].IsUndefined()) {
      thread_->run(ticket, [](NixlAgent& agent) { return agent.metadata(); });
      return info.Env().Undefined();
    }
    const auto ids = info[1].As<Napi::Array>();
    std::vector<uint64_t> registrations;
    for (uint32_t index = 0; index < ids.Length(); ++index) registrations.push_back(integer_of(ids.Get(index)));
    thread_->run(ticket, [registrations](NixlAgent& agent) { return agent.partial_metadata(registrations); });
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::add_remote(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    return answer_of(info.Env(), thread_->add_remote(integer_of(info[0]), bytes_of(info[1], "KV_AGENT_METADATA_INVALID", "agent metadata")));
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
    return answer_of(info.Env(), thread_->prepare_list(integer_of(info[0]), std::move(remote), memory_type_of(info[2]),
                                                       table(rows.data(), rows.size())));
  });
}

Napi::Value AgentObject::close_list(const Napi::CallbackInfo& info) {
  thread_->close_list(integer_of(info[0]), integer_of(info[1]));
  return info.Env().Undefined();
}

Napi::Value AgentObject::notify(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    return answer_of(info.Env(), thread_->notify(integer_of(info[0]), peer_name_of(info[1]),
                                                 bytes_of(info[2], "KV_NOTIFICATION_INVALID", "the notification")));
  });
}

Napi::Value AgentObject::transfer(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    const auto done = thread_->transfer(transfer_request_of(*thread_, info));
    return done ? to_js(info.Env(), done->value) : info.Env().Undefined();
  });
}

Napi::Value AgentObject::prepare_transfer(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    thread_->prepare_transfer(integer_of(info[0]), prepared_transfer_of(*thread_, info[1]));
    return info.Env().Undefined();
  });
}

Napi::Value AgentObject::close_prepared_transfer(const Napi::CallbackInfo& info) {
  thread_->close_prepared_transfer(integer_of(info[0]), integer_of(info[1]));
  return info.Env().Undefined();
}

Napi::Value AgentObject::estimate_cost(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    const auto transfer = thread_->prepared_transfer(integer_of(info[1]));
    if (transfer == nullptr) throw Failure("KV_LIST_CLOSED", "the prepared transfer is closed");
    thread_->run(integer_of(info[0]), [transfer](NixlAgent& agent) { return transfer->estimate(agent); });
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
