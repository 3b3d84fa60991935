// A fake libcuda.so.1 for tests without a GPU: two devices whose memory is host memory.
#include <napi.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#define API(name) extern "C" __attribute__((visibility("default"))) int name

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kNotInitialised = 3;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidContext = 201;
constexpr int kDevices = 2;
constexpr size_t kMemoryOfDevice = size_t{1} << 36;
constexpr unsigned int kDeviceMemory = 2;
// The driver's answer for an unknown pointer.
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
thread_local std::vector<int> contexts;

// A context is its device's number plus one.
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
API(cuCtxPushCurrent_v2)(void* context) {
  contexts.push_back(current);
  current = device_of(context);
  return kSuccess;
}
API(cuCtxPopCurrent_v2)(void** context) {
  if (contexts.empty()) return kInvalidContext;
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(current) + 1);
  current = contexts.back();
  contexts.pop_back();
  return kSuccess;
}
API(cuCtxSynchronize)() { return kSuccess; }
API(cuMemsetD8_v2)(Pointer pointer, unsigned char value, size_t length) {
  memset(reinterpret_cast<void*>(pointer), value, length);
  return kSuccess;
}
API(cuMemAlloc_v2)(Pointer* pointer, size_t length) {
  if (length > kMemoryOfDevice) return kOutOfMemory;
  const std::lock_guard lock(mutex);
  // Like the driver, pads to whole pages but reports the length asked for.
  void* memory = aligned_alloc(65536, (length + 65535) / 65536 * 65536);
  if (memory == nullptr) return kOutOfMemory;
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

// `split(address, firstBytes, deviceOfRest)`: splits an allocation in two, like memory that grows.
static void split(const Napi::CallbackInfo& info) {
  const auto number = [&](size_t index) { return info[index].As<Napi::Number>().Int64Value(); };
  const auto first = static_cast<size_t>(number(1));
  const std::lock_guard lock(mutex);
  Allocation& whole = allocations.at(static_cast<Pointer>(number(0)));
  allocations[static_cast<Pointer>(number(0)) + first] = {whole.length - first, static_cast<int>(number(2))};
  whole.length = first;
}

static Napi::Object initialize(Napi::Env env, Napi::Object exports) {
  exports.Set("split", Napi::Function::New(env, split));
  return exports;
}

NODE_API_MODULE(fake_cuda, initialize)
