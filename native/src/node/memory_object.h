#pragma once

#include <napi.h>

#include "memory/cuda_memory.h"
#include "memory/descriptor_layout.h"
#include "memory/mapping.h"
#include "node/js_values.h"

namespace kv::nixl {

// JavaScript's `Memory`; see NativeMemory in native.ts of @kv/nixl. Host memory, with external
// ArrayBuffers, or GPU memory. Copies run off the JavaScript thread.
class MemoryObject : public Napi::ObjectWrap<MemoryObject> {
 public:
  static Napi::Function define(Napi::Env env) {
    return DefineClass(env, "Memory",
                       {
                           InstanceAccessor<&MemoryObject::address>("address"),
                           InstanceMethod<&MemoryObject::buffer>("buffer"),
                           InstanceMethod<&MemoryObject::gather>("gather"),
                           InstanceMethod<&MemoryObject::scatter>("scatter"),
                           InstanceMethod<&MemoryObject::close>("close"),
                       });
  }

  // `new Memory(lengthBytes, populate, deviceId | undefined)`
  explicit MemoryObject(const Napi::CallbackInfo& info) : Napi::ObjectWrap<MemoryObject>(info) {
    const Napi::Env env = info.Env();
    napi_type_tag_object(env, info.This(), &kMemoryTag);
    with_js_errors(env, [&] {
      const uint64_t length = length_of(info[0]);
      if (info[2].IsUndefined())
        memory_ = mapping_ = Mapping::create(length, info[1].ToBoolean());
      else
        memory_ = CudaMemory::create(length, info[2].As<Napi::Number>().Int32Value());
      return env.Undefined();
    });
  }

  // Null for undefined. Throws KV_MEMORY_INVALID unless it is an open `Memory`.
  static shared_ptr<Pin> pin_of(Napi::Value value) {
    if (value.IsUndefined()) return nullptr;
    bool tagged = false;
    if (value.IsObject()) napi_check_object_type_tag(value.Env(), value, &kMemoryTag, &tagged);
    if (!tagged) {
      throw Failure("KV_MEMORY_INVALID", "this memory was not allocated by @kv/nixl",
                    "allocate it with the transport's allocate()");
    }
    return make_shared<Pin>(Unwrap(value.As<Napi::Object>())->open_memory());
  }

 private:
  static constexpr napi_type_tag kMemoryTag{0x8d1e4c5f6b7a4e21, 0xa6f0c3d2915b8e74};

  static uint64_t length_of(Napi::Value value) {
    const double length = value.IsNumber() ? value.As<Napi::Number>().DoubleValue() : 0;
    if (!(length >= 1 && length < kExact) ||
        length != static_cast<double>(static_cast<uint64_t>(length))) {
      throw Failure("KV_MEMORY_INVALID",
                    "cannot allocate " + to_string(length) + " bytes: not a positive integer");
    }
    return static_cast<uint64_t>(length);
  }

  // Keeps memory mapped while JavaScript can reach it.
  struct BufferHold {
    shared_ptr<Mapping> mapping;
    // Null once the buffer is made. Before, the finalizer belongs to a failing call.
    bool* finalized = nullptr;
  };

  static void release_hold(napi_env, void*, void* data) {
    auto* hold = static_cast<BufferHold*>(data);
    if (hold->finalized != nullptr) *hold->finalized = true;
    delete hold;
  }

  // node-addon-api would free the hold twice where Node refuses the length: Node 20 runs the
  // finalizer and then fails.
  static Napi::ArrayBuffer external_buffer(Napi::Env env, const shared_ptr<Mapping>& mapping,
                                           const ByteRun& part) {
    bool finalized = false;
    auto* hold = new BufferHold{mapping, &finalized};
    napi_value buffer = nullptr;
    const napi_status status = napi_create_external_arraybuffer(
        env, mapping->data() + part.offset, part.length, release_hold, hold, &buffer);
    if (status == napi_ok) {
      hold->finalized = nullptr;
      return Napi::ArrayBuffer(env, buffer);
    }
    // Some versions run the finalizer later, so the hold itself stays.
    if (!finalized) *hold = {};
    if (env.IsExceptionPending()) env.GetAndClearPendingException();
    throw Failure("KV_MEMORY_INVALID",
                  "Node refused a buffer of " + to_string(part.length) + " bytes",
                  "take shorter parts with view()");
  }

  // JavaScript's constructor throws for want of memory, where Node-API would end the process.
  static Napi::ArrayBuffer new_buffer(Napi::Env env, uint64_t length) {
    try {
      const auto constructor = env.Global().Get("ArrayBuffer").As<Napi::Function>();
      return constructor.New({Napi::Number::New(env, static_cast<double>(length))})
          .As<Napi::ArrayBuffer>();
    } catch (const Napi::Error& error) {
      throw Failure(
          "KV_MEMORY_INVALID",
          "cannot allocate a buffer of " + to_string(length) + " bytes: " + error.Message(),
          "gather fewer bytes at once");
    }
  }

  struct Runs {
    vector<ByteRun> rows;
    uint64_t total = 0;
  };

  // Reads rows `[offset, length]`. Throws KV_MEMORY_INVALID, naming the row, for a run outside
  // `limit` bytes, and for more than `limit` bytes in total, which repeat some.
  static Runs read_runs(Numbers<double> numbers, uint64_t limit) {
    if (numbers.size() % 2 != 0) {
      throw Failure("KV_MEMORY_INVALID", "runs are rows of 2 numbers; these are " +
                                             to_string(numbers.size()) + " numbers");
    }
    Runs runs;
    runs.rows.reserve(numbers.size() / 2);
    for (size_t index = 0; index < numbers.size(); index += 2) {
      const double offset = numbers[index];
      const double length = numbers[index + 1];
      const auto bound = static_cast<double>(limit);
      // Refuses NaN too.
      const bool inside = offset >= 0 && length >= 0 && offset <= bound && length <= bound - offset;
      if (!inside || offset != static_cast<double>(static_cast<uint64_t>(offset)) ||
          length != static_cast<double>(static_cast<uint64_t>(length))) {
        throw Failure("KV_MEMORY_INVALID", "run " + to_string(index / 2) + " is [" +
                                               to_string(offset) + ", " + to_string(length) +
                                               "], outside a memory of " + to_string(limit) +
                                               " bytes");
      }
      runs.rows.push_back({static_cast<uint64_t>(offset), static_cast<uint64_t>(length)});
      // No overflow: both numbers are at most the limit.
      runs.total += runs.rows.back().length;
      if (runs.total > limit) {
        throw Failure("KV_MEMORY_INVALID",
                      "runs 0 to " + to_string(index / 2) + " have " + to_string(runs.total) +
                          " bytes together, and the memory has " + to_string(limit) +
                          ": some bytes repeat",
                      "copy bytes that are needed twice once, or in several calls");
      }
    }
    return runs;
  }

  static Runs runs_of(Napi::Value value, uint64_t limit) {
    return read_runs(float64_array(value, "KV_MEMORY_INVALID", "runs"), limit);
  }

  // Copies between a memory's runs and one buffer, on libuv's threads.
  class BulkCopy : public Napi::AsyncWorker {
   public:
    BulkCopy(bool gathers, const shared_ptr<AllocatedMemory>& memory, Runs runs,
             Napi::ArrayBuffer buffer)
        : Napi::AsyncWorker(buffer.Env(), "kv_nixl copy"),
          gathers_(gathers),
          pin_(make_shared<Pin>(memory)),
          runs_(std::move(runs)),
          bytes_(static_cast<byte*>(buffer.Data())),
          buffer_(Napi::Reference<Napi::ArrayBuffer>::New(buffer, 1)),
          deferred_(Napi::Promise::Deferred::New(buffer.Env())) {}

    // The worker deletes itself.
    Napi::Promise start() {
      const Napi::Promise promise = deferred_.Promise();
      Queue();
      return promise;
    }

   protected:
    void Execute() override {
      failure_ = failure_of([this] { pin_->memory->copy(gathers_, runs_.rows, bytes_); });
      if (failure_) SetError(failure_->message);
    }
    void OnOK() override {
      pin_.reset();
      deferred_.Resolve(buffer_.Value());
    }
    void OnError(const Napi::Error& error) override {
      pin_.reset();
      deferred_.Reject(failure_ ? to_js(Env(), *failure_).Value() : error.Value());
    }

   private:
    const bool gathers_;
    shared_ptr<Pin> pin_;
    const Runs runs_;
    byte* const bytes_;
    optional<Failure> failure_;
    Napi::Reference<Napi::ArrayBuffer> buffer_;
    Napi::Promise::Deferred deferred_;
  };

  Napi::Value address(const Napi::CallbackInfo& info) {
    return with_js_errors(info.Env(), [&] {
      return Napi::Number::New(info.Env(), static_cast<double>(open_memory()->address));
    });
  }
  // `buffer(offset, length): ArrayBuffer` of host memory. Node 20 and older throw beyond
  // `buffer.constants.MAX_LENGTH` bytes.
  Napi::Value buffer(const Napi::CallbackInfo& info) {
    return with_js_errors(info.Env(), [&]() -> Napi::Value {
      const double part[] = {info[0].As<Napi::Number>().DoubleValue(),
                             info[1].As<Napi::Number>().DoubleValue()};
      const Runs runs = read_runs(part, open_memory()->length);
      const auto buffer = external_buffer(info.Env(), mapping_, runs.rows.front());
      buffers_.push_back(Napi::Reference<Napi::ArrayBuffer>::New(buffer, 1));
      return buffer;
    });
  }
  // `gather(runs): Promise<ArrayBuffer>`
  Napi::Value gather(const Napi::CallbackInfo& info) {
    return with_js_errors(info.Env(), [&] {
      // Held, since JavaScript's buffer constructor may close the memory.
      const auto memory = open_memory();
      Runs runs = runs_of(info[0], memory->length);
      const auto buffer = new_buffer(info.Env(), runs.total);
      return (new BulkCopy(true, memory, std::move(runs), buffer))->start();
    });
  }
  // `scatter(runs, source, take): Promise<void>`. With valid arguments, calls `take(source)` for a
  // buffer that nobody else has.
  Napi::Value scatter(const Napi::CallbackInfo& info) {
    return with_js_errors(info.Env(), [&] {
      const auto memory = open_memory();
      Runs runs = runs_of(info[0], memory->length);
      const auto require_length = [&](Napi::Value source) {
        if (!source.IsArrayBuffer())
          throw Failure("KV_MEMORY_INVALID", "the source of scatter is not an ArrayBuffer");
        const size_t length = source.As<Napi::ArrayBuffer>().ByteLength();
        if (length == runs.total) return source.As<Napi::ArrayBuffer>();
        throw Failure("KV_MEMORY_INVALID", "the runs have " + to_string(runs.total) +
                                               " bytes, and the source has " + to_string(length));
      };
      require_length(info[1]);
      // Nobody else may free the bytes during the copy.
      const auto taken = require_length(info[2].As<Napi::Function>().Call({info[1]}));
      return (new BulkCopy(false, memory, std::move(runs), taken))->start();
    });
  }
  // `close(detach)`. Throws KV_MEMORY_IN_USE during a registration or copy.
  void close(const Napi::CallbackInfo& info) {
    with_js_errors(info.Env(), [&]() -> Napi::Value {
      if (memory_ == nullptr) return info.Env().Undefined();
      if (const uint32_t pins = memory_->pins; pins > 0) {
        throw Failure("KV_MEMORY_IN_USE",
                      "memory of " + to_string(memory_->length) + " bytes has " + to_string(pins) +
                          " registrations or copies in progress",
                      "close the registrations and await the copies first");
      }
      // Attached buffers keep the mapping until they are collected. Freed pages read zeros.
      const bool detach = !info[0].IsBoolean() || info[0].As<Napi::Boolean>().Value();
      if (!detach) mapping_->release_pages();
      for (const auto& reference : buffers_) {
        Napi::ArrayBuffer buffer = reference.Value();
        if (detach && !buffer.IsDetached()) buffer.Detach();
      }
      buffers_.clear();
      mapping_.reset();
      memory_.reset();
      return info.Env().Undefined();
    });
  }

  shared_ptr<AllocatedMemory> open_memory() const {
    if (memory_ == nullptr) throw Failure("KV_MEMORY_INVALID", "the memory is closed");
    return memory_;
  }

  shared_ptr<AllocatedMemory> memory_;
  // Null for GPU memory.
  shared_ptr<Mapping> mapping_;
  vector<Napi::Reference<Napi::ArrayBuffer>> buffers_;
};

}  // namespace kv::nixl
