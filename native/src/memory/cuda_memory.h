#pragma once

#include "memory/allocated_memory.h"

namespace kv::nixl {

// Zeroed memory of a CUDA device. Copies preserve the calling thread's CUDA context.
class CudaMemory : public AllocatedMemory {
 public:
  // Allocates in the device's primary context, as CUDA's runtime does. Throws
  // KV_TRANSPORT_UNSUPPORTED without a driver or device, and KV_MEMORY_INVALID where the driver
  // refuses.
  static shared_ptr<CudaMemory> create(uint64_t length, int device);
  ~CudaMemory() override;

  void copy(bool gathers, const vector<ByteRun>& runs, byte* bytes) const override;

 private:
  CudaMemory(uint64_t address, uint64_t length, void* context)
      : AllocatedMemory(address, length), context_(context) {}

  void* context_;
};

// Throws KV_MEMORY_INVALID unless the driver knows all of it as memory of that device. Also without
// a loaded driver: a CUDA pointer is valid only in the process that allocated it.
void require_device_memory(uint64_t address, uint64_t length, uint64_t device);

}  // namespace kv::nixl
