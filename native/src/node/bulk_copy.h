// Copies runs of a mapping out into one buffer, or one buffer into runs, on a worker of libuv's pool.
#pragma once

#include <napi.h>

#include <memory>
#include <vector>

#include "memory/mapping.h"

namespace kv::nixl {

// Bytes that lie together in a mapping.
struct ByteRun {
  uint64_t offset;
  uint64_t length;
};

// Reads rows `[offset, length]` within `limit` bytes. Throws Failure KV_MEMORY_INVALID naming the row.
std::vector<ByteRun> read_runs(const double* numbers, size_t count, uint64_t limit, uint64_t& total);

class BulkCopy : public Napi::AsyncWorker {
 public:
  enum class Direction { gather, scatter };

  // The promise is fulfilled with `buffer` after a gather, with undefined after a scatter.
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
