#pragma once

#include "library/nixl_library.h"

namespace kv::nixl {

// Below this, a JavaScript number is an exact integer: 2^53.
constexpr double kExact = 9007199254740992.0;

// Address, length, device, stride, count.
inline constexpr size_t kRowNumbers = 5;

// `count` descriptors of `length` bytes, `stride` bytes apart, the first at `address`.
struct Row {
  uint64_t address;
  uint64_t length;
  uint64_t device;
  uint64_t stride;
  uint64_t count;

  uint64_t span() const { return (count - 1) * stride + length; }
  // One past the last byte of the last descriptor.
  uint64_t end() const { return address + span(); }
};

class DescriptorTable {
 public:
  static DescriptorTable copy_of(const double* numbers, size_t count) {
    return DescriptorTable({numbers, numbers + count}, nullptr, count);
  }
  // JavaScript keeps this memory until the list is prepared. It is freed two seconds after the
  // environment ends, which `stopping` announces to `read_rows`.
  static DescriptorTable view_of(const double* numbers, size_t count) {
    return DescriptorTable({}, numbers, count);
  }

  // Row by row.
  const double* data() const { return view_ != nullptr ? view_ : copy_.data(); }
  size_t count() const { return count_; }

 private:
  DescriptorTable(vector<double> copy, const double* view, size_t count)
      : copy_(std::move(copy)), view_(view), count_(count) {}

  vector<double> copy_;
  const double* view_;
  size_t count_;
};

// Storage allows the address 0. Throws KV_LIST_INVALID with the row and the value, and
// KV_AGENT_CLOSED soon after `stopping` is set.
vector<Row> read_rows(const DescriptorTable& table, bool zero_address_allowed,
                      const atomic<bool>& stopping);

// Finds a prepared list's descriptor by index. Keeps rows, so memory does not grow with
// descriptors. Immutable, so any thread may read it.
class DescriptorLayout {
 public:
  // Takes at least one row, as `read_rows` returns.
  explicit DescriptorLayout(vector<Row> rows);

  uint32_t count() const { return starts_.back(); }
  const vector<Row>& rows() const { return rows_; }
  // 0 if the lengths differ.
  uint64_t uniform_length() const { return uniform_length_; }
  // Whether each descriptor of a row begins where the one before it ends.
  bool contiguous() const { return contiguous_; }

  // Remembers the last row, so that reading in order needs no search.
  class Cursor {
   public:
    explicit Cursor(const DescriptorLayout& layout) : layout_(&layout) {}

    struct Place {
      const Row& row;
      uint32_t index_in_row;
      // Descriptors of the row from this one on.
      uint32_t left_in_row;
    };
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
  vector<Row> rows_;
  // The index of each row's first descriptor, then the total.
  vector<uint32_t> starts_;
  uint64_t uniform_length_ = 0;
  bool contiguous_ = true;
};

// All throw KV_LIST_INVALID.
void add_descriptor(XferDlist list, uint64_t address, uint64_t length, uint64_t device);
// Adds every descriptor, in order.
void add_each_descriptor(XferDlist list, const vector<Row>& rows);
// Adds one descriptor per row, from its first byte to its last.
void add_row_spans(XferDlist list, const vector<Row>& rows);

}  // namespace kv::nixl
