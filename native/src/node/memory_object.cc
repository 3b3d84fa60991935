#include "node/memory_object.h"

#include <string.h>

#include "node/bulk_copy.h"
#include "library/failure.h"
#include "memory/descriptor_layout.h"
#include "node/js_values.h"

namespace kv::nixl {

namespace {

constexpr napi_type_tag kMemoryTag{0x8d1e4c5f6b7a4e21, 0xa6f0c3d2915b8e74};

uint64_t length_of(Napi::Value value) {
  const double length = value.IsNumber() ? value.As<Napi::Number>().DoubleValue() : 0;
  if (!(length >= 1 && length < kExact) || length != static_cast<double>(static_cast<uint64_t>(length))) {
    throw Failure("KV_MEMORY_INVALID", "cannot allocate " + std::to_string(length) + " bytes: not a positive integer");
  }
  return static_cast<uint64_t>(length);
}

// What an external buffer holds: memory that JavaScript can still reach is never unmapped.
struct BufferHold {
  std::shared_ptr<Mapping> mapping;
  // Set once the buffer is made. A finalizer that runs before belongs to a call that fails.
  bool* finalized = nullptr;
};

void release_hold(napi_env, void*, void* data) {
  auto* hold = static_cast<BufferHold*>(data);
  if (hold->finalized != nullptr) *hold->finalized = true;
  delete hold;
}

// A part of the mapping as an external buffer. node-addon-api's function for it frees the hold
// twice where Node refuses the length: Node 20 runs the finalizer and then fails.
Napi::ArrayBuffer external_buffer(Napi::Env env, const std::shared_ptr<Mapping>& mapping, uint64_t offset, uint64_t length) {
  bool finalized = false;
  auto* hold = new BufferHold{mapping, &finalized};
  napi_value buffer = nullptr;
  const napi_status status = napi_create_external_arraybuffer(env, mapping->data() + offset, length, release_hold, hold, &buffer);
  if (status == napi_ok) {
    hold->finalized = nullptr;
    return Napi::ArrayBuffer(env, buffer);
  }
  // Some versions run the finalizer later, so the hold itself stays.
  if (!finalized) *hold = {};
  if (env.IsExceptionPending()) env.GetAndClearPendingException();
  throw Failure("KV_MEMORY_INVALID", "Node refused a buffer of " + std::to_string(length) + " bytes", "take shorter parts with view()");
}

// Copies between a mapping and bytes, on another thread.
template <bool kGather>
BulkCopy::Copy copy_of(const std::shared_ptr<Mapping>& mapping) {
  return [pin = std::make_shared<Pin>(mapping)](std::byte* bytes, const std::vector<ByteRun>& runs) {
    std::byte* memory = pin->mapping()->data();
    for (const auto& [offset, length] : runs) {
      if (length == 0) continue;
      if (kGather) memcpy(bytes, memory + offset, length);
      else memcpy(memory + offset, bytes, length);
      bytes += length;
    }
  };
}

}  // namespace

Napi::Function MemoryObject::define(Napi::Env env) {
  return DefineClass(env, "Memory",
                     {
                         InstanceAccessor<&MemoryObject::address>("address"),
                         InstanceMethod<&MemoryObject::buffer>("buffer"),
                         InstanceMethod<&MemoryObject::gather>("gather"),
                         InstanceMethod<&MemoryObject::scatter>("scatter"),
                         InstanceMethod<&MemoryObject::close>("close"),
                     });
}

MemoryObject::MemoryObject(const Napi::CallbackInfo& info) : Napi::ObjectWrap<MemoryObject>(info) {
  const Napi::Env env = info.Env();
  napi_type_tag_object(env, info.This(), &kMemoryTag);
  with_js_errors(env, [&] {
    mapping_ = Mapping::create(length_of(info[0]), info[1].ToBoolean());
    return env.Undefined();
  });
}

std::shared_ptr<Mapping> MemoryObject::mapping_of(Napi::Value value) {
  bool tagged = false;
  if (value.IsObject()) napi_check_object_type_tag(value.Env(), value, &kMemoryTag, &tagged);
  if (!tagged) {
    throw Failure("KV_MEMORY_INVALID", "this memory was not allocated by @kv/nixl", "allocate it with the transport's allocate()");
  }
  return Unwrap(value.As<Napi::Object>())->open_mapping();
}

std::shared_ptr<Mapping> MemoryObject::open_mapping() const {
  if (mapping_ == nullptr) throw Failure("KV_MEMORY_INVALID", "the memory is closed");
  return mapping_;
}

Napi::Value MemoryObject::address(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] { return Napi::Number::New(info.Env(), static_cast<double>(open_mapping()->address())); });
}

Napi::Value MemoryObject::buffer(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&]() -> Napi::Value {
    const auto mapping = open_mapping();
    const double part[] = {info[0].As<Napi::Number>().DoubleValue(), info[1].As<Napi::Number>().DoubleValue()};
    uint64_t total = 0;
    const ByteRun run = read_runs(part, 2, mapping->length(), total).front();
    const auto buffer = external_buffer(info.Env(), mapping, run.offset, run.length);
    buffers_.push_back(Napi::Reference<Napi::ArrayBuffer>::New(buffer, 1));
    return buffer;
  });
}

Napi::Value MemoryObject::gather(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    const auto mapping = open_mapping();
    return BulkCopy::gather(info, mapping->length(), copy_of<true>(mapping));
  });
}

Napi::Value MemoryObject::scatter(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    const auto mapping = open_mapping();
    return BulkCopy::scatter(info, mapping->length(), copy_of<false>(mapping));
  });
}

void MemoryObject::close(const Napi::CallbackInfo& info) {
  with_js_errors(info.Env(), [&]() -> Napi::Value {
    if (mapping_ == nullptr) return info.Env().Undefined();
    if (const uint32_t pins = mapping_->pins; pins > 0) {
      throw Failure("KV_MEMORY_IN_USE", "memory of " + std::to_string(mapping_->length()) + " bytes has " +
                                            std::to_string(pins) + " registrations or copies in progress",
                    "close the registrations and await the copies first");
    }
    // Buffers that must not be detached keep the mapping until they are collected. Its pages are
    // freed now, and views read zeros.
    const bool detach = !info[0].IsBoolean() || info[0].As<Napi::Boolean>().Value();
    if (!detach) mapping_->release_pages();
    for (const auto& reference : buffers_) {
      Napi::ArrayBuffer buffer = reference.Value();
      if (detach && !buffer.IsDetached()) buffer.Detach();
    }
    buffers_.clear();
    mapping_.reset();
    return info.Env().Undefined();
  });
}

}  // namespace kv::nixl
