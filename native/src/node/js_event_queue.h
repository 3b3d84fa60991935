// Carries events from an agent's thread to its JavaScript callback, many in one call, through one thread-safe function.
#pragma once

#include <napi.h>

#include <memory>
#include <mutex>
#include <vector>

#include "agent/event.h"

namespace kv::nixl {

class JsEventQueue : public std::enable_shared_from_this<JsEventQueue> {
 public:
  // On the JavaScript thread. `callback(events)` is handed arrays `[kind, ticket, error, value, from]`.
  static std::shared_ptr<JsEventQueue> open(Napi::Env env, Napi::Function callback);

  // From any thread. After `close` events are dropped: there is nobody left to tell.
  void send(Event event);

  // On the JavaScript thread: whether the process must stay alive for what is still to come.
  void keep_alive(bool alive);
  // On the JavaScript thread, or as its environment ends. Once it returns the function is not called again.
  void close();

 private:
  static void deliver(napi_env env, napi_value callback, void* context, void* data);

  std::mutex mutex_;
  std::vector<Event> events_;
  bool signaled_ = false;
  napi_env env_ = nullptr;  // used on the JavaScript thread only
  napi_threadsafe_function function_ = nullptr;
};

}  // namespace kv::nixl
