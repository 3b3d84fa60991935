#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace kv::nixl {

// Memory from mmap: page-aligned and zeroed. A thread may touch every page, since the first
// transfer to an untouched page is up to 20 times slower, and asks for pages of 2 MiB, since UCX's
// copies between processes look up each page.
class Mapping {
 public:
  // Maps `length` bytes. `populate`: starts a thread that touches them; otherwise a page takes
  // memory when it is first used. Throws KV_MEMORY_INVALID.
  static std::shared_ptr<Mapping> create(size_t length, bool populate);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // The first byte.
  std::byte* data() const { return static_cast<std::byte*>(address_); }
  // The address of the first byte.
  uint64_t address() const { return reinterpret_cast<uint64_t>(address_); }
  // Bytes.
  size_t length() const { return length_; }
  // Calls `ready` once every page has been touched: now, if that is so, or later on another thread.
  // Must not throw.
  void when_touched(std::function<void()> ready);

  // Frees the memory but keeps the addresses, which read as zeros from then on.
  void release_pages() const;

  // Registrations and copies under way. The owner must not let go of the mapping while there are
  // any.
  std::atomic<uint32_t> pins{0};

 private:
  Mapping(void* address, size_t length) : address_(address), length_(length) {}
  void touch() const;
  void touch(size_t offset, size_t length) const;
  void mark_touched();

  void* address_;
  size_t length_;
  std::mutex mutex_;
  bool touched_ = false;
  // Called once the pages are touched.
  std::vector<std::function<void()>> waiting_;
};

// Holds a mapping and counts as one of its pins.
class Pin {
 public:
  // Adds a pin to the mapping, until this object is destroyed.
  explicit Pin(std::shared_ptr<Mapping> mapping) : mapping_(std::move(mapping)) { ++mapping_->pins; }
  ~Pin() { --mapping_->pins; }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

  // The pinned mapping.
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }

 private:
  std::shared_ptr<Mapping> mapping_;
};

}  // namespace kv::nixl
