#include "memory/cuda_driver.h"

#include <dlfcn.h>

#include <cstddef>
#include <iterator>
#include <string>

#include "library/failure.h"

namespace kv::nixl {

namespace {

// Values of CUresult, CUpointer_attribute and CUmemorytype in cuda.h of CUDA 11 and newer.
constexpr int kSuccess = 0;
constexpr int kMemoryTypeOf = 2;
constexpr int kDeviceOrdinalOf = 9;
constexpr int kRangeStartOf = 11;
constexpr int kRangeSizeOf = 12;
constexpr unsigned int kDeviceMemory = 2;

using DevicePointer = unsigned long long;
using PointerGetAttributes = int (*)(unsigned int count, int* attributes, void** values, DevicePointer pointer);

PointerGetAttributes loaded_driver() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NODELETE | RTLD_LAZY);
  return driver == nullptr ? nullptr : reinterpret_cast<PointerGetAttributes>(dlsym(driver, "cuPointerGetAttributes"));
}

// The mapped piece of memory around an address.
struct Piece {
  unsigned int memory_type = 0;
  int device = -1;
  DevicePointer start = 0;
  size_t length = 0;
};

int query(PointerGetAttributes get_attributes, uint64_t address, Piece& piece) {
  int attributes[] = {kMemoryTypeOf, kDeviceOrdinalOf, kRangeStartOf, kRangeSizeOf};
  void* values[] = {&piece.memory_type, &piece.device, &piece.start, &piece.length};
  return get_attributes(static_cast<unsigned int>(std::size(attributes)), attributes, values, address);
}

}  // namespace

void require_device_memory(uint64_t address, uint64_t length, uint64_t device) {
  const auto fail = [&](const std::string& why, const std::string& hint) {
    throw Failure("KV_MEMORY_INVALID",
                  std::to_string(length) + " bytes at " + std::to_string(address) + " are not memory of CUDA device " +
                      std::to_string(device) + ": " + why,
                  hint);
  };
  const PointerGetAttributes get_attributes = loaded_driver();
  if (get_attributes == nullptr) {
    fail("no CUDA driver (libcuda.so.1) is loaded in this process",
         "the address must come from CUDA in this process; register memory of another runtime with check: \"none\", and allocate host memory "
         "with the transport's allocate()");
  }
  // An allocation may consist of many pieces: memory that grows is mapped piece by piece.
  for (uint64_t at = address; at - address < length;) {
    Piece piece;
    const int status = query(get_attributes, at, piece);
    if (status != kSuccess) {
      fail("the driver answered with CUDA error " + std::to_string(status), "call cuInit before the memory is registered");
    }
    if (piece.memory_type != kDeviceMemory || piece.start > at || piece.start + piece.length <= at) {
      const std::string from = at == address ? "the address" : "the memory after byte " + std::to_string(at - address);
      fail(from + " is not device memory, says the driver", "pass the address and length of an allocation that has not been freed");
    }
    if (piece.device < 0 || static_cast<uint64_t>(piece.device) != device) {
      fail("it is memory of device " + std::to_string(piece.device),
           "number devices as this process sees them, from 0 on; CUDA_VISIBLE_DEVICES applies");
    }
    at = piece.start + piece.length;
  }
}

}  // namespace kv::nixl
