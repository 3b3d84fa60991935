// Descriptors of a prepared list: rows `[address, length, device, stride, count]` read, checked and expanded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nixl_capi.h"

namespace kv::nixl {

inline constexpr size_t kRowNumbers = 5;
// A descriptor longer than this goes to NIXL in pieces, so that no single post copies for longer than a slice may.
inline constexpr uint64_t kPieceBytes = 8ull << 20;

struct Row {
  uint64_t address;
  uint64_t length;
  uint64_t device;
  uint64_t stride;
  uint64_t count;

  // One past the last byte of the last descriptor.
  uint64_t end() const { return address + (count - 1) * stride + length; }
};

// Reads and checks rows. Throws Failure KV_LIST_INVALID naming the row and the value.
std::vector<Row> read_rows(const double* numbers, size_t count);

// What an index of the list means, by length and by piece. Immutable, and so free to be read on every thread.
class Shape {
 public:
  explicit Shape(const std::vector<Row>& rows);

  uint32_t count() const { return count_; }
  uint64_t length(uint32_t index) const { return lengths_.empty() ? uniform_ : lengths_[index]; }
  // All descriptors have this length; 0 if lengths differ.
  uint64_t uniform_length() const { return lengths_.empty() ? uniform_ : 0; }
  // True if some descriptor was cut, so that indices must be translated.
  bool has_pieces() const { return !first_piece_.empty(); }
  int32_t first_piece(uint32_t index) const { return first_piece_[index]; }
  uint64_t pieces() const { return pieces_; }

 private:
  uint32_t count_ = 0;
  uint64_t pieces_ = 0;
  uint64_t uniform_ = 0;
  std::vector<uint64_t> lengths_;
  std::vector<int32_t> first_piece_;
};

inline uint64_t pieces_of(uint64_t length) { return (length + kPieceBytes - 1) / kPieceBytes; }

// Adds every descriptor of `rows`, in order and in pieces, to a list of the library.
void expand(const capi::Functions& nixl, capi::XferDlist list, const std::vector<Row>& rows);

}  // namespace kv::nixl
