#pragma once

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <thread>

#include "library/failure.h"
#include "memory/allocated_memory.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kv::nixl {

// Page-aligned, zeroed memory. With `populate`, a thread touches every page: first transfers are up
// to 20 times slower otherwise. It asks for pages of 2 MiB, since UCX's copies between processes
// look up each page.
class Mapping : public AllocatedMemory {
 public:
  // Without `populate`, a page takes memory at its first use. Throws KV_MEMORY_INVALID.
  static shared_ptr<Mapping> create(size_t length, bool populate) {
    if (!populate) {
      shared_ptr<Mapping> mapping(new Mapping(map(length, MAP_NORESERVE), length));
      mapping->touched_ = true;
      return mapping;
    }
    shared_ptr<Mapping> mapping(
        new Mapping(length < kHugePage ? map(length, 0) : map_at_huge_page(length), length));
    try {
      // The thread keeps the mapping until it ends. Nothing in it throws.
      std::thread([mapping] {
        mapping->touch();
        mapping->touched_ = true;
      }).detach();
    } catch (const std::system_error& error) {
      throw Failure(
          "KV_MEMORY_INVALID",
          string("the thread that touches the memory could not be started: ") + error.what(),
          "raise the limit of threads (ulimit -u, pids.max of the control group), or leave the pages untouched: populate: false");
    }
    return mapping;
  }
  ~Mapping() override { munmap(data(), length); }

  byte* data() const { return reinterpret_cast<byte*>(address); }
  void copy(bool gathers, const vector<ByteRun>& runs, byte* bytes) const override {
    for (const auto& [offset, length] : runs) {
      byte* const own = data() + offset;
      if (length > 0) memcpy(gathers ? bytes : own, gathers ? own : bytes, length);
      bytes += length;
    }
  }
  bool touched() const override { return touched_; }

  // Frees the memory but keeps its addresses, which then read as zeros.
  void release_pages() const { madvise(data(), length, MADV_DONTNEED); }

 private:
  // A copy by another process looks up each page, so huge ones are faster.
  static constexpr size_t kHugePage = 2u << 20;

  static void* map(size_t length, int flags) {
    void* address =
        mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (address != MAP_FAILED) return address;
    throw Failure("KV_MEMORY_INVALID",
                  "cannot map " + to_string(length) + " bytes: " + strerror(errno));
  }

  static constexpr size_t kTouchedAtOnce = 64u << 20;
  // Fragmented memory makes huge pages slow to find. After this much more time than zeroing takes,
  // small pages will do.
  static constexpr auto kMostSearching = seconds(5);
  static constexpr auto kZeroing = milliseconds(100);

  static void* map_at_huge_page(size_t length) {
    auto* first = static_cast<byte*>(map(length + kHugePage, 0));
    const size_t before = -reinterpret_cast<uintptr_t>(first) % kHugePage;
    if (before > 0) munmap(first, before);
    byte* address = first + before;
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t used = (length + page - 1) / page * page;
    munmap(address + used, kHugePage - before);
    return address;
  }

  Mapping(void* address, size_t length)
      : AllocatedMemory(reinterpret_cast<uint64_t>(address), length) {}
  void touch() const {
    Clock::duration searching{};
    for (size_t offset = 0; offset < length; offset += kTouchedAtOnce) {
      const size_t count = std::min(kTouchedAtOnce, length - offset);
      // Without huge pages, the kernel gives small ones.
      if (length >= kHugePage && searching < kMostSearching)
        madvise(data() + offset, count, MADV_HUGEPAGE);
      const auto start = Clock::now();
      touch(offset, count);
      searching += std::max(Clock::now() - start - kZeroing, Clock::duration::zero());
    }
  }
  void touch(size_t offset, size_t count) const {
    if (madvise(data() + offset, count, MADV_POPULATE_WRITE) == 0) return;
    // Kernels before 5.14: an atomic operation without effect, since JavaScript may already write
    // here.
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (const size_t end = offset + count; offset < end; offset += page) {
      __atomic_fetch_or(reinterpret_cast<unsigned char*>(data()) + offset, 0, __ATOMIC_RELAXED);
    }
  }

  atomic<bool> touched_{false};
};

}  // namespace kv::nixl
