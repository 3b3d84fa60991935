#include "node/bulk_copy.h"

#include <string>
#include <utility>

#include "node/js_values.h"

namespace kv::nixl {

std::vector<ByteRun> read_runs(const double* numbers, size_t count, uint64_t limit, uint64_t& total) {
  if (count % 2 != 0) {
    throw Failure("KV_MEMORY_INVALID", "runs are rows of 2 numbers; these are " + std::to_string(count) + " numbers");
  }
  std::vector<ByteRun> runs;
  runs.reserve(count / 2);
  total = 0;
  for (size_t index = 0; index < count; index += 2) {
    const double offset = numbers[index];
    const double length = numbers[index + 1];
    const auto bound = static_cast<double>(limit);
    // Written so that NaN is refused too.
    const bool inside = offset >= 0 && length >= 0 && offset <= bound && length <= bound - offset;
    if (!inside || offset != static_cast<double>(static_cast<uint64_t>(offset)) ||
        length != static_cast<double>(static_cast<uint64_t>(length))) {
      throw Failure("KV_MEMORY_INVALID", "run " + std::to_string(index / 2) + " is [" + std::to_string(offset) + ", " +
                                             std::to_string(length) + "], outside a memory of " + std::to_string(limit) +
                                             " bytes");
    }
    runs.push_back({static_cast<uint64_t>(offset), static_cast<uint64_t>(length)});
    // The sum cannot overflow: both numbers are at most the limit.
    total += runs.back().length;
    if (total > limit) {
      throw Failure("KV_MEMORY_INVALID", "runs 0 to " + std::to_string(index / 2) + " have " + std::to_string(total) +
                                             " bytes together, and the memory has " + std::to_string(limit) + ": some bytes repeat",
                    "copy bytes that are needed twice once, or in several calls");
    }
  }
  return runs;
}

namespace {

// A buffer from JavaScript's own constructor, which throws where Node-API's function ends the
// process for want of memory.
Napi::ArrayBuffer new_buffer(Napi::Env env, uint64_t length) {
  try {
    const auto constructor = env.Global().Get("ArrayBuffer").As<Napi::Function>();
    return constructor.New({Napi::Number::New(env, static_cast<double>(length))}).As<Napi::ArrayBuffer>();
  } catch (const Napi::Error& error) {
    throw Failure("KV_MEMORY_INVALID", "cannot allocate a buffer of " + std::to_string(length) + " bytes: " + error.Message(),
                  "gather fewer bytes at once");
  }
}

std::vector<ByteRun> runs_of(Napi::Value value, uint64_t length, uint64_t& total) {
  const auto numbers = float64_array(value, "KV_MEMORY_INVALID", "runs");
  return read_runs(numbers.data(), numbers.size(), length, total);
}

}  // namespace

Napi::Value BulkCopy::gather(const Napi::CallbackInfo& info, uint64_t length, Copy copy) {
  uint64_t total = 0;
  auto runs = runs_of(info[0], length, total);
  return queue(std::move(copy), std::move(runs), new_buffer(info.Env(), total));
}

Napi::Value BulkCopy::scatter(const Napi::CallbackInfo& info, uint64_t length, Copy copy) {
  uint64_t total = 0;
  auto runs = runs_of(info[0], length, total);
  const auto require_length = [total](Napi::Value source) {
    if (!source.IsArrayBuffer()) throw Failure("KV_MEMORY_INVALID", "the source of scatter is not an ArrayBuffer");
    const size_t length = source.As<Napi::ArrayBuffer>().ByteLength();
    if (length == total) return source.As<Napi::ArrayBuffer>();
    throw Failure("KV_MEMORY_INVALID",
                  "the runs have " + std::to_string(total) + " bytes, and the source has " + std::to_string(length));
  };
  require_length(info[1]);
  // Nobody else may free the bytes while they are copied.
  const auto taken = require_length(info[2].As<Napi::Function>().Call({info[1]}));
  return queue(std::move(copy), std::move(runs), taken);
}

BulkCopy::BulkCopy(Copy copy, std::vector<ByteRun> runs, Napi::ArrayBuffer buffer)
    : Napi::AsyncWorker(buffer.Env(), "kv_nixl copy"),
      copy_(std::move(copy)),
      runs_(std::move(runs)),
      bytes_(static_cast<std::byte*>(buffer.Data())),
      buffer_(Napi::Reference<Napi::ArrayBuffer>::New(buffer, 1)),
      deferred_(Napi::Promise::Deferred::New(buffer.Env())) {}

Napi::Promise BulkCopy::queue(Copy copy, std::vector<ByteRun> runs, Napi::ArrayBuffer buffer) {
  auto* worker = new BulkCopy(std::move(copy), std::move(runs), buffer);
  const Napi::Promise promise = worker->deferred_.Promise();
  worker->Queue();
  return promise;
}

void BulkCopy::Execute() {
  try {
    copy_(bytes_, runs_);
  } catch (const Failure& failure) {
    failure_ = failure;
    SetError(failure.message);
  }
}

void BulkCopy::OnOK() {
  copy_ = {};
  deferred_.Resolve(buffer_.Value());
}

void BulkCopy::OnError(const Napi::Error& error) {
  copy_ = {};
  deferred_.Reject(failure_.has_value() ? to_js(Env(), *failure_).Value() : error.Value());
}

}  // namespace kv::nixl
