#pragma once

#include <napi.h>

#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "events/event.h"
#include "events/notification_backlog.h"

namespace kv::nixl {

// Carries events from an agent's thread to a JavaScript callback, many in one call, through one
// thread-safe function. Peers decide how many notifications come, so these have a limit, and one
// call delivers a part of them.
class JsEventQueue {
 public:
  // On the JavaScript thread. The callback receives an array of
  // `[kind, ticket, error, value, from]`, and whether more are waiting: then it must call `take` in
  // a later turn of the event loop. The queue does not keep the process alive. Throws KV_INTERNAL.
  static std::shared_ptr<JsEventQueue> open(Napi::Env env, Napi::Function callback);

  // From any thread. Events after `close` are dropped, and so are notifications beyond the limits
  // of NotificationBacklog.
  void send(Event event);

  // On the JavaScript thread: the next events, and whether more are waiting.
  std::pair<Napi::Array, bool> take(Napi::Env env);
  // On the JavaScript thread: whether the process must stay alive for events to come.
  void keep_alive(bool alive);
  // On the JavaScript thread, or when its environment ends. The callback is not called after it
  // returns.
  void close();

 private:
  static void deliver(napi_env env, napi_value callback, void* context, void* data);

  std::mutex mutex_;
  std::deque<Event> events_;
  NotificationBacklog backlog_;
  // A call of the callback is scheduled, or JavaScript was told that more are waiting.
  bool signaled_ = false;
  napi_env env_ = nullptr;  // used on the JavaScript thread only
  napi_threadsafe_function function_ = nullptr;
};

}  // namespace kv::nixl
