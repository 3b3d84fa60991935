#include "node/js_values.h"

#include <string.h>

#include <iterator>
#include <type_traits>

namespace kv::nixl {

namespace {

// An array of pairs.
Napi::Array to_js(Napi::Env env, const Parameters& parameters) {
  const auto array = Napi::Array::New(env, parameters.size());
  for (uint32_t index = 0; index < parameters.size(); ++index) {
    const auto pair = Napi::Array::New(env, 2);
    pair.Set(0u, parameters[index].first);
    pair.Set(1u, parameters[index].second);
    array.Set(index, pair);
  }
  return array;
}

Napi::Array to_js(Napi::Env env, const std::vector<double>& numbers) {
  const auto array = Napi::Array::New(env, numbers.size());
  for (uint32_t index = 0; index < numbers.size(); ++index) array.Set(index, numbers[index]);
  return array;
}

}  // namespace

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

Napi::Value to_js(Napi::Env env, const EventValue& value) {
  return std::visit(
      [&](const auto& value) -> Napi::Value {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, double>) {
          return Napi::Number::New(env, value);
        } else if constexpr (std::is_same_v<T, std::string>) {
          return Napi::String::New(env, value);
        } else if constexpr (std::is_same_v<T, Bytes>) {
          return to_js(env, value);
        } else if constexpr (std::is_same_v<T, ParameterSet>) {
          const auto types = Napi::Array::New(env, value.memory_types.size());
          for (uint32_t index = 0; index < value.memory_types.size(); ++index) types.Set(index, value.memory_types[index]);
          const auto set = Napi::Array::New(env, 2);
          set.Set(0u, types);
          set.Set(1u, to_js(env, value.parameters));
          return set;
        } else if constexpr (std::is_same_v<T, QueryAnswers>) {
          const auto answers = Napi::Array::New(env, value.size());
          for (uint32_t index = 0; index < value.size(); ++index) {
            if (value[index]) answers.Set(index, to_js(env, *value[index]));
            else answers.Set(index, env.Undefined());
          }
          return answers;
        } else if constexpr (std::is_same_v<T, CostEstimate>) {
          return to_js(env, std::vector<double>{value.duration_us, value.margin_us, value.known ? 1.0 : 0.0});
        } else if constexpr (std::is_same_v<T, TransferOutcome>) {
          const auto& telemetry = value.telemetry;
          std::vector<double> numbers{value.length_bytes, value.descriptor_count, value.merged_count, value.prepare_ms,
                                      value.make_ms,      value.post_ms,          value.transfer_ms};
          if (telemetry) {
            for (const double number : {telemetry->length_bytes, telemetry->descriptor_count, telemetry->post_us, telemetry->transfer_us}) {
              numbers.push_back(number);
            }
          }
          return to_js(env, numbers);
        } else {
          return env.Undefined();
        }
      },
      value);
}

Napi::Value to_js(Napi::Env env, const Event& event) {
  const auto entry = Napi::Array::New(env, 5);
  entry.Set(0u, Napi::Number::New(env, static_cast<int>(event.kind)));
  entry.Set(1u, Napi::Number::New(env, static_cast<double>(event.ticket)));
  entry.Set(2u, event.failure ? to_js(env, *event.failure).Value() : env.Undefined());
  entry.Set(3u, to_js(env, event.value));
  entry.Set(4u, event.from.empty() ? env.Undefined() : Napi::String::New(env, event.from).As<Napi::Value>());
  return entry;
}

namespace {

// One call of Node-API tells most: each takes 20 to 50 ns.
template <typename T>
Numbers<T> typed_array(Napi::Value value, napi_typedarray_type wanted, const char* code, const char* name, const char* expected) {
  napi_typedarray_type type{};
  void* data = nullptr;
  size_t length = 0;
  napi_value buffer = nullptr;
  const napi_status status = napi_get_typedarray_info(value.Env(), value, &type, &length, &data, &buffer, nullptr);
  if (status != napi_ok || type != wanted) throw Failure(code, std::string(name) + " must be a " + expected);
  // Shared memory may change while it is read. A resizable buffer cannot: it is copied within the
  // call.
  bool plain = false;
  if (napi_is_arraybuffer(value.Env(), buffer, &plain) != napi_ok || !plain) throw Failure(code, std::string(name) + " must not be in shared memory");
  return {static_cast<const T*>(data), length};
}

}  // namespace

Numbers<double> float64_array(Napi::Value value, const char* code, const char* name) {
  return typed_array<double>(value, napi_float64_array, code, name, "Float64Array");
}

Numbers<int32_t> int32_array(Napi::Value value, const char* code, const char* name) {
  return typed_array<int32_t>(value, napi_int32_array, code, name, "Int32Array");
}

Bytes bytes_of(Napi::Value value, const char* code, const char* name) {
  const auto bytes = typed_array<uint8_t>(value, napi_uint8_array, code, name, "Uint8Array");
  return Bytes(bytes.begin(), bytes.end());
}

}  // namespace kv::nixl
