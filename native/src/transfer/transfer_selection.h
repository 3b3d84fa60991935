// The descriptors that a transfer moves: pairs of indices into its two lists, one by one or in runs that go on together on both sides, and
// that may come again at other places of the lists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/descriptor_layout.h"

namespace kv::nixl {

// Descriptors `local` to `local + count - 1`, pairwise with as many from `remote` on.
struct Run {
  uint32_t local;
  uint32_t remote;
  uint32_t count;
};

inline constexpr size_t kRunNumbers = 3;
inline constexpr size_t kOffsetNumbers = 2;

class TransferSelection {
 public:
  TransferSelection() = default;
  // Copies and checks what a caller named. Throws Failure KV_TRANSFER_INVALID, naming the index and both lists.
  static TransferSelection of_ids(const int32_t* local, size_t local_count, const int32_t* remote, size_t remote_count,
                      const DescriptorLayout& local_shape, const DescriptorLayout& remote_shape);
  // Runs, all of them once for each row of offsets.
  static TransferSelection of_runs(std::vector<int32_t> runs, std::vector<int32_t> offsets, const DescriptorLayout& local_shape, const DescriptorLayout& remote_shape);

  // Descriptors, and their bytes.
  uint64_t count() const { return count_; }
  uint64_t bytes() const { return bytes_; }
  // Index by index, where they came so; empty where they came as runs.
  const std::vector<int32_t>& local_ids() const { return local_; }
  const std::vector<int32_t>& remote_ids() const { return remote_; }
  // Where they came as runs: how many, each counted once for each of its offsets.
  uint64_t run_count() const { return runs_.size() / kRunNumbers * (offsets_.size() / kOffsetNumbers); }

  // Goes through them from the first to the last, a run at a time.
  class Reader {
   public:
    explicit Reader(const TransferSelection& pairs) : pairs_(&pairs) {}
    // The next run; false at the end. Of ids that follow one another it makes one.
    bool next(Run& run);

   private:
    const TransferSelection* pairs_;
    size_t at_ = 0;
    size_t offset_ = 0;
  };

 private:
  void weigh(const DescriptorLayout& local, const DescriptorLayout& remote);
  // Throws for the first run that these offsets take out of its list.
  void refuse_offset(int64_t here, int64_t there, const DescriptorLayout& local, const DescriptorLayout& remote) const;

  // Either both lists of ids, or rows of three numbers and rows of two.
  std::vector<int32_t> local_;
  std::vector<int32_t> remote_;
  std::vector<int32_t> runs_;
  std::vector<int32_t> offsets_;
  uint64_t count_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace kv::nixl
