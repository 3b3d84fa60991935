#pragma once

#include <napi.h>

#include <memory>
#include <mutex>
#include <vector>

#include "agent/event.h"

namespace kv::nixl {

// Carries events from an agent's thread to a JavaScript callback, many in one call, through one thread-safe function.
class JsEventQueue {
 public:
  // On the JavaScript thread. The callback receives an array of `[kind, ticket, error, value, from]`. The queue does not keep the process alive.
  // Throws KV_INTERNAL.
  static std::shared_ptr<JsEventQueue> open(Napi::Env env, Napi::Function callback);

  // From any thread. Events after `close` are dropped.
  void send(Event event);

  // On the JavaScript thread: whether the process must stay alive for events to come.
  void keep_alive(bool alive);
  // On the JavaScript thread, or when its environment ends. The callback is not called after it returns.
  void close();

 private:
  static void deliver(napi_env env, napi_value callback, void* context, void* data);

  std::mutex mutex_;
  std::vector<Event> events_;
  // A call of the callback is scheduled.
  bool signaled_ = false;
  napi_env env_ = nullptr;  // used on the JavaScript thread only
  napi_threadsafe_function function_ = nullptr;
};

}  // namespace kv::nixl
