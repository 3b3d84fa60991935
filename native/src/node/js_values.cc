#include "node/js_values.h"

#include <string.h>

#include <iterator>
#include <type_traits>

namespace kv::nixl {

Napi::Error to_js(Napi::Env env, const Failure& failure) {
  Napi::Error error = Napi::Error::New(env, failure.message);
  error.Set("code", Napi::String::New(env, failure.code));
  if (!failure.hint.empty()) error.Set("hint", Napi::String::New(env, failure.hint));
  return error;
}

Napi::Uint8Array to_js(Napi::Env env, const Bytes& bytes) {
  Napi::Uint8Array array = Napi::Uint8Array::New(env, bytes.size());
  if (!bytes.empty()) memcpy(array.Data(), bytes.data(), bytes.size());
  return array;
}

Napi::Value to_js(Napi::Env env, const Event& event) {
  const auto entry = Napi::Array::New(env, 5);
  entry.Set(0u, Napi::Number::New(env, static_cast<int>(event.kind)));
  entry.Set(1u, Napi::Number::New(env, static_cast<double>(event.ticket)));
  entry.Set(2u, event.failure ? to_js(env, *event.failure).Value() : env.Undefined());
  entry.Set(3u, std::visit(
                    [&](const auto& value) -> Napi::Value {
                      using T = std::decay_t<decltype(value)>;
                      if constexpr (std::is_same_v<T, double>) {
                        return Napi::Number::New(env, value);
                      } else if constexpr (std::is_same_v<T, std::string>) {
                        return Napi::String::New(env, value);
                      } else if constexpr (std::is_same_v<T, Bytes>) {
                        return to_js(env, value);
                      } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
                        const auto names = Napi::Array::New(env, value.size());
                        for (uint32_t index = 0; index < value.size(); ++index) names.Set(index, value[index]);
                        return names;
                      } else if constexpr (std::is_same_v<T, TransferOutcome>) {
                        const double numbers[] = {value.length_bytes, value.descriptor_count, value.merged_count, value.prepare_ms,
                                                  value.make_ms,      value.post_ms,          value.transfer_ms};
                        const auto outcome = Napi::Array::New(env, std::size(numbers));
                        for (uint32_t index = 0; index < std::size(numbers); ++index) outcome.Set(index, numbers[index]);
                        return outcome;
                      } else {
                        return env.Undefined();
                      }
                    },
                    event.value));
  entry.Set(4u, event.from.empty() ? env.Undefined() : Napi::String::New(env, event.from).As<Napi::Value>());
  return entry;
}

namespace {

Napi::TypedArray typed_array(Napi::Value value, napi_typedarray_type type, const char* code, const char* name,
                             const char* expected) {
  if (!value.IsTypedArray() || value.As<Napi::TypedArray>().TypedArrayType() != type) {
    throw Failure(code, std::string(name) + " must be a " + expected);
  }
  const auto array = value.As<Napi::TypedArray>();
  // Shared memory may change while it is read. A resizable buffer cannot: it is copied within the call.
  if (!array.ArrayBuffer().IsArrayBuffer()) throw Failure(code, std::string(name) + " must not be in shared memory");
  return array;
}

}  // namespace

Napi::Float64Array float64_array(Napi::Value value, const char* code, const char* name) {
  return typed_array(value, napi_float64_array, code, name, "Float64Array").As<Napi::Float64Array>();
}

Napi::Int32Array int32_array(Napi::Value value, const char* code, const char* name) {
  return typed_array(value, napi_int32_array, code, name, "Int32Array").As<Napi::Int32Array>();
}

Bytes bytes_of(Napi::Value value, const char* code, const char* name) {
  const auto array = typed_array(value, napi_uint8_array, code, name, "Uint8Array").As<Napi::Uint8Array>();
  return Bytes(array.Data(), array.Data() + array.ElementLength());
}

}  // namespace kv::nixl
