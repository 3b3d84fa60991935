#pragma once

#include <napi.h>
#include <string.h>

#include <span>
#include <type_traits>

#include "events/event.h"

namespace kv::nixl {

// Values may differ in type.
template <typename... Values>
Napi::Array array_of(Napi::Env env, const Values&... values) {
  const auto array = Napi::Array::New(env, sizeof...(values));
  uint32_t index = 0;
  (array.Set(index++, values), ...);
  return array;
}

inline Napi::Value to_js(Napi::Env env, double number) { return Napi::Number::New(env, number); }
inline Napi::Value to_js(Napi::Env env, const string& text) { return Napi::String::New(env, text); }
inline Napi::Value to_js(Napi::Env env, const Bytes& bytes) {
  Napi::Uint8Array array = Napi::Uint8Array::New(env, bytes.size());
  if (!bytes.empty()) memcpy(array.Data(), bytes.data(), bytes.size());
  return array;
}
inline Napi::Value to_js(Napi::Env env, const std::pair<string, string>& variable) {
  return array_of(env, variable.first, variable.second);
}
template <typename Items>
Napi::Array array_of_each(Napi::Env env, const Items& items) {
  const auto array = Napi::Array::New(env, items.size());
  for (uint32_t index = 0; index < items.size(); ++index)
    array.Set(index, to_js(env, items[index]));
  return array;
}
inline Napi::Value to_js(Napi::Env env, const EventValue& value) {
  return std::visit(
      [&](const auto& value) -> Napi::Value {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::monostate>)
          return env.Undefined();
        else if constexpr (std::is_same_v<T, vector<double>>)
          return array_of_each(env, value);
        else
          return to_js(env, value);
      },
      value);
}
// An Error with `code` and `hint`. @kv/nixl turns it into a KvError.
inline Napi::Error to_js(Napi::Env env, const Failure& failure) {
  Napi::Error error = Napi::Error::New(env, failure.message);
  error.Set("code", Napi::String::New(env, failure.code));
  if (!failure.hint.empty()) error.Set("hint", Napi::String::New(env, failure.hint));
  return error;
}
// `[kind, ticket, error or undefined, value, from]`.
inline Napi::Value to_js(Napi::Env env, const Event& event) {
  return array_of(env, static_cast<int>(event.kind), static_cast<double>(event.ticket),
                  event.failure ? to_js(env, *event.failure).Value() : env.Undefined(),
                  to_js(env, event.value),
                  event.from.empty() ? env.Undefined() : to_js(env, event.from));
}

// Throws the work's Failure as a JavaScript error.
template <typename Work>
Napi::Value with_js_errors(Napi::Env env, Work work) {
  try {
    return work();
  } catch (const Failure& failure) {
    throw to_js(env, failure);
  } catch (const Napi::Error&) {
    throw;
  } catch (const std::exception& error) {
    throw to_js(env, Failure("KV_INTERNAL", string("native exception: ") + error.what()));
  }
}

template <typename T>
using Numbers = std::span<const T>;

// Throws a Failure with `code`. One call of Node-API tells most; each takes 20 to 50 ns.
template <typename T>
Numbers<T> typed_array(Napi::Value value, napi_typedarray_type wanted, const char* code,
                       const char* name, const char* expected) {
  napi_typedarray_type type{};
  void* data = nullptr;
  size_t length = 0;
  napi_value buffer = nullptr;
  const napi_status status =
      napi_get_typedarray_info(value.Env(), value, &type, &length, &data, &buffer, nullptr);
  if (status != napi_ok || type != wanted)
    throw Failure(code, string(name) + " must be a " + expected);
  // Shared memory may change during the read. A resizable buffer cannot.
  bool plain = false;
  if (napi_is_arraybuffer(value.Env(), buffer, &plain) != napi_ok || !plain)
    throw Failure(code, string(name) + " must not be in shared memory");
  return {static_cast<const T*>(data), length};
}

inline Numbers<double> float64_array(Napi::Value value, const char* code, const char* name) {
  return typed_array<double>(value, napi_float64_array, code, name, "Float64Array");
}
inline Bytes bytes_of(Napi::Value value, const char* code, const char* name) {
  const auto bytes = typed_array<uint8_t>(value, napi_uint8_array, code, name, "Uint8Array");
  return Bytes(bytes.begin(), bytes.end());
}

// native.ts of @kv/nixl has the arguments' shapes. All throw a Failure that names the value.
inline void read(Napi::Value value, bool& to) { to = value.ToBoolean(); }
// A ticket, an address or a length: below 2^53.
inline void read(Napi::Value value, uint64_t& to) {
  to = static_cast<uint64_t>(value.As<Napi::Number>().Int64Value());
}
// A path, key or parameter.
inline void read(Napi::Value value, string& to) {
  to = value.As<Napi::String>().Utf8Value();
  if (to.find('\0') != string::npos)
    throw Failure("KV_AGENT_INVALID", "a parameter or path contains NUL");
}
// The rows of a list.
inline void read(Napi::Value value, Numbers<double>& to) {
  to = float64_array(value, "KV_LIST_INVALID", "rows");
}
inline void read(Napi::Value value, std::pair<string, string>& to) {
  const auto pair = value.As<Napi::Array>();
  read(pair.Get(0u), to.first);
  read(pair.Get(1u), to.second);
}
template <typename T>
void read(Napi::Value value, vector<T>& to) {
  const auto array = value.As<Napi::Array>();
  for (uint32_t index = 0; index < array.Length(); ++index)
    read(array.Get(index), to.emplace_back());
}
template <typename T>
void read(Napi::Value value, optional<T>& to) {
  if (!value.IsUndefined()) read(value, to.emplace());
}

}  // namespace kv::nixl
