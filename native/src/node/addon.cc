// The addon's exports; see NativeAddon in native.ts of @kv/nixl, the only package that uses them.
#include <napi.h>

#include "node/agent_object.h"
#include "node/device_memory_object.h"
#include "library/descriptors.h"
#include "library/environment.h"
#include "library/exit_guard.h"
#include "library/nixl_library.h"
#include "node/js_values.h"
#include "node/memory_object.h"

namespace {

// `prepareEnvironment(variables: [name, value][]): [name, value][] | undefined`: returns the
// defaults that it set; undefined if it must wait.
Napi::Value prepare(const Napi::CallbackInfo& info) {
  kv::nixl::Variables variables;
  const auto wanted = info[0].As<Napi::Array>();
  for (uint32_t index = 0; index < wanted.Length(); ++index) {
    const auto pair = wanted.Get(index).As<Napi::Array>();
    variables.emplace_back(pair.Get(0u).ToString().Utf8Value(), pair.Get(1u).ToString().Utf8Value());
  }
  const auto set = kv::nixl::prepare_environment(variables);
  if (!set) return info.Env().Undefined();
  const auto answer = Napi::Array::New(info.Env(), set->size());
  for (uint32_t index = 0; index < set->size(); ++index) {
    const auto pair = Napi::Array::New(info.Env(), 2);
    pair.Set(0u, set->at(index).first);
    pair.Set(1u, set->at(index).second);
    answer.Set(index, pair);
  }
  return answer;
}

// `stopAll()`: for the exit of the process. Blocks until all agents' threads have ended, for two
// seconds at most.
Napi::Value stop_all(const Napi::CallbackInfo& info) { return Napi::Boolean::New(info.Env(), kv::nixl::stop_all_threads()); }

// `isLoaded()`: whether NIXL has been loaded, so that it no longer sees variables that are set.
Napi::Value is_loaded(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), kv::nixl::NixlLibrary::loaded());
}

// `addressOf(bytes: Uint8Array): number`: where the bytes are, also those of a SharedArrayBuffer. A
// buffer that is not shared may move.
Napi::Value address_of(const Napi::CallbackInfo& info) {
  void* data = nullptr;
  napi_get_typedarray_info(info.Env(), info[0], nullptr, nullptr, &data, nullptr, nullptr);
  return Napi::Number::New(info.Env(), static_cast<double>(reinterpret_cast<uintptr_t>(data)));
}

// `requireDescriptors(needed, what)`: throws KV_TRANSPORT_UNAVAILABLE when fewer file descriptors
// are free.
Napi::Value require_free(const Napi::CallbackInfo& info) {
  return kv::nixl::with_js_errors(info.Env(), [&] {
    kv::nixl::require_descriptors(info[0].ToNumber().Uint32Value(), info[1].ToString().Utf8Value().c_str());
    return info.Env().Undefined();
  });
}

Napi::Object initialize(Napi::Env env, Napi::Object exports) {
  exports.Set("Agent", kv::nixl::AgentObject::define(env));
  exports.Set("Memory", kv::nixl::MemoryObject::define(env));
  exports.Set("DeviceMemory", kv::nixl::DeviceMemoryObject::define(env));
  exports.Set("prepareEnvironment", Napi::Function::New(env, prepare, "prepareEnvironment"));
  exports.Set("addressOf", Napi::Function::New(env, address_of, "addressOf"));
  exports.Set("isLoaded", Napi::Function::New(env, is_loaded, "isLoaded"));
  exports.Set("requireDescriptors", Napi::Function::New(env, require_free, "requireDescriptors"));
  exports.Set("stopAll", Napi::Function::New(env, stop_all, "stopAll"));
  return exports;
}

}  // namespace

NODE_API_MODULE(kv_nixl, initialize)
