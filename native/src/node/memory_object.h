// `MemoryObject` for JavaScript: a mapping as an external ArrayBuffer, with bulk copies off the JavaScript thread.
#pragma once

#include <napi.h>

#include <memory>

#include "memory/mapping.h"

namespace kv::nixl {

class MemoryObject : public Napi::ObjectWrap<MemoryObject> {
 public:
  static Napi::Function define(Napi::Env env);

  // `new MemoryObject(lengthBytes)`
  explicit MemoryObject(const Napi::CallbackInfo& info);

  // The mapping behind a value that must be an open MemoryObject. Throws Failure.
  static std::shared_ptr<Mapping> mapping_of(Napi::Value value);

 private:
  Napi::Value address(const Napi::CallbackInfo& info);
  Napi::Value buffer(const Napi::CallbackInfo& info);
  // `gather(runs): Promise<ArrayBuffer>`
  Napi::Value gather(const Napi::CallbackInfo& info);
  // `scatter(runs, source): Promise<void>`
  Napi::Value scatter(const Napi::CallbackInfo& info);
  // Detaches the buffer and lets go. Throws KV_MEMORY_IN_USE while a registration or a copy uses it.
  void close(const Napi::CallbackInfo& info);

  std::shared_ptr<Mapping> open_mapping() const;

  std::shared_ptr<Mapping> mapping_;
  Napi::Reference<Napi::ArrayBuffer> buffer_;
};

}  // namespace kv::nixl
