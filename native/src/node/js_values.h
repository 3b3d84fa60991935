// Values of the addon as JavaScript values, and back.
#pragma once

#include <napi.h>

#include "agent/event.h"

namespace kv::nixl {

// A plain Error with `code` and `hint`; `@kv/nixl` makes a KvError of it.
Napi::Error to_js(Napi::Env env, const Failure& failure);

// `[kind, ticket, error or undefined, value, from]`.
Napi::Value to_js(Napi::Env env, const Event& event);

Napi::Uint8Array to_js(Napi::Env env, const Bytes& bytes);

// Runs what a method does, and throws a Failure of it as a JavaScript error.
template <typename Work>
Napi::Value guarded(Napi::Env env, Work work) {
  try {
    return work();
  } catch (const Failure& failure) {
    throw to_js(env, failure);
  } catch (const Napi::Error&) {
    throw;
  } catch (const std::exception& error) {
    throw to_js(env, Failure("KV_INTERNAL", std::string("native exception: ") + error.what()));
  }
}

// Typed arrays of plain memory; a shared buffer may change under its reader and is refused. Throw Failure.
Napi::Float64Array float64_array(Napi::Value value, const char* code, const char* what);
Napi::Int32Array int32_array(Napi::Value value, const char* code, const char* what);
Bytes bytes_of(Napi::Value value, const char* code, const char* what);

}  // namespace kv::nixl
