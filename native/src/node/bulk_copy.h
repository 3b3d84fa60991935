#pragma once

#include <napi.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "library/failure.h"

namespace kv::nixl {

// Consecutive bytes of a memory.
struct ByteRun {
  uint64_t offset;
  uint64_t length;
};

// Reads rows `[offset, length]`, and sums up their lengths in `total`. Throws KV_MEMORY_INVALID,
// naming the row, for a run that does not lie within `limit` bytes, and for runs that have more
// than `limit` bytes together, since they repeat some.
std::vector<ByteRun> read_runs(const double* numbers, size_t count, uint64_t limit, uint64_t& total);

// Copies between runs of a memory and one buffer, on a thread of libuv's pool.
class BulkCopy : public Napi::AsyncWorker {
 public:
  // Copies all runs from the memory into the bytes, or back, in order. What it holds keeps the
  // memory until the copy has ended. May throw Failure.
  using Copy = std::function<void(std::byte* bytes, const std::vector<ByteRun>& runs)>;

  // `gather(runs): Promise<ArrayBuffer>` of a memory of `length` bytes.
  static Napi::Value gather(const Napi::CallbackInfo& info, uint64_t length, Copy copy);
  // `scatter(runs, source, take): Promise<ArrayBuffer>`. `take(source)` is called once all
  // arguments are valid, and returns a buffer that nobody else has.
  static Napi::Value scatter(const Napi::CallbackInfo& info, uint64_t length, Copy copy);

 protected:
  void Execute() override;
  void OnOK() override;
  void OnError(const Napi::Error& error) override;

 private:
  BulkCopy(Copy copy, std::vector<ByteRun> runs, Napi::ArrayBuffer buffer);
  static Napi::Promise queue(Copy copy, std::vector<ByteRun> runs, Napi::ArrayBuffer buffer);

  Copy copy_;
  std::vector<ByteRun> runs_;
  std::byte* bytes_;
  std::optional<Failure> failure_;
  Napi::Reference<Napi::ArrayBuffer> buffer_;
  Napi::Promise::Deferred deferred_;
};

}  // namespace kv::nixl
