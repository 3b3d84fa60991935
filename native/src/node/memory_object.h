#pragma once

#include <napi.h>

#include "memory/mapping.h"

namespace kv::nixl {

// JavaScript's `Memory`; see NativeMemory in native.ts of @kv/nixl. Host memory, with external
// ArrayBuffers, or GPU memory. Copies run off the JavaScript thread.
class MemoryObject : public Napi::ObjectWrap<MemoryObject> {
 public:
  static Napi::Function define(Napi::Env env);

  // `new Memory(lengthBytes, populate, deviceId | undefined)`
  explicit MemoryObject(const Napi::CallbackInfo& info);

  // Null for undefined. Throws KV_MEMORY_INVALID unless it is an open `Memory`.
  static shared_ptr<Pin> pin_of(Napi::Value value);

 private:
  Napi::Value address(const Napi::CallbackInfo& info);
  // `buffer(offset, length): ArrayBuffer` of host memory. Node 20 and older throw beyond
  // `buffer.constants.MAX_LENGTH` bytes.
  Napi::Value buffer(const Napi::CallbackInfo& info);
  // `gather(runs): Promise<ArrayBuffer>`
  Napi::Value gather(const Napi::CallbackInfo& info);
  // `scatter(runs, source, take): Promise<void>`. With valid arguments, calls `take(source)` for a
  // buffer that nobody else has.
  Napi::Value scatter(const Napi::CallbackInfo& info);
  // `close(detach)`. Throws KV_MEMORY_IN_USE during a registration or copy.
  void close(const Napi::CallbackInfo& info);

  shared_ptr<AllocatedMemory> open_memory() const;

  shared_ptr<AllocatedMemory> memory_;
  // Null for GPU memory.
  shared_ptr<Mapping> mapping_;
  vector<Napi::Reference<Napi::ArrayBuffer>> buffers_;
};

}  // namespace kv::nixl
