// Converts the addon's values to JavaScript's, and back.
#pragma once

#include <napi.h>

#include <cstdint>
#include <span>

#include "events/event.h"

namespace kv::nixl {

// An Error with `code` and `hint`, of which @kv/nixl makes a KvError.
Napi::Error to_js(Napi::Env env, const Failure& failure);

// `[kind, ticket, error or undefined, value, from]`.
Napi::Value to_js(Napi::Env env, const Event& event);

// The value that a command returns, or that an event has.
Napi::Value to_js(Napi::Env env, const EventValue& value);

// A copy of the bytes.
Napi::Uint8Array to_js(Napi::Env env, const Bytes& bytes);

// Runs the body of a method. Throws its Failure as a JavaScript error.
template <typename Work>
Napi::Value with_js_errors(Napi::Env env, Work work) {
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

// Typed arrays. They throw a Failure with `code` for another type and for shared memory, which
// could change while it is read. `name` names the argument in the message.
template <typename T>
using Numbers = std::span<const T>;
Numbers<double> float64_array(Napi::Value value, const char* code, const char* name);
Numbers<int32_t> int32_array(Napi::Value value, const char* code, const char* name);
// A copy of a Uint8Array.
Bytes bytes_of(Napi::Value value, const char* code, const char* name);

}  // namespace kv::nixl
