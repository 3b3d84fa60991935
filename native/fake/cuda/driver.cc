// A fake libcuda.so.1 for tests on machines without a GPU: two devices whose memory is host memory. It has the calls of the addon and those of
// memory_addon.cc.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#define API(name) extern "C" __attribute__((visibility("default"))) int name

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kNotInitialised = 3;
constexpr int kInvalidDevice = 101;
constexpr int kDevices = 2;
constexpr unsigned int kDeviceMemory = 2;
// The device of a pointer that the driver does not know.
constexpr int kNoDevice = -2;

using Pointer = unsigned long long;

struct Allocation {
  size_t length;
  int device;
};

std::mutex mutex;
bool initialised = false;
std::map<Pointer, Allocation> allocations;
thread_local int current = 0;

// A context is the number of its device, from one on.
int device_of(void* context) { return static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1; }

}  // namespace

API(cuInit)(unsigned int) {
  initialised = true;
  return kSuccess;
}
API(cuDeviceGetCount)(int* count) {
  *count = kDevices;
  return initialised ? kSuccess : kNotInitialised;
}
API(cuDeviceGet)(int* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < kDevices ? kSuccess : kInvalidDevice;
}
API(cuDevicePrimaryCtxRetain)(void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
  return kSuccess;
}
API(cuCtxSetCurrent)(void* context) {
  current = device_of(context);
  return kSuccess;
}
API(cuMemAlloc_v2)(Pointer* pointer, size_t length) {
  const std::lock_guard lock(mutex);
  // Like the driver's, allocations end at a page boundary, and the driver reports the length that was asked for.
  void* memory = aligned_alloc(65536, (length + 65535) / 65536 * 65536);
  if (memory == nullptr) return kInvalidValue;
  *pointer = reinterpret_cast<Pointer>(memory);
  allocations[*pointer] = {length, current};
  return kSuccess;
}
API(cuMemFree_v2)(Pointer pointer) {
  const std::lock_guard lock(mutex);
  if (allocations.erase(pointer) == 0) return kInvalidValue;
  free(reinterpret_cast<void*>(pointer));
  return kSuccess;
}
API(cuMemcpyHtoD_v2)(Pointer to, const void* from, size_t length) {
  memcpy(reinterpret_cast<void*>(to), from, length);
  return kSuccess;
}
API(cuMemcpyDtoH_v2)(void* to, Pointer from, size_t length) {
  memcpy(to, reinterpret_cast<const void*>(from), length);
  return kSuccess;
}
// Only in the fake: makes two pieces of an allocation, like memory that grows. The second one may belong to another device.
API(fake_cuda_split)(Pointer pointer, size_t first, int device_of_rest) {
  const std::lock_guard lock(mutex);
  Allocation& whole = allocations.at(pointer);
  allocations[pointer + first] = {whole.length - first, device_of_rest};
  whole.length = first;
  return kSuccess;
}
API(cuPointerGetAttributes)(unsigned int count, int* attributes, void** values, Pointer pointer) {
  if (!initialised) return kNotInitialised;
  const std::lock_guard lock(mutex);
  auto found = allocations.upper_bound(pointer);
  const bool any = found != allocations.begin() && pointer < (--found)->first + found->second.length;
  for (unsigned int index = 0; index < count; ++index) {
    void* value = values[index];
    switch (attributes[index]) {
      case 2: *static_cast<unsigned int*>(value) = any ? kDeviceMemory : 0; break;
      case 9: *static_cast<int*>(value) = any ? found->second.device : kNoDevice; break;
      case 11: *static_cast<Pointer*>(value) = any ? found->first : 0; break;
      case 12: *static_cast<size_t*>(value) = any ? found->second.length : 0; break;
      default: return kInvalidValue;
    }
  }
  return kSuccess;
}
