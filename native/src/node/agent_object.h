#pragma once

#include <napi.h>

#include <memory>

#include "agent/agent_thread.h"
#include "node/js_event_queue.h"

namespace kv::nixl {

// JavaScript's `Agent`; see NativeAgent in native.ts of @kv/nixl. Checks arguments and hands
// commands to the agent's thread. A method takes a ticket, a number that the caller chooses and
// never uses again: the outcome is reported with it, and it then names what the method made.
class AgentObject : public Napi::ObjectWrap<AgentObject> {
 public:
  // The class, to be exported.
  static Napi::Function define(Napi::Env env);

  // `new Agent(ticket, {libraryPath, name, backends: [{name, parameters: [[key, value]]}], …},
  // onEvents)`. Starts the agent's thread.
  explicit AgentObject(const Napi::CallbackInfo& info);
  ~AgentObject() override;

 private:
  // (ticket, memory, backends)
  Napi::Value register_allocated(const Napi::CallbackInfo& info);
  // (ticket, {memoryType, address, lengthBytes, deviceId, key, checkWithCuda, backends}): a file,
  // an object, or memory of a device or of the caller
  Napi::Value register_external(const Napi::CallbackInfo& info);
  // (ticket, registration)
  Napi::Value deregister(const Napi::CallbackInfo& info);
  // (ticket, {backends, preload, …})
  Napi::Value add_backends(const Napi::CallbackInfo& info);
  // (ticket, name, ofPlugin): ParameterSet
  Napi::Value describe_backend(const Napi::CallbackInfo& info);
  // (ticket, {backend, memoryType, keys}): QueryAnswers
  Napi::Value query_memory(const Napi::CallbackInfo& info);
  // (ticket, registrations | undefined)
  Napi::Value local_metadata(const Napi::CallbackInfo& info);
  // (ticket, metadata): the answer or undefined
  Napi::Value add_remote(const Napi::CallbackInfo& info);
  // (ticket, name)
  Napi::Value remove_remote(const Napi::CallbackInfo& info);
  // (ticket, remote | undefined, memoryType, rows, keepsRows): the answer or undefined
  Napi::Value prepare(const Napi::CallbackInfo& info);
  // (ticket, list)
  Napi::Value close_list(const Napi::CallbackInfo& info);
  // (ticket, remote, payload): the answer or undefined
  Napi::Value notify(const Napi::CallbackInfo& info);
  // (ticket, moves | preparedTransfer, askedMs, abortable, notification | undefined): its outcome
  // or undefined
  Napi::Value transfer(const Napi::CallbackInfo& info);
  // (ticket, moves)
  Napi::Value prepare_transfer(const Napi::CallbackInfo& info);
  // (ticket, preparedTransfer)
  Napi::Value close_prepared_transfer(const Napi::CallbackInfo& info);
  // (ticket, preparedTransfer): CostEstimate
  Napi::Value estimate_cost(const Napi::CallbackInfo& info);
  // (transfer): false if its outcome is settled
  Napi::Value abort(const Napi::CallbackInfo& info);
  // (ticket, timeoutMs)
  Napi::Value close(const Napi::CallbackInfo& info);
  // (): [events, more]
  Napi::Value take_events(const Napi::CallbackInfo& info);
  // (): NativeCounters
  Napi::Value counters(const Napi::CallbackInfo& info);
  // (boolean)
  Napi::Value keep_alive(const Napi::CallbackInfo& info);
  // (): after close or a failed start; no events follow
  Napi::Value detach(const Napi::CallbackInfo& info);

  static void on_environment_end(void* agent);
  void detach_from_environment();
  void stop();

  napi_env env_;
  std::shared_ptr<JsEventQueue> events_;
  std::shared_ptr<AgentThread> thread_;
};

}  // namespace kv::nixl
