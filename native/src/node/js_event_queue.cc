#include "node/js_event_queue.h"

#include "node/js_values.h"

namespace kv::nixl {

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

void JsEventQueue::deliver(napi_env raw_env, napi_value callback, void* context, void*) {
  if (raw_env == nullptr || callback == nullptr) return;
  const std::shared_ptr<JsEventQueue> self = *static_cast<std::shared_ptr<JsEventQueue>*>(context);
  std::vector<Event> events;
  {
    const std::lock_guard lock(self->mutex_);
    self->signaled_ = false;
    events.swap(self->events_);
  }
  if (events.empty()) return;
  const Napi::Env env(raw_env);
  const Napi::HandleScope scope(env);
  try {
    const auto array = Napi::Array::New(env, events.size());
    for (uint32_t index = 0; index < events.size(); ++index) array.Set(index, to_js(env, events[index]));
    Napi::Function(env, callback).Call({array});
  } catch (const Napi::Error& error) {
    // No C++ exception may leave this function. Rethrown, Node reports it as an uncaught exception. While the environment ends, the event loop
    // runs once more without JavaScript, and the error cannot be reported.
    try {
      error.ThrowAsJavaScriptException();
    } catch (const Napi::Error&) {
    }
  }
}

}  // namespace kv::nixl
