#pragma once

#include "library/std_names.h"

namespace kv::nixl {

struct ByteRun {
  uint64_t offset;
  uint64_t length;
};

// Host or device memory that the addon has allocated.
class AllocatedMemory {
 public:
  AllocatedMemory(uint64_t address, uint64_t length) : address(address), length(length) {}
  virtual ~AllocatedMemory() = default;
  AllocatedMemory(const AllocatedMemory&) = delete;
  AllocatedMemory& operator=(const AllocatedMemory&) = delete;

  // The first byte: on the device for GPU memory, otherwise in this process.
  const uint64_t address;
  // Bytes.
  const uint64_t length;
  // Registrations and copies under way. The owner must keep the memory meanwhile.
  atomic<uint32_t> pins{0};

  // Copies all runs, in order, into consecutive bytes, or these into the runs. Returns when the
  // bytes are in place. Throws KV_MEMORY_INVALID.
  virtual void copy(bool gathers, const vector<ByteRun>& runs, byte* bytes) const = 0;
  // Whether transfers may use the memory.
  virtual bool touched() const { return true; }
};

class Pin {
 public:
  explicit Pin(shared_ptr<AllocatedMemory> memory) : memory(std::move(memory)) {
    ++this->memory->pins;
  }
  ~Pin() { --memory->pins; }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

  const shared_ptr<AllocatedMemory> memory;
};

}  // namespace kv::nixl
