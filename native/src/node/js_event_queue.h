#pragma once

#include <napi.h>

#include <deque>

#include "events/event.h"
#include "node/js_values.h"

namespace kv::nixl {

inline size_t bytes_of(const Event& event) {
  const auto* bytes = std::get_if<Bytes>(&event.value);
  return bytes == nullptr ? 0 : bytes->size();
}

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
  bool admit(const Event& notification) {
    const size_t size = bytes_of(notification);
    const auto fits = [size](const Share& share, size_t parts) {
      return share.count < kMaxCount / parts && share.bytes + size <= kMaxBytes / parts;
    };
    const auto known = waiting_.find(notification.from);
    // A single notification of any length fits its sender's part.
    const bool sender_fits = known == waiting_.end() || fits(known->second, kSenderParts);
    if (!fits(all_, 1) || !sender_fits) {
      const bool named = dropped_.size() < kMaxNamed || dropped_.contains(notification.from);
      ++dropped_[named ? notification.from : string()];
      return false;
    }
    for (Share* share : {&waiting_[notification.from], &all_}) {
      ++share->count;
      share->bytes += size;
    }
    return true;
  }
  void remove(const Event& notification) {
    const auto found = waiting_.find(notification.from);
    for (Share* share : {&all_, &found->second}) {
      --share->count;
      share->bytes -= bytes_of(notification);
    }
    if (found->second.count == 0) waiting_.erase(found);
  }
  // Counts per sender. Senders beyond the first 64 share one event without a name.
  vector<Event> take_dropped() {
    vector<Event> events;
    for (auto& [from, count] : std::exchange(dropped_, {})) {
      events.push_back(
          {.kind = Event::Kind::dropped, .value = static_cast<double>(count), .from = from});
    }
    return events;
  }

 private:
  // Senders that a report names.
  static constexpr size_t kMaxNamed = 64;

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
  static shared_ptr<JsEventQueue> open(Napi::Env env, Napi::Function callback) {
    auto queue = make_shared<JsEventQueue>();
    queue->env_ = env;
    auto* context = new shared_ptr<JsEventQueue>(queue);
    const napi_status status = napi_create_threadsafe_function(
        env, callback, nullptr, Napi::String::New(env, "kv_nixl agent"), 0, 1, context,
        [](napi_env, void* held, void*) { delete static_cast<shared_ptr<JsEventQueue>*>(held); },
        context, deliver, &queue->function_);
    if (status != napi_ok) {
      delete context;
      throw Failure("KV_INTERNAL", "Node refused a thread-safe function");
    }
    napi_unref_threadsafe_function(env, queue->function_);
    return queue;
  }

  // From any thread. Drops events after `close`, and notifications beyond the limits. When the
  // first notification waits, an event without a value says so.
  void send(Event event) {
    const lock_guard lock(mutex_);
    if (function_ == nullptr) return;
    if (event.kind != Event::Kind::notification) {
      events_.push_back(std::move(event));
    } else if (backlog_.admit(event)) {
      try {
        notifications_.push_back(std::move(event));
      } catch (...) {
        backlog_.remove(event);
        throw;
      }
      if (notifications_.size() > 1) return;
      events_.push_back({.kind = Event::Kind::notification});
    }
    // Otherwise `take` reports what was dropped.
    if (signaled_) return;
    signaled_ = napi_call_threadsafe_function(function_, nullptr, napi_tsfn_nonblocking) == napi_ok;
  }

  // On the JavaScript thread: the next events, and whether more wait.
  Napi::Array take(Napi::Env env) {
    vector<Event> events;
    bool more = false;
    {
      const lock_guard lock(mutex_);
      events = backlog_.take_dropped();
      for (; !events_.empty() && events.size() < kMaxBatchEvents; events_.pop_front()) {
        events.push_back(std::move(events_.front()));
      }
      more = !events_.empty();
      signaled_ = more;
    }
    return array_of(env, array_of_each(env, events), Napi::Boolean::New(env, more));
  }
  // On the JavaScript thread: the next notifications, and whether more wait.
  Napi::Array take_notifications(Napi::Env env) {
    vector<Event> taken;
    bool more = false;
    {
      const lock_guard lock(mutex_);
      for (size_t bytes = 0;
           !notifications_.empty() && taken.size() < kMaxBatchEvents && bytes < kMaxBatchBytes;
           notifications_.pop_front()) {
        taken.push_back(std::move(notifications_.front()));
        bytes += bytes_of(taken.back());
        backlog_.remove(taken.back());
      }
      more = !notifications_.empty();
    }
    return array_of(env, array_of_each(env, taken), Napi::Boolean::New(env, more));
  }
  // On the JavaScript thread: whether coming events keep the process alive.
  void keep_alive(bool alive) {
    const lock_guard lock(mutex_);
    if (function_ == nullptr) return;
    if (alive) {
      napi_ref_threadsafe_function(env_, function_);
    } else {
      napi_unref_threadsafe_function(env_, function_);
    }
  }
  // On the JavaScript thread, or when its environment ends. The callback is not called afterwards.
  void close() {
    const lock_guard lock(mutex_);
    if (function_ == nullptr) return;
    napi_release_threadsafe_function(function_, napi_tsfn_abort);
    function_ = nullptr;
    events_.clear();
    notifications_.clear();
  }

 private:
  // Limits per call: about a millisecond of the JavaScript thread.
  static constexpr size_t kMaxBatchEvents = 1024;
  static constexpr size_t kMaxBatchBytes = 4u << 20;

  static void deliver(napi_env raw_env, napi_value callback, void* context, void*) {
    if (raw_env == nullptr || callback == nullptr) return;
    const shared_ptr<JsEventQueue> self = *static_cast<shared_ptr<JsEventQueue>*>(context);
    const Napi::Env env(raw_env);
    const Napi::HandleScope scope(env);
    try {
      const auto taken = self->take(env);
      Napi::Function(env, callback).Call({taken.Get(0u), taken.Get(1u)});
    } catch (const Napi::Error& error) {
      // No C++ exception may leave this function. Node reports a rethrown one as uncaught, but an
      // ending environment's last turn runs no JavaScript and cannot report it.
      try {
        error.ThrowAsJavaScriptException();
      } catch (const Napi::Error&) {
      }
    }
  }

  std::mutex mutex_;
  std::deque<Event> events_;
  // Until their reader asks for them.
  std::deque<Event> notifications_;
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
    if (keeping_)
      kept_.push_back(std::move(event));
    else
      queue_->send(std::move(event));
  }
  void keep() { keeping_ = true; }
  // Takes the ticket's answer from the kept events: success, or a failure that leaves nothing
  // behind. None for a failed transfer, whose release is another event.
  optional<Event> take_answer(uint64_t ticket) {
    for (auto at = kept_.begin(); at != kept_.end(); ++at) {
      const bool is_answer =
          at->kind == Event::Kind::settled || (at->kind == Event::Kind::done && !at->failure);
      if (at->ticket != ticket || !is_answer) continue;
      Event answer = std::move(*at);
      kept_.erase(at);
      return answer;
    }
    return nullopt;
  }
  // Sends kept and later events.
  void send_kept() {
    keeping_ = false;
    for (Event& event : std::exchange(kept_, {})) queue_->send(std::move(event));
  }

 private:
  const shared_ptr<JsEventQueue> queue_;
  bool keeping_ = false;
  vector<Event> kept_;
};

}  // namespace kv::nixl
