#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "library/nixl_capi.h"

namespace kv::nixl {

// A number of JavaScript below this is an exact integer: 2^53.
constexpr double kExact = 9007199254740992.0;

// Numbers per row of a descriptor table: address, length, device, stride, count.
inline constexpr size_t kRowNumbers = 5;

// `count` descriptors of `length` bytes, the first at `address`, each `stride` bytes after the one
// before.
struct Row {
  uint64_t address;
  uint64_t length;
  uint64_t device;
  uint64_t stride;
  uint64_t count;

  // Bytes from the first byte of the first descriptor to the last byte of the last.
  uint64_t span() const { return (count - 1) * stride + length; }
  // The address one past the last byte of the last descriptor.
  uint64_t end() const { return address + span(); }
};

// The numbers of a descriptor table that JavaScript passed.
class DescriptorTable {
 public:
  // A copy of the numbers.
  static DescriptorTable copy_of(const double* numbers, size_t count) { return DescriptorTable({numbers, numbers + count}, nullptr, count); }
  // The numbers in JavaScript's own memory. JavaScript keeps it until the list is prepared. When
  // the environment ends it is freed two seconds later, which is why `read_rows` takes `stopping`.
  static DescriptorTable view_of(const double* numbers, size_t count) { return DescriptorTable({}, numbers, count); }

  // The numbers, row by row.
  const double* data() const { return view_ != nullptr ? view_ : copy_.data(); }
  // How many numbers there are.
  size_t count() const { return count_; }

 private:
  DescriptorTable(std::vector<double> copy, const double* view, size_t count) : copy_(std::move(copy)), view_(view), count_(count) {}

  std::vector<double> copy_;
  const double* view_;
  size_t count_;
};

// Reads and checks a table. `zero_address_allowed`: storage counts addresses from 0. Throws
// KV_LIST_INVALID, naming the row and the value, and KV_AGENT_CLOSED soon after `stopping` is set.
std::vector<Row> read_rows(const DescriptorTable& table, bool zero_address_allowed, const std::atomic<bool>& stopping);

// Maps an index of a prepared list to its descriptor. Keeps rows as they are, so that its memory
// grows with rows and not with descriptors. Immutable, so every thread may read it.
class DescriptorLayout {
 public:
  // At least one row, as `read_rows` returns them.
  explicit DescriptorLayout(std::vector<Row> rows);

  // Descriptors in all rows.
  uint32_t count() const { return starts_.back(); }
  // The rows that it was made from.
  const std::vector<Row>& rows() const { return rows_; }
  // The length of every descriptor; 0 if lengths differ.
  uint64_t uniform_length() const { return uniform_length_; }
  // Whether in every row each descriptor begins where the one before it ends.
  bool contiguous() const { return contiguous_; }

  // Looks up descriptors. Remembers the row of the last one, so that a walk in order needs no
  // search.
  class Cursor {
   public:
    explicit Cursor(const DescriptorLayout& layout) : layout_(&layout) {}

    // A descriptor: the one number `index_in_row` of its row.
    struct Place {
      const Row& row;
      uint32_t index_in_row;
      // Descriptors of the row from this one on.
      uint32_t left_in_row;
    };
    // The place of a descriptor by its index, which must be below `count()`.
    Place at(uint32_t index) {
      const auto& starts = layout_->starts_;
      if (index < starts[row_] || index >= starts[row_ + 1]) find_row(index);
      return {layout_->rows_[row_], index - starts[row_], starts[row_ + 1] - index};
    }

   private:
    void find_row(uint32_t index);

    const DescriptorLayout* layout_;
    size_t row_ = 0;
  };

 private:
  std::vector<Row> rows_;
  // The index of each row's first descriptor, then the count of all.
  std::vector<uint32_t> starts_;
  uint64_t uniform_length_ = 0;
  bool contiguous_ = true;
};

// Adds every descriptor of `rows`, in order, to a list of NIXL. Throws KV_LIST_INVALID.
void add_each_descriptor(const capi::Functions& nixl, capi::XferDlist list, const std::vector<Row>& rows);
// Adds one descriptor per row, from its first byte to its last, to a list of NIXL. Throws
// KV_LIST_INVALID.
void add_row_spans(const capi::Functions& nixl, capi::XferDlist list, const std::vector<Row>& rows);

}  // namespace kv::nixl
