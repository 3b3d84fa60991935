#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kv::nixl {

// Zeroed memory of a CUDA device.
class CudaMemory {
 public:
  // Loads the driver on first use, and allocates in the device's primary context, as CUDA's runtime
  // does. Throws KV_TRANSPORT_UNSUPPORTED without a driver or device, and KV_MEMORY_INVALID where
  // the driver refuses.
  static std::shared_ptr<CudaMemory> create(uint64_t length, int device);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  // The first byte, as the device addresses it.
  uint64_t address() const { return address_; }
  // Bytes.
  uint64_t length() const { return length_; }

  // A piece of the memory, and where its bytes are in this process.
  struct Piece {
    uint64_t offset;
    uint64_t length;
    std::byte* bytes;
  };
  // Copies pieces to the device, or from it, in order. The bytes are in place when the call
  // returns, also for a NIC that reads the device's memory. The CUDA context of the calling thread
  // is the same afterwards. Throws KV_MEMORY_INVALID with the driver's error.
  void to_device(const std::vector<Piece>& pieces) const;
  void from_device(const std::vector<Piece>& pieces) const;

 private:
  CudaMemory(uint64_t address, uint64_t length, void* context) : address_(address), length_(length), context_(context) {}

  uint64_t address_;
  uint64_t length_;
  void* context_;
};

}  // namespace kv::nixl
