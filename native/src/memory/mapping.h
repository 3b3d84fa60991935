// Memory from mmap: page-aligned, zeroed, and touched before NIXL may use it (first touch is up to 20 times slower).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>

namespace kv::nixl {

class Mapping {
 public:
  // Maps `length` bytes and has a thread of its own touch them. Throws Failure.
  static std::shared_ptr<Mapping> create(size_t length);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(address_); }
  uint64_t address() const { return reinterpret_cast<uint64_t>(address_); }
  size_t length() const { return length_; }
  // Blocks until every page is there.
  void await_touched() const { touched_.wait(); }

  // Frees the memory but keeps the addresses: what reads them gets zeros.
  void give_pages_back() const;

  // Registrations and copies under way; the owner may not let go while there are any.
  std::atomic<uint32_t> pins{0};

 private:
  Mapping(void* address, size_t length) : address_(address), length_(length) {}
  void touch() const;

  void* address_;
  size_t length_;
  std::shared_future<void> touched_;
};

// Holds a mapping and one of its pins.
class Pin {
 public:
  explicit Pin(std::shared_ptr<Mapping> mapping) : mapping_(std::move(mapping)) { ++mapping_->pins; }
  ~Pin() { --mapping_->pins; }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }

 private:
  std::shared_ptr<Mapping> mapping_;
};

}  // namespace kv::nixl
