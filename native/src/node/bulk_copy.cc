#include "node/bulk_copy.h"

#include <string.h>

#include <string>

#include "library/failure.h"

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

BulkCopy::BulkCopy(Direction direction, std::shared_ptr<Pin> pin, std::vector<ByteRun> runs, Napi::ArrayBuffer buffer)
    : Napi::AsyncWorker(buffer.Env(), "kv_nixl copy"),
      direction_(direction),
      pin_(std::move(pin)),
      runs_(std::move(runs)),
      bytes_(static_cast<std::byte*>(buffer.Data())),
      buffer_(Napi::Reference<Napi::ArrayBuffer>::New(buffer, 1)),
      deferred_(Napi::Promise::Deferred::New(buffer.Env())) {}

Napi::Promise BulkCopy::queue(Direction direction, std::shared_ptr<Pin> pin, std::vector<ByteRun> runs, Napi::ArrayBuffer buffer) {
  auto* copy = new BulkCopy(direction, std::move(pin), std::move(runs), buffer);
  const Napi::Promise promise = copy->deferred_.Promise();
  copy->Queue();
  return promise;
}

void BulkCopy::Execute() {
  std::byte* memory = pin_->mapping()->data();
  std::byte* cursor = bytes_;
  for (const ByteRun& run : runs_) {
    if (run.length == 0) continue;
    if (direction_ == Direction::gather) {
      memcpy(cursor, memory + run.offset, run.length);
    } else {
      memcpy(memory + run.offset, cursor, run.length);
    }
    cursor += run.length;
  }
}

void BulkCopy::OnOK() {
  pin_.reset();
  deferred_.Resolve(buffer_.Value());
}

void BulkCopy::OnError(const Napi::Error& error) {
  pin_.reset();
  deferred_.Reject(error.Value());
}

}  // namespace kv::nixl
