#include "node/js_event_queue.h"

#include "node/js_values.h"

namespace kv::nixl {

namespace {

// What one call delivers at most: about a millisecond of the JavaScript thread.
constexpr size_t kMaxBatchEvents = 1024;
constexpr size_t kMaxBatchBytes = 4u << 20;

size_t bytes_of(const Event& event) {
  const auto* bytes = std::get_if<Bytes>(&event.value);
  return bytes == nullptr ? 0 : bytes->size();
}

}  // namespace

std::shared_ptr<JsEventQueue> JsEventQueue::open(Napi::Env env, Napi::Function callback) {
  auto queue = std::make_shared<JsEventQueue>();
  queue->env_ = env;
  auto* context = new std::shared_ptr<JsEventQueue>(queue);
  const napi_status status = napi_create_threadsafe_function(
      env, callback, nullptr, Napi::String::New(env, "kv_nixl agent"), 0, 1, context,
      [](napi_env, void* held, void*) { delete static_cast<std::shared_ptr<JsEventQueue>*>(held); }, context, deliver,
      &queue->function_);
  if (status != napi_ok) {
    delete context;
    throw Failure("KV_INTERNAL", "Node refused a thread-safe function");
  }
  napi_unref_threadsafe_function(env, queue->function_);
  return queue;
}

void JsEventQueue::send(Event event) {
  const std::lock_guard lock(mutex_);
  if (function_ == nullptr) return;
  // What was dropped is reported with the events that are waiting.
  if (event.kind == Event::Kind::notification && !backlog_.admit(event)) return;
  events_.push_back(std::move(event));
  if (signaled_) return;
  signaled_ = napi_call_threadsafe_function(function_, nullptr, napi_tsfn_nonblocking) == napi_ok;
}

void JsEventQueue::keep_alive(bool alive) {
  const std::lock_guard lock(mutex_);
  if (function_ == nullptr) return;
  if (alive) {
    napi_ref_threadsafe_function(env_, function_);
  } else {
    napi_unref_threadsafe_function(env_, function_);
  }
}

void JsEventQueue::close() {
  const std::lock_guard lock(mutex_);
  if (function_ == nullptr) return;
  napi_release_threadsafe_function(function_, napi_tsfn_abort);
  function_ = nullptr;
  events_.clear();
}

std::pair<Napi::Array, bool> JsEventQueue::take(Napi::Env env) {
  std::vector<Event> events;
  bool more = false;
  {
    const std::lock_guard lock(mutex_);
    events = backlog_.take_dropped();
    for (size_t bytes = 0; !events_.empty() && events.size() < kMaxBatchEvents && bytes < kMaxBatchBytes; events_.pop_front()) {
      bytes += bytes_of(events_.front());
      if (events_.front().kind == Event::Kind::notification) backlog_.remove(events_.front());
      events.push_back(std::move(events_.front()));
    }
    more = !events_.empty();
    signaled_ = more;
  }
  const auto array = Napi::Array::New(env, events.size());
  for (uint32_t index = 0; index < events.size(); ++index) {
    const Napi::HandleScope scope(env);
    array.Set(index, to_js(env, events[index]));
  }
  return {array, more};
}

void JsEventQueue::deliver(napi_env raw_env, napi_value callback, void* context, void*) {
  if (raw_env == nullptr || callback == nullptr) return;
  const std::shared_ptr<JsEventQueue> self = *static_cast<std::shared_ptr<JsEventQueue>*>(context);
  const Napi::Env env(raw_env);
  const Napi::HandleScope scope(env);
  try {
    const auto [events, more] = self->take(env);
    if (events.Length() > 0) Napi::Function(env, callback).Call({events, Napi::Boolean::New(env, more)});
  } catch (const Napi::Error& error) {
    // No C++ exception may leave this function. Rethrown, Node reports it as an uncaught exception.
    // While the environment ends, the event loop runs once more without JavaScript, and the error
    // cannot be reported.
    try {
      error.ThrowAsJavaScriptException();
    } catch (const Napi::Error&) {
    }
  }
}

}  // namespace kv::nixl
