#include "node/memory_object.h"

#include "node/bulk_copy.h"
#include "library/failure.h"
#include "node/js_values.h"

namespace kv::nixl {

namespace {

constexpr napi_type_tag kMemoryTag{0x8d1e4c5f6b7a4e21, 0xa6f0c3d2915b8e74};
constexpr double kExact = 9007199254740992.0;

}  // namespace

Napi::Function MemoryObject::define(Napi::Env env) {
  return DefineClass(env, "Memory",
                     {
                         InstanceAccessor<&MemoryObject::address>("address"),
                         InstanceAccessor<&MemoryObject::buffer>("buffer"),
                         InstanceMethod<&MemoryObject::gather>("gather"),
                         InstanceMethod<&MemoryObject::scatter>("scatter"),
                         InstanceMethod<&MemoryObject::close>("close"),
                     });
}

MemoryObject::MemoryObject(const Napi::CallbackInfo& info) : Napi::ObjectWrap<MemoryObject>(info) {
  const Napi::Env env = info.Env();
  napi_type_tag_object(env, info.This(), &kMemoryTag);
  with_js_errors(env, [&] {
    const double length = info[0].IsNumber() ? info[0].As<Napi::Number>().DoubleValue() : 0;
    if (!(length >= 1 && length < kExact) || length != static_cast<double>(static_cast<uint64_t>(length))) {
      throw Failure("KV_MEMORY_INVALID", "cannot allocate " + std::to_string(length) + " bytes: not a positive integer");
    }
    mapping_ = Mapping::create(static_cast<size_t>(length));
    // The buffer holds the mapping as well, so that memory which JavaScript can still reach is never unmapped.
    auto* held = new std::shared_ptr<Mapping>(mapping_);
    const auto buffer = Napi::ArrayBuffer::New(
        env, mapping_->data(), mapping_->length(),
        [](Napi::BasicEnv, void*, std::shared_ptr<Mapping>* mapping) { delete mapping; }, held);
    buffer_ = Napi::Reference<Napi::ArrayBuffer>::New(buffer, 1);
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
    open_mapping();
    return buffer_.Value();
  });
}

Napi::Value MemoryObject::gather(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&]() -> Napi::Value {
    const auto pin = std::make_shared<Pin>(open_mapping());
    const auto numbers = float64_array(info[0], "KV_MEMORY_INVALID", "runs");
    uint64_t total = 0;
    auto runs = read_runs(numbers.Data(), numbers.ElementLength(), pin->mapping()->length(), total);
    const auto target = Napi::ArrayBuffer::New(info.Env(), total);
    return BulkCopy::queue(BulkCopy::Direction::gather, pin, std::move(runs), target);
  });
}

Napi::Value MemoryObject::scatter(const Napi::CallbackInfo& info) {
  return with_js_errors(info.Env(), [&]() -> Napi::Value {
    const auto pin = std::make_shared<Pin>(open_mapping());
    const auto numbers = float64_array(info[0], "KV_MEMORY_INVALID", "runs");
    uint64_t total = 0;
    auto runs = read_runs(numbers.Data(), numbers.ElementLength(), pin->mapping()->length(), total);
    if (!info[1].IsArrayBuffer()) throw Failure("KV_MEMORY_INVALID", "the source of scatter is not an ArrayBuffer");
    auto source = info[1].As<Napi::ArrayBuffer>();
    if (source.ByteLength() != total) {
      throw Failure("KV_MEMORY_INVALID", "the runs have " + std::to_string(total) + " bytes, and the source has " +
                                             std::to_string(source.ByteLength()));
    }
    return BulkCopy::queue(BulkCopy::Direction::scatter, pin, std::move(runs), source);
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
    // A buffer that must not be detached keeps the mapping until it is collected. Its pages are freed now, and views read zeros.
    const bool detach = !info[0].IsBoolean() || info[0].As<Napi::Boolean>().Value();
    Napi::ArrayBuffer buffer = buffer_.Value();
    if (!detach) {
      mapping_->release_pages();
    } else if (!buffer.IsDetached()) {
      buffer.Detach();
    }
    buffer_.Reset();
    mapping_.reset();
    return info.Env().Undefined();
  });
}

}  // namespace kv::nixl
