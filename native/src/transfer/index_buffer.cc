#include "transfer/index_buffer.h"

#include <algorithm>
#include <utility>

namespace kv::nixl {

void IndexBuffer::grow(size_t more) {
  const size_t capacity = std::max(count_ + more, 2 * capacity_);
  auto local = std::make_unique_for_overwrite<int32_t[]>(capacity);
  auto remote = std::make_unique_for_overwrite<int32_t[]>(capacity);
  std::copy_n(local_.get(), count_, local.get());
  std::copy_n(remote_.get(), count_, remote.get());
  local_ = std::move(local);
  remote_ = std::move(remote);
  capacity_ = capacity;
}

}  // namespace kv::nixl
