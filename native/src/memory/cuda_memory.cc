#include "memory/cuda_memory.h"

#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "library/failure.h"

namespace kv::nixl {

namespace {

// Values of CUresult in cuda.h of CUDA 11 and newer.
constexpr int kSuccess = 0;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidDevice = 101;

using DevicePointer = unsigned long long;

// The driver's functions that allocate and copy.
struct Driver {
  int (*init)(unsigned int flags) = nullptr;
  int (*device_get)(int* device, int ordinal) = nullptr;
  int (*device_count)(int* count) = nullptr;
  int (*retain)(void** context, int device) = nullptr;
  int (*push)(void* context) = nullptr;
  int (*pop)(void** context) = nullptr;
  int (*synchronize)() = nullptr;
  int (*allocate)(DevicePointer* pointer, size_t length) = nullptr;
  int (*free)(DevicePointer pointer) = nullptr;
  int (*set)(DevicePointer pointer, unsigned char value, size_t length) = nullptr;
  int (*to_device)(DevicePointer to, const void* from, size_t length) = nullptr;
  int (*from_device)(void* to, DevicePointer from, size_t length) = nullptr;
};

// Loads the driver. It stays loaded: its threads and its memory outlive any of ours.
Driver load_driver() {
  void* const library = dlopen("libcuda.so.1", RTLD_NODELETE | RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    throw Failure("KV_TRANSPORT_UNSUPPORTED", std::string("cannot allocate memory of a GPU: ") + dlerror(),
                  "install the NVIDIA driver (in a container: --gpus all), or allocate DRAM");
  }
  Driver driver;
  const auto bind = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) {
      throw Failure("KV_TRANSPORT_UNSUPPORTED", std::string("cannot allocate memory of a GPU: the CUDA driver has no ") + name,
                    "install a driver of CUDA 11 or newer");
    }
  };
  bind(driver.init, "cuInit");
  bind(driver.device_get, "cuDeviceGet");
  bind(driver.device_count, "cuDeviceGetCount");
  bind(driver.retain, "cuDevicePrimaryCtxRetain");
  bind(driver.push, "cuCtxPushCurrent_v2");
  bind(driver.pop, "cuCtxPopCurrent_v2");
  bind(driver.synchronize, "cuCtxSynchronize");
  bind(driver.allocate, "cuMemAlloc_v2");
  bind(driver.free, "cuMemFree_v2");
  bind(driver.set, "cuMemsetD8_v2");
  bind(driver.to_device, "cuMemcpyHtoD_v2");
  bind(driver.from_device, "cuMemcpyDtoH_v2");
  return driver;
}

const Driver& driver() {
  static const Driver loaded = load_driver();
  return loaded;
}

std::string error_text(int status) {
  if (status == kOutOfMemory) return "out of memory (CUDA error 2)";
  return "CUDA error " + std::to_string(status);
}

// The device's context on this thread, until the end of the scope.
class CurrentContext {
 public:
  explicit CurrentContext(void* context) : status(driver().push(context)) {}
  ~CurrentContext() {
    void* popped = nullptr;
    if (status == kSuccess) driver().pop(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  const int status;
};

}  // namespace

std::shared_ptr<CudaMemory> CudaMemory::create(uint64_t length, int ordinal) {
  const std::string what = "cannot allocate " + std::to_string(length) + " bytes of GPU " + std::to_string(ordinal) + ": ";
  const Driver& cuda = driver();
  if (const int status = cuda.init(0); status != kSuccess) {
    throw Failure("KV_TRANSPORT_UNSUPPORTED", what + "the CUDA driver does not start: " + error_text(status),
                  "nvidia-smi shows the GPUs of this machine");
  }
  int device = 0;
  if (const int status = cuda.device_get(&device, ordinal); status != kSuccess) {
    int count = 0;
    cuda.device_count(&count);
    const bool absent = status == kInvalidDevice;
    throw Failure("KV_TRANSPORT_UNSUPPORTED",
                  what + (absent ? "this process sees " + std::to_string(count) + " GPUs" : error_text(status)),
                  "GPUs count from 0, as CUDA_VISIBLE_DEVICES shows them to this process");
  }
  // Never released: NIXL and UCX remember the context of memory that was registered, beyond its
  // end, and CUDA's runtime keeps it as well.
  void* context = nullptr;
  if (const int status = cuda.retain(&context, device); status != kSuccess) {
    throw Failure("KV_MEMORY_INVALID", what + error_text(status), "nvidia-smi shows which processes use the GPU");
  }
  DevicePointer pointer = 0;
  int status = kSuccess;
  {
    const CurrentContext current(context);
    status = current.status;
    if (status == kSuccess) status = cuda.allocate(&pointer, length);
    if (status == kSuccess) status = cuda.set(pointer, 0, length);
    if (status == kSuccess) status = cuda.synchronize();
    if (status != kSuccess && pointer != 0) cuda.free(pointer);
  }
  if (status != kSuccess) {
    throw Failure("KV_MEMORY_INVALID", what + error_text(status), "nvidia-smi shows how much memory is free; make the cache smaller");
  }
  return std::shared_ptr<CudaMemory>(new CudaMemory(pointer, length, context));
}

CudaMemory::~CudaMemory() {
  const CurrentContext current(context_);
  if (current.status == kSuccess) driver().free(address_);
}

namespace {

void require_copied(int status, const char* what) {
  if (status == kSuccess) return;
  throw Failure("KV_MEMORY_INVALID", std::string(what) + " failed: " + error_text(status),
                "an error of another kernel or copy of this process may be reported here; nvidia-smi and dmesg show errors of the GPU");
}

}  // namespace

void CudaMemory::to_device(const std::vector<Piece>& pieces) const {
  const CurrentContext current(context_);
  int status = current.status;
  for (const auto& [offset, length, bytes] : pieces) {
    if (status == kSuccess && length > 0) status = driver().to_device(address_ + offset, bytes, length);
  }
  // The driver may return from a copy before its last bytes have reached the device.
  if (status == kSuccess) status = driver().synchronize();
  require_copied(status, "the copy to the GPU");
}

void CudaMemory::from_device(const std::vector<Piece>& pieces) const {
  const CurrentContext current(context_);
  int status = current.status;
  for (const auto& [offset, length, bytes] : pieces) {
    if (status == kSuccess && length > 0) status = driver().from_device(bytes, address_ + offset, length);
  }
  require_copied(status, "the copy from the GPU");
}

}  // namespace kv::nixl
