#include "node/device_memory_object.h"

#include <string>
#include <vector>

#include "library/failure.h"
#include "node/bulk_copy.h"
#include "node/js_values.h"

namespace kv::nixl {

namespace {

// The pieces of runs whose bytes follow each other in a buffer.
std::vector<CudaMemory::Piece> pieces_of(std::byte* bytes, const std::vector<ByteRun>& runs) {
  std::vector<CudaMemory::Piece> pieces;
  pieces.reserve(runs.size());
  for (const auto& [offset, length] : runs) {
    pieces.push_back({offset, length, bytes});
    bytes += length;
  }
  return pieces;
}

}  // namespace

Napi::Function DeviceMemoryObject::define(Napi::Env env) {
  return DefineClass(env, "DeviceMemory",
                     {
                         InstanceAccessor<&DeviceMemoryObject::address>("address"),
                         InstanceMethod<&DeviceMemoryObject::gather>("gather"),
                         InstanceMethod<&DeviceMemoryObject::scatter>("scatter"),
                         InstanceMethod<&DeviceMemoryObject::close>("close"),
                     });
}

DeviceMemoryObject::DeviceMemoryObject(const Napi::CallbackInfo& info) : Napi::ObjectWrap<DeviceMemoryObject>(info) {
  with_js_errors(info.Env(), [&] {
    memory_ = CudaMemory::create(static_cast<uint64_t>(info[0].As<Napi::Number>().Int64Value()), info[1].As<Napi::Number>().Int32Value());
    return info.Env().Undefined();
  });
}

std::shared_ptr<CudaMemory> DeviceMemoryObject::memory_of(Napi::Value object) {
  return object.IsUndefined() ? nullptr : Unwrap(object.As<Napi::Object>())->open_memory();
}

const std::shared_ptr<CudaMemory>& DeviceMemoryObject::open_memory() const {
  if (memory_ == nullptr) throw Failure("KV_MEMORY_INVALID", "the memory is closed");
  return memory_;
}

Napi::Value DeviceMemoryObject::address(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] { return Napi::Number::New(info.Env(), static_cast<double>(open_memory()->address())); });
}

Napi::Value DeviceMemoryObject::gather(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    return BulkCopy::gather(info, open_memory()->length(), [memory = open_memory()](std::byte* bytes, const std::vector<ByteRun>& runs) {
      memory->from_device(pieces_of(bytes, runs));
    });
  });
}

Napi::Value DeviceMemoryObject::scatter(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&] {
    return BulkCopy::scatter(info, open_memory()->length(), [memory = open_memory()](std::byte* bytes, const std::vector<ByteRun>& runs) {
      memory->to_device(pieces_of(bytes, runs));
    });
  });
}

void DeviceMemoryObject::close(const Napi::CallbackInfo& info) {
  with_js_errors(info.Env(), [&] {
    // Registrations and copies in progress hold the memory too.
    if (memory_ != nullptr && memory_.use_count() > 1) {
      throw Failure("KV_MEMORY_IN_USE", "memory of " + std::to_string(memory_->length()) + " bytes has registrations or copies in progress",
                    "close the registrations and await the copies first");
    }
    memory_.reset();
    return info.Env().Undefined();
  });
}

}  // namespace kv::nixl
