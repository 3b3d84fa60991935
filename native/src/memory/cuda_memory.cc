#include "memory/cuda_memory.h"

#include <dlfcn.h>

#include <iterator>
#include <type_traits>

#include "library/failure.h"

namespace kv::nixl {

namespace {

// From cuda.h of CUDA 11 and newer: CUresult, CUpointer_attribute, CUmemorytype.
constexpr int kDone = 0;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidDevice = 101;
constexpr int kMemoryTypeOf = 2;
constexpr int kDeviceOrdinalOf = 9;
constexpr int kRangeStartOf = 11;
constexpr int kRangeSizeOf = 12;
constexpr unsigned int kDeviceMemory = 2;

using DevicePointer = unsigned long long;

// Members of Driver: name, function of libcuda, parameters.
#define KV_NIXL_CUDA_FUNCTIONS(FUNCTION)                                                    \
  FUNCTION(init, "cuInit", unsigned int flags)                                              \
  FUNCTION(device_get, "cuDeviceGet", int* device, int ordinal)                             \
  FUNCTION(device_count, "cuDeviceGetCount", int* count)                                    \
  FUNCTION(retain, "cuDevicePrimaryCtxRetain", void** context, int device)                  \
  FUNCTION(push, "cuCtxPushCurrent_v2", void* context)                                      \
  FUNCTION(pop, "cuCtxPopCurrent_v2", void** context)                                       \
  FUNCTION(synchronize, "cuCtxSynchronize")                                                 \
  FUNCTION(allocate, "cuMemAlloc_v2", DevicePointer* pointer, size_t length)                \
  FUNCTION(free, "cuMemFree_v2", DevicePointer)                                             \
  FUNCTION(set, "cuMemsetD8_v2", DevicePointer, unsigned char value, size_t length)         \
  FUNCTION(to_device, "cuMemcpyHtoD_v2", DevicePointer to, const void* from, size_t length) \
  FUNCTION(from_device, "cuMemcpyDtoH_v2", void* to, DevicePointer from, size_t length)

struct Driver {
#define KV_NIXL_CUDA_MEMBER(name, symbol, ...) int (*name)(__VA_ARGS__) = nullptr;
  KV_NIXL_CUDA_FUNCTIONS(KV_NIXL_CUDA_MEMBER)
#undef KV_NIXL_CUDA_MEMBER
};

// The driver stays loaded: its threads and memory outlive ours.
Driver load_driver() {
  void* const library = dlopen("libcuda.so.1", RTLD_NODELETE | RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    throw Failure("KV_TRANSPORT_UNSUPPORTED",
                  string("cannot allocate memory of a GPU: ") + dlerror(),
                  "install the NVIDIA driver (in a container: --gpus all), or allocate DRAM");
  }
  Driver driver;
  const auto bind = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) {
      throw Failure("KV_TRANSPORT_UNSUPPORTED",
                    string("cannot allocate memory of a GPU: the CUDA driver has no ") + name,
                    "install a driver of CUDA 11 or newer");
    }
  };
#define KV_NIXL_CUDA_BIND(name, symbol, ...) bind(driver.name, symbol);
  KV_NIXL_CUDA_FUNCTIONS(KV_NIXL_CUDA_BIND)
#undef KV_NIXL_CUDA_BIND
  return driver;
}

const Driver& driver() {
  static const Driver loaded = load_driver();
  return loaded;
}

string error_text(int status) {
  if (status == kOutOfMemory) return "out of memory (CUDA error 2)";
  return "CUDA error " + to_string(status);
}

// Makes the device's context current for a scope.
class CurrentContext {
 public:
  explicit CurrentContext(void* context) : status(driver().push(context)) {}
  ~CurrentContext() {
    void* popped = nullptr;
    if (status == kDone) driver().pop(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  const int status;
};

}  // namespace

shared_ptr<CudaMemory> CudaMemory::create(uint64_t length, int ordinal) {
  const string what =
      "cannot allocate " + to_string(length) + " bytes of GPU " + to_string(ordinal) + ": ";
  const Driver& cuda = driver();
  if (const int status = cuda.init(0); status != kDone) {
    throw Failure("KV_TRANSPORT_UNSUPPORTED",
                  what + "the CUDA driver does not start: " + error_text(status),
                  "nvidia-smi shows the GPUs of this machine");
  }
  int device = 0;
  if (const int status = cuda.device_get(&device, ordinal); status != kDone) {
    int count = 0;
    cuda.device_count(&count);
    const bool absent = status == kInvalidDevice;
    throw Failure(
        "KV_TRANSPORT_UNSUPPORTED",
        what + (absent ? "this process sees " + to_string(count) + " GPUs" : error_text(status)),
        "GPUs count from 0, as CUDA_VISIBLE_DEVICES shows them to this process");
  }
  // Never released: NIXL, UCX and CUDA's runtime keep using the context.
  void* context = nullptr;
  if (const int status = cuda.retain(&context, device); status != kDone) {
    throw Failure("KV_MEMORY_INVALID", what + error_text(status),
                  "nvidia-smi shows which processes use the GPU");
  }
  DevicePointer pointer = 0;
  int status = kDone;
  {
    const CurrentContext current(context);
    status = current.status;
    if (status == kDone) status = cuda.allocate(&pointer, length);
    if (status == kDone) status = cuda.set(pointer, 0, length);
    if (status == kDone) status = cuda.synchronize();
    if (status != kDone && pointer != 0) cuda.free(pointer);
  }
  if (status != kDone) {
    throw Failure("KV_MEMORY_INVALID", what + error_text(status),
                  "nvidia-smi shows how much memory is free; make the cache smaller");
  }
  return shared_ptr<CudaMemory>(new CudaMemory(pointer, length, context));
}

CudaMemory::~CudaMemory() {
  const CurrentContext current(context_);
  if (current.status == kDone) driver().free(address);
}

void CudaMemory::copy(bool gathers, const vector<ByteRun>& runs, byte* bytes) const {
  const CurrentContext current(context_);
  int status = current.status;
  for (const auto& [offset, length] : runs) {
    const DevicePointer own = address + offset;
    if (status == kDone && length > 0) {
      status = gathers ? driver().from_device(bytes, own, length)
                       : driver().to_device(own, bytes, length);
    }
    bytes += length;
  }
  // The driver may return before the last bytes reach the device, where a NIC may read them.
  if (status == kDone) status = driver().synchronize();
  if (status == kDone) return;
  throw Failure(
      "KV_MEMORY_INVALID",
      string("the copy ") + (gathers ? "from" : "to") + " the GPU failed: " + error_text(status),
      "an error of another kernel or copy of this process may be reported here; nvidia-smi and dmesg show errors of the GPU");
}

namespace {

// The mapped piece around an address.
struct Piece {
  unsigned int memory_type = 0;
  int device = -1;
  DevicePointer start = 0;
  size_t length = 0;
};

using PointerGetAttributes = int (*)(unsigned int count, int* attributes, void** values,
                                     DevicePointer pointer);

int query(PointerGetAttributes get_attributes, uint64_t address, Piece& piece) {
  int attributes[] = {kMemoryTypeOf, kDeviceOrdinalOf, kRangeStartOf, kRangeSizeOf};
  void* values[] = {&piece.memory_type, &piece.device, &piece.start, &piece.length};
  return get_attributes(static_cast<unsigned int>(std::size(attributes)), attributes, values,
                        address);
}

}  // namespace

void require_device_memory(uint64_t address, uint64_t length, uint64_t device) {
  const auto fail = [&](const string& why, const string& hint) {
    throw Failure("KV_MEMORY_INVALID",
                  to_string(length) + " bytes at " + to_string(address) +
                      " are not memory of CUDA device " + to_string(device) + ": " + why,
                  hint);
  };
  void* const loaded = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NODELETE | RTLD_LAZY);
  const auto get_attributes =
      loaded == nullptr
          ? nullptr
          : reinterpret_cast<PointerGetAttributes>(dlsym(loaded, "cuPointerGetAttributes"));
  if (get_attributes == nullptr) {
    fail(
        "no CUDA driver (libcuda.so.1) is loaded in this process",
        "the address must come from CUDA in this process; register memory of another runtime with check: \"none\", and allocate host memory "
        "with the transport's allocate()");
  }
  // Memory that grows consists of separately mapped pieces.
  for (uint64_t at = address; at - address < length;) {
    Piece piece;
    const int status = query(get_attributes, at, piece);
    if (status != kDone) {
      fail("the driver answered with CUDA error " + to_string(status),
           "call cuInit before the memory is registered");
    }
    if (piece.memory_type != kDeviceMemory || piece.start > at ||
        piece.start + piece.length <= at) {
      const string from =
          at == address ? "the address" : "the memory after byte " + to_string(at - address);
      fail(from + " is not device memory, says the driver",
           "pass the address and length of an allocation that has not been freed");
    }
    if (piece.device < 0 || static_cast<uint64_t>(piece.device) != device) {
      fail("it is memory of device " + to_string(piece.device),
           "number devices as this process sees them, from 0 on; CUDA_VISIBLE_DEVICES applies");
    }
    at = piece.start + piece.length;
  }
}

}  // namespace kv::nixl
