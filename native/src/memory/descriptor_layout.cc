#include "memory/descriptor_layout.h"

#include <algorithm>

#include "library/failure.h"

namespace kv::nixl {

namespace {

constexpr uint64_t kMaxDescriptors = 1ull << 26;
// Rows between two checks for the environment's end.
constexpr size_t kRowsPerStopCheck = 1u << 16;

Failure invalid(size_t row, const string& what) {
  return Failure("KV_LIST_INVALID", "row " + to_string(row) + " of the descriptor table: " + what);
}

[[gnu::cold, gnu::noinline]] Failure not_an_integer(double value, size_t row, const char* name) {
  return invalid(row,
                 string(name) + " is " + to_string(value) + ", not an integer from 0 to 2^53 - 1");
}

inline uint64_t integer(double value, size_t row, const char* name) {
  // The comparison also refuses NaN. Conversion through the signed type takes one instruction.
  if (!(value >= 0 && value < kExact) ||
      value != static_cast<double>(static_cast<int64_t>(value))) {
    throw not_an_integer(value, row, name);
  }
  return static_cast<uint64_t>(static_cast<int64_t>(value));
}

}  // namespace

vector<Row> read_rows(const DescriptorTable& table, bool zero_address_allowed,
                      const atomic<bool>& stopping) {
  const size_t count = table.count();
  if (count == 0 || count % kRowNumbers != 0) {
    throw Failure("KV_LIST_INVALID",
                  "a descriptor table has rows of 5 numbers and at least one row; this one has " +
                      to_string(count) + " numbers");
  }
  vector<Row> rows;
  rows.reserve(count / kRowNumbers);
  uint64_t descriptors = 0;
  for (size_t index = 0; index < count / kRowNumbers; ++index) {
    if (index % kRowsPerStopCheck == 0 && stopping)
      throw Failure("KV_AGENT_CLOSED", "the environment ended");
    const double* number = table.data() + index * kRowNumbers;
    const Row row{integer(number[0], index, "address"), integer(number[1], index, "length"),
                  integer(number[2], index, "device"), integer(number[3], index, "stride"),
                  integer(number[4], index, "count")};
    if (row.address == 0 && !zero_address_allowed) throw invalid(index, "address is 0");
    if (row.length == 0) throw invalid(index, "length is 0");
    if (row.count == 0) throw invalid(index, "count is 0");
    if (row.count > kMaxDescriptors || (descriptors += row.count) > kMaxDescriptors) {
      throw invalid(index, "more than " + to_string(kMaxDescriptors) + " descriptors in one list");
    }
    // In doubles, since integers may overflow. Rounding near 2^53 does not matter.
    if (number[0] + (number[4] - 1) * number[3] + number[1] >= kExact)
      throw invalid(index, "it ends beyond 2^53");
    rows.push_back(row);
  }
  return rows;
}

DescriptorLayout::DescriptorLayout(vector<Row> rows) : rows_(std::move(rows)) {
  starts_.reserve(rows_.size() + 1);
  starts_.push_back(0);
  uniform_length_ = rows_.front().length;
  for (const Row& row : rows_) {
    starts_.push_back(starts_.back() + static_cast<uint32_t>(row.count));
    if (row.length != rows_.front().length) uniform_length_ = 0;
    contiguous_ = contiguous_ && (row.count == 1 || row.stride == row.length);
  }
}

void DescriptorLayout::Cursor::find_row(uint32_t index) {
  const auto& starts = layout_->starts_;
  // Most lists are read in order, so try the next row first.
  if (row_ + 2 < starts.size() && index >= starts[row_ + 1] && index < starts[row_ + 2]) {
    ++row_;
    return;
  }
  row_ =
      static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), index) - starts.begin()) -
      1;
}

void add_descriptor(XferDlist list, uint64_t address, uint64_t length, uint64_t device) {
  check(capi::xfer_dlist_add_desc(list, address, length, device), "KV_LIST_INVALID",
        "NIXL refused a descriptor");
}

void add_each_descriptor(XferDlist list, const vector<Row>& rows) {
  for (const Row& row : rows) {
    uint64_t address = row.address;
    for (uint64_t index = 0; index < row.count; ++index, address += row.stride) {
      add_descriptor(list, address, row.length, row.device);
    }
  }
}

void add_row_spans(XferDlist list, const vector<Row>& rows) {
  for (const Row& row : rows) add_descriptor(list, row.address, row.span(), row.device);
}

}  // namespace kv::nixl
