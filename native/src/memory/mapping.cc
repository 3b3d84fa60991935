#include "memory/mapping.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "library/failure.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kv::nixl {

namespace {

// Pages of this size make a copy by another process faster: it looks up each page that it copies.
constexpr size_t kHugePage = 2u << 20;

void* map(size_t length, int flags) {
  void* address = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (address != MAP_FAILED) return address;
  throw Failure("KV_MEMORY_INVALID", "cannot map " + std::to_string(length) + " bytes: " + strerror(errno));
}

// Memory is touched in parts of this size.
constexpr size_t kTouchedAtOnce = 64u << 20;
// To find huge pages takes long where memory is fragmented. Once it has cost this much more time
// than to zero them, small pages will do.
constexpr auto kMostSearching = std::chrono::seconds(5);
constexpr auto kZeroing = std::chrono::milliseconds(100);

// Maps memory that begins at a huge page.
void* map_at_huge_page(size_t length) {
  auto* first = static_cast<std::byte*>(map(length + kHugePage, 0));
  const size_t before = -reinterpret_cast<uintptr_t>(first) % kHugePage;
  if (before > 0) munmap(first, before);
  std::byte* address = first + before;
  // What is left over at the end begins at a page.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t used = (length + page - 1) / page * page;
  munmap(address + used, kHugePage - before);
  return address;
}

}  // namespace

std::shared_ptr<Mapping> Mapping::create(size_t length, bool populate) {
  if (!populate) {
    std::shared_ptr<Mapping> mapping(new Mapping(map(length, MAP_NORESERVE), length));
    mapping->touched_ = true;
    return mapping;
  }
  std::shared_ptr<Mapping> mapping(new Mapping(length < kHugePage ? map(length, 0) : map_at_huge_page(length), length));
  try {
    // The thread holds the mapping, so it is not unmapped before the thread ends.
    std::thread([mapping] {
      mapping->touch();
      mapping->mark_touched();
    }).detach();
  } catch (const std::system_error& error) {
    throw Failure("KV_MEMORY_INVALID", std::string("the thread that touches the memory could not be started: ") + error.what(),
                  "raise the limit of threads (ulimit -u, pids.max of the control group), or leave the pages untouched: populate: false");
  }
  return mapping;
}

Mapping::~Mapping() { munmap(address_, length_); }

void Mapping::when_touched(std::function<void()> ready) {
  {
    const std::lock_guard lock(mutex_);
    if (!touched_) {
      waiting_.push_back(std::move(ready));
      return;
    }
  }
  ready();
}

void Mapping::mark_touched() {
  std::vector<std::function<void()>> waiting;
  {
    const std::lock_guard lock(mutex_);
    touched_ = true;
    waiting.swap(waiting_);
  }
  for (const auto& ready : waiting) ready();
}

void Mapping::release_pages() const { madvise(address_, length_, MADV_DONTNEED); }

void Mapping::touch() const {
  using Clock = std::chrono::steady_clock;
  Clock::duration searching{};
  for (size_t offset = 0; offset < length_; offset += kTouchedAtOnce) {
    const size_t length = std::min(kTouchedAtOnce, length_ - offset);
    // The kernel gives small pages where it has no others, or must not give huge ones.
    if (length_ >= kHugePage && searching < kMostSearching) madvise(data() + offset, length, MADV_HUGEPAGE);
    const auto start = Clock::now();
    touch(offset, length);
    searching += std::max(Clock::now() - start - kZeroing, Clock::duration::zero());
  }
}

void Mapping::touch(size_t offset, size_t length) const {
  if (madvise(data() + offset, length, MADV_POPULATE_WRITE) == 0) return;
  // Kernels before 5.14: an atomic operation that changes nothing, since JavaScript may already
  // write to the memory.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const size_t end = offset + length; offset < end; offset += page) {
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(data()) + offset, 0, __ATOMIC_RELAXED);
  }
}

}  // namespace kv::nixl
