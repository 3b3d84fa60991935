#pragma once

#include <napi.h>

#include <memory>
#include <vector>

#include "memory/mapping.h"

namespace kv::nixl {

// Consecutive bytes of a mapping.
struct ByteRun {
  uint64_t offset;
  uint64_t length;
};

// Reads rows `[offset, length]`, and sums up their lengths in `total`. Throws KV_MEMORY_INVALID, naming the row, for a run that does not lie
// within `limit` bytes, and for runs that have more than `limit` bytes together, since they repeat some.
std::vector<ByteRun> read_runs(const double* numbers, size_t count, uint64_t limit, uint64_t& total);

// Copies runs of a mapping into one buffer, or one buffer into runs, on a thread of libuv's pool.
class BulkCopy : public Napi::AsyncWorker {
 public:
  // gather: from the mapping into the buffer; scatter: from the buffer into the mapping.
  enum class Direction { gather, scatter };

  // Starts a copy. The promise resolves with `buffer`.
  static Napi::Promise queue(Direction direction, std::shared_ptr<Pin> pin, std::vector<ByteRun> runs, Napi::ArrayBuffer buffer);

 protected:
  void Execute() override;
  void OnOK() override;
  void OnError(const Napi::Error& error) override;

 private:
  BulkCopy(Direction direction, std::shared_ptr<Pin> pin, std::vector<ByteRun> runs, Napi::ArrayBuffer buffer);

  Direction direction_;
  std::shared_ptr<Pin> pin_;
  std::vector<ByteRun> runs_;
  std::byte* bytes_;
  Napi::Reference<Napi::ArrayBuffer> buffer_;
  Napi::Promise::Deferred deferred_;
};

}  // namespace kv::nixl
