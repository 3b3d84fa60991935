#include "memory/mapping.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <thread>

#include "library/failure.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kv::nixl {

namespace {

// A copy by another process looks up each page, so huge ones are faster.
constexpr size_t kHugePage = 2u << 20;

void* map(size_t length, int flags) {
  void* address = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (address != MAP_FAILED) return address;
  throw Failure("KV_MEMORY_INVALID", "cannot map " + to_string(length) + " bytes: " + strerror(errno));
}

constexpr size_t kTouchedAtOnce = 64u << 20;
// Fragmented memory makes huge pages slow to find. After this much more time than zeroing takes,
// small pages will do.
constexpr auto kMostSearching = seconds(5);
constexpr auto kZeroing = milliseconds(100);

void* map_at_huge_page(size_t length) {
  auto* first = static_cast<byte*>(map(length + kHugePage, 0));
  const size_t before = -reinterpret_cast<uintptr_t>(first) % kHugePage;
  if (before > 0) munmap(first, before);
  byte* address = first + before;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t used = (length + page - 1) / page * page;
  munmap(address + used, kHugePage - before);
  return address;
}

}  // namespace

shared_ptr<Mapping> Mapping::create(size_t length, bool populate) {
  if (!populate) {
    shared_ptr<Mapping> mapping(new Mapping(map(length, MAP_NORESERVE), length));
    mapping->touched_ = true;
    return mapping;
  }
  shared_ptr<Mapping> mapping(new Mapping(length < kHugePage ? map(length, 0) : map_at_huge_page(length), length));
  try {
    // The thread keeps the mapping until it ends. Nothing in it throws.
    std::thread([mapping] {
      mapping->touch();
      mapping->mark_touched();
    }).detach();
  } catch (const std::system_error& error) {
    throw Failure("KV_MEMORY_INVALID", string("the thread that touches the memory could not be started: ") + error.what(),
                  "raise the limit of threads (ulimit -u, pids.max of the control group), or leave the pages untouched: populate: false");
  }
  return mapping;
}

Mapping::~Mapping() { munmap(data(), length); }

void Mapping::copy(bool gathers, const vector<ByteRun>& runs, byte* bytes) const {
  for (const auto& [offset, length] : runs) {
    byte* const own = data() + offset;
    if (length > 0) memcpy(gathers ? bytes : own, gathers ? own : bytes, length);
    bytes += length;
  }
}

void Mapping::when_touched(std::function<void()> ready) {
  {
    const lock_guard lock(mutex_);
    if (!touched_) {
      waiting_.push_back(std::move(ready));
      return;
    }
  }
  ready();
}

void Mapping::mark_touched() {
  vector<std::function<void()>> waiting;
  {
    const lock_guard lock(mutex_);
    touched_ = true;
    waiting.swap(waiting_);
  }
  for (const auto& ready : waiting) ready();
}

void Mapping::release_pages() const { madvise(data(), length, MADV_DONTNEED); }

void Mapping::touch() const {
  Clock::duration searching{};
  for (size_t offset = 0; offset < length; offset += kTouchedAtOnce) {
    const size_t count = std::min(kTouchedAtOnce, length - offset);
    // Without huge pages, the kernel gives small ones.
    if (length >= kHugePage && searching < kMostSearching) madvise(data() + offset, count, MADV_HUGEPAGE);
    const auto start = Clock::now();
    touch(offset, count);
    searching += std::max(Clock::now() - start - kZeroing, Clock::duration::zero());
  }
}

void Mapping::touch(size_t offset, size_t count) const {
  if (madvise(data() + offset, count, MADV_POPULATE_WRITE) == 0) return;
  // Kernels before 5.14: an atomic operation without effect, since JavaScript may already write
  // here.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const size_t end = offset + count; offset < end; offset += page) {
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(data()) + offset, 0, __ATOMIC_RELAXED);
  }
}

}  // namespace kv::nixl
