#pragma once

#include <napi.h>

#include <memory>
#include <vector>

#include "memory/mapping.h"

namespace kv::nixl {

// JavaScript's `Memory`; see NativeMemory in native.ts of @kv/nixl. A mapping whose parts are
// external ArrayBuffers, with copies off the JavaScript thread.
class MemoryObject : public Napi::ObjectWrap<MemoryObject> {
 public:
  // The class, to be exported.
  static Napi::Function define(Napi::Env env);

  // `new Memory(lengthBytes, populate)`
  explicit MemoryObject(const Napi::CallbackInfo& info);

  // The mapping of an open `Memory`. Throws KV_MEMORY_INVALID for any other value.
  static std::shared_ptr<Mapping> mapping_of(Napi::Value value);

 private:
  // number
  Napi::Value address(const Napi::CallbackInfo& info);
  // `buffer(offset, length): ArrayBuffer`. Node 20 and older end a call with more than
  // `buffer.constants.MAX_LENGTH` bytes with an exception.
  Napi::Value buffer(const Napi::CallbackInfo& info);
  // `gather(runs): Promise<ArrayBuffer>`
  Napi::Value gather(const Napi::CallbackInfo& info);
  // `scatter(runs, source, take): Promise<void>`. `take(source)` is called once all arguments are
  // valid, and returns a buffer that nobody else has.
  Napi::Value scatter(const Napi::CallbackInfo& info);
  // `close(detach)`. Throws KV_MEMORY_IN_USE while a registration or a copy uses the memory.
  void close(const Napi::CallbackInfo& info);

  std::shared_ptr<Mapping> open_mapping() const;

  std::shared_ptr<Mapping> mapping_;
  // Every buffer that `buffer` has made.
  std::vector<Napi::Reference<Napi::ArrayBuffer>> buffers_;
};

}  // namespace kv::nixl
