#pragma once

#include "memory/allocated_memory.h"

namespace kv::nixl {

// Page-aligned, zeroed memory. With `populate`, a thread touches every page: first transfers are up
// to 20 times slower otherwise. It asks for pages of 2 MiB, since UCX's copies between processes
// look up each page.
class Mapping : public AllocatedMemory {
 public:
  // Without `populate`, a page takes memory at its first use. Throws KV_MEMORY_INVALID.
  static shared_ptr<Mapping> create(size_t length, bool populate);
  ~Mapping() override;

  byte* data() const { return reinterpret_cast<byte*>(address); }
  void copy(bool gathers, const vector<ByteRun>& runs, byte* bytes) const override;
  void when_touched(std::function<void()> ready) override;

  // Frees the memory but keeps its addresses, which then read as zeros.
  void release_pages() const;

 private:
  Mapping(void* address, size_t length) : AllocatedMemory(reinterpret_cast<uint64_t>(address), length) {}
  void touch() const;
  void touch(size_t offset, size_t count) const;
  void mark_touched();

  std::mutex mutex_;
  bool touched_ = false;
  // Called once the pages are touched.
  vector<std::function<void()>> waiting_;
};

}  // namespace kv::nixl
