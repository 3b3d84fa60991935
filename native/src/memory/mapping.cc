#include "memory/mapping.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "library/failure.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kv::nixl {

std::shared_ptr<Mapping> Mapping::create(size_t length, bool populate) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (populate ? 0 : MAP_NORESERVE);
  void* address = mmap(nullptr, length, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (address == MAP_FAILED) {
    throw Failure("KV_MEMORY_INVALID", "cannot map " + std::to_string(length) + " bytes: " + strerror(errno));
  }
  std::shared_ptr<Mapping> mapping(new Mapping(address, length));
  if (!populate) {
    mapping->touched_ = true;
    return mapping;
  }
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
  if (madvise(address_, length_, MADV_POPULATE_WRITE) == 0) return;
  // Kernels before 5.14: an atomic operation that changes nothing, since JavaScript may already write to the memory.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t offset = 0; offset < length_; offset += page) {
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(data()) + offset, 0, __ATOMIC_RELAXED);
  }
}

}  // namespace kv::nixl
