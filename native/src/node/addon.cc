// The addon's exports, for @kv/nixl only. See NativeAddon in its native.ts.
#include <napi.h>

#include "node/agent_object.h"
#include "library/descriptors.h"
#include "library/environment.h"
#include "library/exit_guard.h"
#include "library/nixl_library.h"
#include "repairs/repair.h"
#include "node/js_values.h"
#include "node/memory_object.h"

namespace kv::nixl {

namespace {

// `prepareEnvironment(variables: [name, value][]): [name, value][] | undefined`: the defaults that
// it set; undefined if it must wait.
Napi::Value prepare(const Napi::CallbackInfo& info) {
  Variables variables;
  read(info[0], variables);
  const auto set = prepare_environment(variables);
  return set ? array_of_each(info.Env(), *set) : info.Env().Undefined();
}

// `repairs(): [name, state, why][]`
Napi::Value repairs(const Napi::CallbackInfo& info) {
  constexpr const char* kStates[] = {"waiting", "holds", "off", "failed"};
  const auto answer = Napi::Array::New(info.Env());
  for (const Repair* const repair : all_repairs()) {
    const char* const state = kStates[static_cast<size_t>(repair->state())];
    answer.Set(answer.Length(), array_of(info.Env(), repair->name, state, repair->why()));
  }
  return answer;
}

// `stopAll()`: waits up to 2 s for all agents' threads.
Napi::Value stop_all(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), stop_all_threads());
}

// `isLoaded()`: whether NIXL no longer sees new variables.
Napi::Value is_loaded(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), is_nixl_loaded());
}

// `addressOf(bytes: Uint8Array): number`, also for a SharedArrayBuffer. An unshared buffer may
// move.
Napi::Value address_of(const Napi::CallbackInfo& info) {
  void* data = nullptr;
  napi_get_typedarray_info(info.Env(), info[0], nullptr, nullptr, &data, nullptr, nullptr);
  return Napi::Number::New(info.Env(), static_cast<double>(reinterpret_cast<uintptr_t>(data)));
}

// `requireDescriptors(needed, what)`: throws KV_TRANSPORT_UNAVAILABLE when fewer file descriptors
// are free.
Napi::Value require_free(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    require_descriptors(info[0].ToNumber().Uint32Value(), info[1].ToString().Utf8Value().c_str());
    return info.Env().Undefined();
  });
}

Napi::Object initialize(Napi::Env env, Napi::Object exports) {
  exports.Set("Agent", AgentObject::define(env));
  exports.Set("Memory", MemoryObject::define(env));
  exports.Set("prepareEnvironment", Napi::Function::New(env, prepare, "prepareEnvironment"));
  exports.Set("addressOf", Napi::Function::New(env, address_of, "addressOf"));
  exports.Set("isLoaded", Napi::Function::New(env, is_loaded, "isLoaded"));
  exports.Set("repairs", Napi::Function::New(env, repairs, "repairs"));
  exports.Set("requireDescriptors", Napi::Function::New(env, require_free, "requireDescriptors"));
  exports.Set("stopAll", Napi::Function::New(env, stop_all, "stopAll"));
  return exports;
}

}  // namespace

}  // namespace kv::nixl

using kv::nixl::initialize;
NODE_API_MODULE(kv_nixl, initialize)
