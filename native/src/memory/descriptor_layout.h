// Descriptors of a prepared list: rows `[address, length, device, stride, count]` read, checked and expanded.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "library/nixl_capi.h"

namespace kv::nixl {

inline constexpr size_t kRowNumbers = 5;

struct Row {
  uint64_t address;
  uint64_t length;
  uint64_t device;
  uint64_t stride;
  uint64_t count;

  // From the first byte of the first descriptor to the last byte of the last.
  uint64_t span() const { return (count - 1) * stride + length; }
  // One past the last byte of the last descriptor.
  uint64_t end() const { return address + span(); }
};

// The numbers of a descriptor table.
class RowNumbers {
 public:
  static RowNumbers copied(const double* numbers, size_t count) { return RowNumbers({numbers, numbers + count}, nullptr, count); }
  // Memory of JavaScript's. It stays until the list is made, or for two seconds from the environment's end.
  static RowNumbers kept(const double* numbers, size_t count) { return RowNumbers({}, numbers, count); }

  const double* data() const { return kept_ != nullptr ? kept_ : copy_.data(); }
  size_t count() const { return count_; }

 private:
  RowNumbers(std::vector<double> copy, const double* kept, size_t count) : copy_(std::move(copy)), kept_(kept), count_(count) {}

  std::vector<double> copy_;
  const double* kept_;
  size_t count_;
};

// Reads and checks rows; `from_zero`: an address may be 0. Throws Failure KV_LIST_INVALID naming the row and the value, and
// KV_AGENT_CLOSED soon after `stopping` is set: what is kept for the environment goes with it.
std::vector<Row> read_rows(const RowNumbers& numbers, bool from_zero, const std::atomic<bool>& stopping);

// What an index of the list means. Rows stay as they are, so that memory goes with rows and not with descriptors. Immutable, and so free
// to be read on every thread.
class DescriptorLayout {
 public:
  explicit DescriptorLayout(std::vector<Row> rows);

  uint32_t count() const { return starts_.back(); }
  const std::vector<Row>& rows() const { return rows_; }
  // All descriptors have this length; 0 if lengths differ.
  uint64_t uniform_length() const { return uniform_; }
  // In every row one descriptor begins where the one before it ends.
  bool dense() const { return dense_; }

  // Looks descriptors up one after another, and so remembers the row of the last one.
  class Reader {
   public:
    explicit Reader(const DescriptorLayout& shape) : shape_(&shape) {}

    struct Place {
      const Row& row;
      uint32_t within;  // descriptors of the row before this one
      uint32_t left;    // descriptors of the row from this one on
    };
    Place at(uint32_t index) {
      const auto& starts = shape_->starts_;
      if (index < starts[row_] || index >= starts[row_ + 1]) find(index);
      return {shape_->rows_[row_], index - starts[row_], starts[row_ + 1] - index};
    }

   private:
    void find(uint32_t index);

    const DescriptorLayout* shape_;
    size_t row_ = 0;
  };

 private:
  std::vector<Row> rows_;
  std::vector<uint32_t> starts_;  // of each row, and the count
  uint64_t uniform_ = 0;
  bool dense_ = true;
};

// Adds every descriptor of `rows`, in order, to a list of the library.
void expand(const capi::Functions& nixl, capi::XferDlist list, const std::vector<Row>& rows);
// One descriptor for each row, from its first byte to its last.
void add_spans(const capi::Functions& nixl, capi::XferDlist list, const std::vector<Row>& rows);

}  // namespace kv::nixl
