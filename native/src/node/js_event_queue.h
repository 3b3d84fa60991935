#pragma once

#include <napi.h>

#include <deque>

#include "events/event.h"

namespace kv::nixl {

// Bounds and counts the notifications that wait for JavaScript, in total and per sender, so that no
// peer crowds out others. Senders state their own names, so one may use many.
class NotificationBacklog {
 public:
  // Notifications and bytes that may wait.
  static constexpr size_t kMaxCount = 65'536;
  static constexpr size_t kMaxBytes = 64u << 20;
  // One sender's part of each.
  static constexpr size_t kSenderParts = 4;

  // False if it must be dropped.
  bool admit(const Event& notification);
  void remove(const Event& notification);
  // Counts per sender. Senders beyond the first 64 share one event without a name.
  vector<Event> take_dropped();

 private:
  struct Share {
    size_t count = 0;
    size_t bytes = 0;
  };

  Share all_;
  unordered_map<string, Share> waiting_;
  unordered_map<string, uint64_t> dropped_;
};

// Carries events from an agent's thread to a JavaScript callback, many per call. Notifications have
// limits, since peers decide how many come.
class JsEventQueue {
 public:
  // On the JavaScript thread. The callback receives an array of `[kind, ticket, error, value,
  // from]`, and whether more wait: then it must call `take` in a later turn of the event loop. Does
  // not keep the process alive. Throws KV_INTERNAL.
  static shared_ptr<JsEventQueue> open(Napi::Env env, Napi::Function callback);

  // From any thread. Drops events after `close`, and notifications beyond the limits.
  void send(Event event);

  // On the JavaScript thread: the next events, and whether more wait.
  Napi::Array take(Napi::Env env);
  // On the JavaScript thread: whether coming events keep the process alive.
  void keep_alive(bool alive);
  // On the JavaScript thread, or when its environment ends. The callback is not called afterwards.
  void close();

 private:
  static void deliver(napi_env env, napi_value callback, void* context, void* data);

  std::mutex mutex_;
  std::deque<Event> events_;
  NotificationBacklog backlog_;
  // The callback is scheduled, or JavaScript knows that more wait.
  bool signaled_ = false;
  napi_env env_ = nullptr;  // for the JavaScript thread only
  napi_threadsafe_function function_ = nullptr;
};

// For the thread that has the agent's turn. While the JavaScript thread makes a call itself, events
// are kept as the call's answer.
class EventSender {
 public:
  explicit EventSender(shared_ptr<JsEventQueue> queue) : queue_(std::move(queue)) {}

  void send(Event event) {
    if (keeping_) kept_.push_back(std::move(event));
    else queue_->send(std::move(event));
  }
  void keep() { keeping_ = true; }
  // Takes the ticket's answer from the kept events: success, or a failure that leaves nothing
  // behind. None for a failed transfer, whose release is another event.
  optional<Event> take_answer(uint64_t ticket);
  // Sends kept and later events.
  void send_kept();

 private:
  const shared_ptr<JsEventQueue> queue_;
  bool keeping_ = false;
  vector<Event> kept_;
};

}  // namespace kv::nixl
