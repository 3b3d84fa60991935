#pragma once

#include <napi.h>

#include <span>

#include "agent/agent_thread.h"
#include "events/event.h"

namespace kv::nixl {

// An Error with `code` and `hint`. @kv/nixl turns it into a KvError.
Napi::Error to_js(Napi::Env env, const Failure& failure);
// `[kind, ticket, error or undefined, value, from]`.
Napi::Value to_js(Napi::Env env, const Event& event);
Napi::Value to_js(Napi::Env env, const EventValue& value);
Napi::Value to_js(Napi::Env env, double number);
Napi::Value to_js(Napi::Env env, const string& text);
Napi::Value to_js(Napi::Env env, const Bytes& bytes);

// Values may differ in type.
template <typename... Values>
Napi::Array array_of(Napi::Env env, const Values&... values) {
  const auto array = Napi::Array::New(env, sizeof...(values));
  uint32_t index = 0;
  (array.Set(index++, values), ...);
  return array;
}
inline Napi::Value to_js(Napi::Env env, const std::pair<string, string>& variable) {
  return array_of(env, variable.first, variable.second);
}
template <typename Items>
Napi::Array array_of_each(Napi::Env env, const Items& items) {
  const auto array = Napi::Array::New(env, items.size());
  for (uint32_t index = 0; index < items.size(); ++index) array.Set(index, to_js(env, items[index]));
  return array;
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

// Their readers throw a Failure with `code` for other types, and for shared memory, which could
// change during the read.
template <typename T>
using Numbers = std::span<const T>;
Numbers<double> float64_array(Napi::Value value, const char* code, const char* name);
Numbers<int32_t> int32_array(Napi::Value value, const char* code, const char* name);
Bytes bytes_of(Napi::Value value, const char* code, const char* name);

// native.ts of @kv/nixl has the arguments' shapes. All throw a Failure that names the value.
void read(Napi::Value value, bool& to);
// A ticket, an address or a length: below 2^53.
void read(Napi::Value value, uint64_t& to);
// A path, key or parameter.
void read(Napi::Value value, string& to);
void read(Napi::Value value, MemoryType& to);
void read(Napi::Value value, PeerName& to);
// The rows of a list.
void read(Napi::Value value, Numbers<double>& to);
void read(Napi::Value value, Metadata& to);
void read(Napi::Value value, Payload& to);
void read(Napi::Value value, std::pair<string, string>& to);
void read(Napi::Value value, BackendSpec& to);
void read(Napi::Value value, BackendSelection& to);
void read(Napi::Value value, AgentConfig& to);
void read(Napi::Value value, MemoryToRegister& to);
template <typename T>
void read(Napi::Value value, vector<T>& to) {
  const auto array = value.As<Napi::Array>();
  for (uint32_t index = 0; index < array.Length(); ++index) read(array.Get(index), to.emplace_back());
}
template <typename T>
void read(Napi::Value value, optional<T>& to) {
  if (!value.IsUndefined()) read(value, to.emplace());
}

shared_ptr<const Moves> moves_of(const AgentThread& thread, Napi::Value moves);
shared_ptr<TransferRequest> transfer_request_of(const AgentThread& thread, const Napi::CallbackInfo& info);

}  // namespace kv::nixl
