#pragma once

#include <napi.h>

#include "agent/agent_thread.h"

namespace kv::nixl {

// JavaScript's `Agent`; see NativeAgent in native.ts of @kv/nixl. The caller chooses a new number
// as each ticket. Outcomes carry the ticket, and it names what the method made.
class AgentObject : public Napi::ObjectWrap<AgentObject> {
 public:
  static Napi::Function define(Napi::Env env);

  // `new Agent(ticket, NativeAgentOptions, onEvents)`
  explicit AgentObject(const Napi::CallbackInfo& info);
  ~AgentObject() override;

 private:
  template <auto kMethod>
  Napi::Value call(const Napi::CallbackInfo& info);
  // Their arguments cannot be read one by one.
  Napi::Value transfer(const Napi::CallbackInfo& info);
  Napi::Value prepare_transfer(const Napi::CallbackInfo& info);

  Napi::Value take_events(const Napi::CallbackInfo& info);
  Napi::Value counters(const Napi::CallbackInfo& info);
  Napi::Value keep_alive(const Napi::CallbackInfo& info);
  // After close or a failed start. No events follow.
  Napi::Value detach(const Napi::CallbackInfo& info);

  static void on_environment_end(void* agent);
  void detach_from_environment();
  void stop();

  napi_env env_;
  shared_ptr<JsEventQueue> events_;
  shared_ptr<AgentThread> thread_;
};

}  // namespace kv::nixl
