// The module: two classes and three functions. Everything that JavaScript sees of NIXL goes through `@kv/nixl`.
#include <napi.h>

#include "node/agent_object.h"
#include "library/environment.h"
#include "library/exit_guard.h"
#include "library/nixl_library.h"
#include "node/memory_object.h"

namespace {

// `prepareEnvironment(variables: [name, value][]): [name, value][]`: the defaults that were set.
Napi::Value prepare(const Napi::CallbackInfo& info) {
  kv::nixl::Variables variables;
  const auto given = info[0].As<Napi::Array>();
  for (uint32_t index = 0; index < given.Length(); ++index) {
    const auto pair = given.Get(index).As<Napi::Array>();
    variables.emplace_back(pair.Get(0u).ToString().Utf8Value(), pair.Get(1u).ToString().Utf8Value());
  }
  const auto set = kv::nixl::prepare_environment(variables);
  const auto answer = Napi::Array::New(info.Env(), set.size());
  for (uint32_t index = 0; index < set.size(); ++index) {
    const auto pair = Napi::Array::New(info.Env(), 2);
    pair.Set(0u, set[index].first);
    pair.Set(1u, set[index].second);
    answer.Set(index, pair);
  }
  return answer;
}

// `stopAll()`: for the process's exit. Blocks while agents let go.
Napi::Value stop(const Napi::CallbackInfo& info) { return Napi::Boolean::New(info.Env(), kv::nixl::stop_all()); }

// `isLoaded()`: whether NIXL has been loaded, so that variables come too late.
Napi::Value is_loaded(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), kv::nixl::NixlLibrary::loaded());
}

Napi::Object initialize(Napi::Env env, Napi::Object exports) {
  exports.Set("Agent", kv::nixl::AgentObject::define(env));
  exports.Set("Memory", kv::nixl::MemoryObject::define(env));
  exports.Set("prepareEnvironment", Napi::Function::New(env, prepare, "prepareEnvironment"));
  exports.Set("isLoaded", Napi::Function::New(env, is_loaded, "isLoaded"));
  exports.Set("stopAll", Napi::Function::New(env, stop, "stopAll"));
  return exports;
}

}  // namespace

NODE_API_MODULE(kv_nixl, initialize)
