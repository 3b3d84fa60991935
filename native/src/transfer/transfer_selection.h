#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/descriptor_layout.h"

namespace kv::nixl {

// Descriptors `local` to `local + count - 1` of the local list, paired with as many from `remote`
// on of the remote list.
struct Run {
  uint32_t local;
  uint32_t remote;
  uint32_t count;
};

// Numbers per run that JavaScript passes: local, remote, count.
inline constexpr size_t kRunNumbers = 3;
// Numbers per offset: for the local list, for the remote list.
inline constexpr size_t kOffsetNumbers = 2;

// The descriptors that a transfer moves: pairs of indices into its two lists. Given one by one
// (ids), or as runs that are all repeated at every offset. Immutable once made.
class TransferSelection {
 public:
  TransferSelection() = default;
  // Copies and checks ids. Throws KV_TRANSFER_INVALID, naming the index and the list.
  static TransferSelection of_ids(const int32_t* local, size_t local_count, const int32_t* remote, size_t remote_count,
                                  const DescriptorLayout& local_layout, const DescriptorLayout& remote_layout);
  // Takes over and checks runs and offsets. Throws KV_TRANSFER_INVALID, naming the run and the
  // list.
  static TransferSelection of_runs(std::vector<int32_t> runs, std::vector<int32_t> offsets, const DescriptorLayout& local_layout,
                                   const DescriptorLayout& remote_layout);

  // Pairs of descriptors.
  uint64_t count() const { return count_; }
  // Bytes of all pairs.
  uint64_t bytes() const { return bytes_; }
  // The local and remote ids; empty if runs were given.
  const std::vector<int32_t>& local_ids() const { return local_; }
  const std::vector<int32_t>& remote_ids() const { return remote_; }
  // Runs, each counted once per offset; 0 if ids were given.
  uint64_t run_count() const { return runs_.size() / kRunNumbers * (offsets_.size() / kOffsetNumbers); }

  // Reads a selection from beginning to end, run by run.
  class Cursor {
   public:
    explicit Cursor(const TransferSelection& selection) : selection_(&selection) {}
    // Sets the next run; returns false at the end. Consecutive ids are one run.
    bool next(Run& run);

   private:
    const TransferSelection* selection_;
    size_t at_ = 0;
    size_t offset_ = 0;
  };

 private:
  void measure_bytes(const DescriptorLayout& local, const DescriptorLayout& remote);
  void throw_out_of_range(int64_t local_offset, int64_t remote_offset, const DescriptorLayout& local, const DescriptorLayout& remote) const;

  // Either both lists of ids, or runs and offsets.
  std::vector<int32_t> local_;
  std::vector<int32_t> remote_;
  std::vector<int32_t> runs_;
  std::vector<int32_t> offsets_;
  uint64_t count_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace kv::nixl
