#pragma once

#include <napi.h>

#include <memory>

#include "memory/cuda_memory.h"

namespace kv::nixl {

// Memory of a GPU in JavaScript; see NativeDeviceMemory in native.ts of @kv/nixl. It is registered
// by its address, and the registration keeps it.
class DeviceMemoryObject : public Napi::ObjectWrap<DeviceMemoryObject> {
 public:
  // The class, to be exported.
  static Napi::Function define(Napi::Env env);

  // `new DeviceMemory(lengthBytes, deviceId)`
  explicit DeviceMemoryObject(const Napi::CallbackInfo& info);

  // The memory of such an object; null for undefined. Throws KV_MEMORY_INVALID when it is closed.
  static std::shared_ptr<CudaMemory> memory_of(Napi::Value object);

 private:
  // number
  Napi::Value address(const Napi::CallbackInfo& info);
  // As those of MemoryObject.
  Napi::Value gather(const Napi::CallbackInfo& info);
  Napi::Value scatter(const Napi::CallbackInfo& info);
  // Frees the memory. Throws KV_MEMORY_IN_USE while a registration or a copy uses it.
  void close(const Napi::CallbackInfo& info);

  const std::shared_ptr<CudaMemory>& open_memory() const;

  std::shared_ptr<CudaMemory> memory_;
};

}  // namespace kv::nixl
