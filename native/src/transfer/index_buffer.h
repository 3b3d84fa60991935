// Indices of two lists, written run by run. Their memory is used again for the next ones, and grows with what is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "transfer/transfer_selection.h"

namespace kv::nixl {

class IndexBuffer {
 public:
  void clear() { count_ = 0; }
  // By value: what is written here could be the run, for all that the compiler knows.
  void add(Run run) {
    if (capacity_ - count_ < run.count) grow(run.count);
    int32_t* local = local_.get() + count_;
    int32_t* remote = remote_.get() + count_;
    for (uint32_t index = 0; index < run.count; ++index) {
      local[index] = static_cast<int32_t>(run.local + index);
      remote[index] = static_cast<int32_t>(run.remote + index);
    }
    count_ += run.count;
  }

  size_t count() const { return count_; }
  const int32_t* local() const { return local_.get(); }
  const int32_t* remote() const { return remote_.get(); }

 private:
  void grow(size_t more);

  std::unique_ptr<int32_t[]> local_;
  std::unique_ptr<int32_t[]> remote_;
  size_t count_ = 0;
  size_t capacity_ = 0;
};

}  // namespace kv::nixl
