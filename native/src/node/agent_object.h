// `AgentObject` for JavaScript: checks arguments and hands commands to the agent's thread. A method takes a ticket, chosen by the
// caller, under which the callback later hears of the outcome and what was made is named.
#pragma once

#include <napi.h>

#include <memory>
#include <string>

#include "agent/agent_thread.h"

namespace kv::nixl {

class AgentObject : public Napi::ObjectWrap<AgentObject> {
 public:
  static Napi::Function define(Napi::Env env);

  // `new AgentObject(ticket, {libraryPath, name, backends: [{name, parameters: [[key, value]]}]}, onEvents)`
  explicit AgentObject(const Napi::CallbackInfo& info);
  ~AgentObject() override;

 private:
  Napi::Value register_memory(const Napi::CallbackInfo& info);    // (ticket, memory)
  // (ticket, memoryType, address, lengthBytes, deviceId, check): a file from its beginning on, or memory of a device
  Napi::Value register_foreign(const Napi::CallbackInfo& info);
  Napi::Value deregister_memory(const Napi::CallbackInfo& info);  // (ticket, registration)
  Napi::Value local_metadata(const Napi::CallbackInfo& info);     // (ticket)
  Napi::Value add_remote(const Napi::CallbackInfo& info);         // (ticket, metadata)
  Napi::Value remove_remote(const Napi::CallbackInfo& info);      // (ticket, name)
  Napi::Value prepare(const Napi::CallbackInfo& info);            // (ticket, remote | undefined, memoryType, rows)
  Napi::Value close_list(const Napi::CallbackInfo& info);         // (ticket, list)
  Napi::Value notify(const Napi::CallbackInfo& info);             // (ticket, remote, payload)
  // (ticket, isWrite, localList, localIds, remoteList, remoteIds, notification | undefined, revocable)
  Napi::Value transfer(const Napi::CallbackInfo& info);
  Napi::Value abort(const Napi::CallbackInfo& info);       // (transfer) → false if it is too late
  Napi::Value close(const Napi::CallbackInfo& info);       // (ticket, timeoutMs)
  Napi::Value counters(const Napi::CallbackInfo& info);    // () → object
  Napi::Value keep_alive(const Napi::CallbackInfo& info);  // (boolean)
  Napi::Value detach(const Napi::CallbackInfo& info);      // (): after close, or a failed start; no events follow

  static void at_environment_end(void* agent);
  void detach_now();
  void let_go();

  napi_env env_;
  std::shared_ptr<JsEventQueue> outbox_;
  std::shared_ptr<AgentThread> thread_;
};

}  // namespace kv::nixl
