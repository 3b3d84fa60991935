#pragma once

#include <napi.h>

#include <tuple>
#include <type_traits>

#include "node/agent_arguments.h"

namespace kv::nixl {

// JavaScript's `Agent`; see NativeAgent in native.ts of @kv/nixl. The caller chooses a new number
// as each ticket. Outcomes carry the ticket, and it names what the method made.
class AgentObject : public Napi::ObjectWrap<AgentObject> {
 public:
  static Napi::Function define(Napi::Env env) {
    return DefineClass(
        env, "Agent",
        {
            InstanceMethod<&AgentObject::call<&AgentThread::register_memory>>("register"),
            InstanceMethod<&AgentObject::call<&AgentThread::deregister>>("deregister"),
            InstanceMethod<&AgentObject::call<&AgentThread::add_backends>>("addBackends"),
            InstanceMethod<&AgentObject::call<&AgentThread::local_metadata>>("localMetadata"),
            InstanceMethod<&AgentObject::call<&AgentThread::add_remote>>("addRemote"),
            InstanceMethod<&AgentObject::call<&AgentThread::remove_remote>>("removeRemote"),
            InstanceMethod<&AgentObject::call<&AgentThread::prepare_list>>("prepare"),
            InstanceMethod<&AgentObject::call<&AgentThread::close_list>>("closeList"),
            InstanceMethod<&AgentObject::call<&AgentThread::notify>>("notify"),
            InstanceMethod<&AgentObject::transfer>("transfer"),
            InstanceMethod<&AgentObject::prepare_transfer>("prepareTransfer"),
            InstanceMethod<&AgentObject::call<&AgentThread::close_prepared_transfer>>(
                "closePreparedTransfer"),
            InstanceMethod<&AgentObject::call<&AgentThread::transfer_backend>>("transferBackend"),
            InstanceMethod<&AgentObject::call<&AgentThread::abort>>("abort"),
            InstanceMethod<&AgentObject::call<&AgentThread::close>>("close"),
            InstanceMethod<&AgentObject::take<&JsEventQueue::take>>("takeEvents"),
            InstanceMethod<&AgentObject::take<&JsEventQueue::take_notifications>>(
                "takeNotifications"),
            InstanceMethod<&AgentObject::counters>("counters"),
            InstanceMethod<&AgentObject::keep_alive>("keepAlive"),
            InstanceMethod<&AgentObject::detach>("detach"),
        });
  }

  // `new Agent(ticket, NativeAgentOptions, onEvents)`
  explicit AgentObject(const Napi::CallbackInfo& info)
      : Napi::ObjectWrap<AgentObject>(info), env_(info.Env()) {
    with_js_errors(info.Env(), [&] {
      uint64_t ticket = 0;
      AgentConfig config;
      read(info[0], ticket);
      read(info[1], config);
      events_ = JsEventQueue::open(info.Env(), info[2].As<Napi::Function>());
      try {
        thread_ = AgentThread::start(std::move(config), events_, ticket);
      } catch (...) {
        // A constructor that throws runs no destructor.
        stop();
        throw;
      }
      // Hooks run in reverse order: this one precedes the thread-safe function's end.
      napi_add_env_cleanup_hook(env_, on_environment_end, this);
      return info.Env().Undefined();
    });
  }
  ~AgentObject() override { detach_from_environment(); }

 private:
  // An array of the answer's value, or undefined if an event will answer. Throws its failure.
  static Napi::Value result_to_js(Napi::Env env, const optional<Event>& event) {
    if (!event) return env.Undefined();
    if (event->failure) throw *event->failure;
    return array_of(env, to_js(env, event->value));
  }

  static Napi::Value result_to_js(Napi::Env env, bool value) {
    return Napi::Boolean::New(env, value);
  }

  template <typename Result, typename... Arguments>
  static Napi::Value invoke(AgentThread& thread, Result (AgentThread::*method)(Arguments...),
                            const Napi::CallbackInfo& info) {
    std::tuple<std::decay_t<Arguments>...> arguments;
    size_t index = 0;
    std::apply([&](auto&... argument) { (read(info[index++], argument), ...); }, arguments);
    const auto call = [&](auto&... argument) { return (thread.*method)(std::move(argument)...); };
    if constexpr (std::is_void_v<Result>) {
      std::apply(call, arguments);
      return info.Env().Undefined();
    } else {
      return result_to_js(info.Env(), std::apply(call, arguments));
    }
  }

  static constexpr std::pair<const char*, atomic<uint64_t> Counters::*> kCounters[] = {
      {"transfersPosted", &Counters::transfers_posted},
      {"transfersDone", &Counters::transfers_done},
      {"transfersFailed", &Counters::transfers_failed},
      {"transfersInFlight", &Counters::transfers_in_flight},
      {"bytesTransferred", &Counters::bytes_transferred},
      {"notificationsSent", &Counters::notifications_sent},
      {"notificationsReceived", &Counters::notifications_received},
      {"registrations", &Counters::registrations},
      {"preparedLists", &Counters::prepared_lists},
      {"remotes", &Counters::remotes},
      {"polls", &Counters::polls},
  };

  template <auto kMethod>
  Napi::Value call(const Napi::CallbackInfo& info) {
    return with_js_errors(info.Env(), [&] { return invoke(*thread_, kMethod, info); });
  }
  // Their arguments cannot be read one by one.
  // `(ticket, moves | preparedTransfer, askedMs, abortable, notification | undefined)`: its outcome
  // or undefined
  Napi::Value transfer(const Napi::CallbackInfo& info) {
    return with_js_errors(info.Env(), [&] {
      const auto done = thread_->transfer(transfer_request_of(*thread_, info));
      return done ? to_js(info.Env(), done->value) : info.Env().Undefined();
    });
  }
  // `(ticket, moves)`
  Napi::Value prepare_transfer(const Napi::CallbackInfo& info) {
    return with_js_errors(info.Env(), [&] {
      uint64_t ticket = 0;
      read(info[0], ticket);
      thread_->prepare_transfer(ticket, moves_of(*thread_, info[1]));
      return info.Env().Undefined();
    });
  }

  template <auto kTake>
  Napi::Value take(const Napi::CallbackInfo& info) {
    return with_js_errors(info.Env(), [&]() -> Napi::Value {
      if (events_ != nullptr) return (events_.get()->*kTake)(info.Env());
      return array_of(info.Env(), Napi::Array::New(info.Env()), false);
    });
  }
  Napi::Value counters(const Napi::CallbackInfo& info) {
    const auto object = Napi::Object::New(info.Env());
    for (const auto& [name, counter] : kCounters)
      object.Set(name, static_cast<double>((thread_->counters().*counter).load()));
    return object;
  }
  Napi::Value keep_alive(const Napi::CallbackInfo& info) {
    if (events_ != nullptr) events_->keep_alive(info[0].ToBoolean());
    return info.Env().Undefined();
  }
  // After close or a failed start. No events follow.
  Napi::Value detach(const Napi::CallbackInfo& info) {
    detach_from_environment();
    return info.Env().Undefined();
  }

  // The environment may end while the agent is open. exit() and NIXL's destructors may follow, so
  // this waits for the thread.
  static void on_environment_end(void* data) {
    auto* agent = static_cast<AgentObject*>(data);
    agent->stop();
    await_thread_end(agent->thread_.get());
  }
  void detach_from_environment() {
    if (events_ == nullptr) return;
    napi_remove_env_cleanup_hook(env_, on_environment_end, this);
    stop();
  }
  void stop() {
    if (events_ != nullptr) std::exchange(events_, nullptr)->close();
    if (thread_ != nullptr) thread_->stop();
  }

  napi_env env_;
  shared_ptr<JsEventQueue> events_;
  shared_ptr<AgentThread> thread_;
};

}  // namespace kv::nixl
