#include "memory/cuda_driver.h"

#include <dlfcn.h>

#include <cstddef>
#include <iterator>
#include <string>

#include "library/failure.h"

namespace kv::nixl {

namespace {

// cuda.h of CUDA 11 and newer: CUresult, CUpointer_attribute, CUmemorytype.
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

// What is mapped in one piece around an address.
struct Piece {
  unsigned int memory_type = 0;
  int device = -1;
  DevicePointer start = 0;
  size_t length = 0;
};

int look(PointerGetAttributes ask, uint64_t address, Piece& piece) {
  int attributes[] = {kMemoryTypeOf, kDeviceOrdinalOf, kRangeStartOf, kRangeSizeOf};
  void* values[] = {&piece.memory_type, &piece.device, &piece.start, &piece.length};
  return ask(static_cast<unsigned int>(std::size(attributes)), attributes, values, address);
}

}  // namespace

void require_device_memory(uint64_t address, uint64_t length, uint64_t device) {
  const auto refuse = [&](const std::string& why, const std::string& hint) {
    throw Failure("KV_MEMORY_INVALID",
                  std::to_string(length) + " bytes at " + std::to_string(address) + " are no memory of CUDA device " +
                      std::to_string(device) + ": " + why,
                  hint);
  };
  const PointerGetAttributes ask = loaded_driver();
  if (ask == nullptr) {
    refuse("no CUDA driver (libcuda.so.1) is loaded in this process",
           "the address must come from CUDA in this process; memory of another runtime is registered with check: \"none\", and memory of no "
           "device is allocated with the transport's allocate()");
  }
  // One allocation may be many pieces: memory that grows is mapped piece by piece.
  for (uint64_t at = address; at - address < length;) {
    Piece piece;
    const int status = look(ask, at, piece);
    if (status != kSuccess) {
      refuse("the driver answered with CUDA error " + std::to_string(status), "the driver knows the pointers of this process once cuInit has succeeded");
    }
    if (piece.memory_type != kDeviceMemory || piece.start > at || piece.start + piece.length <= at) {
      const std::string from = at == address ? "the address" : "what follows byte " + std::to_string(at - address);
      refuse(from + " is not device memory to the driver", "length and address must be those of an allocation that has not been freed");
    }
    if (piece.device < 0 || static_cast<uint64_t>(piece.device) != device) {
      refuse("it is memory of device " + std::to_string(piece.device),
             "devices are numbered as this process sees them, from 0 on; CUDA_VISIBLE_DEVICES counts");
    }
    at = piece.start + piece.length;
  }
}

}  // namespace kv::nixl
