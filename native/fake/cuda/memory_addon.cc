// An addon for tests that allocates, reads and writes device memory with a CUDA driver, in the role of an inference engine.
#include <dlfcn.h>
#include <napi.h>

#include <string>
#include <utility>

namespace {

using Pointer = unsigned long long;

struct Driver {
  void* library;

  template <typename... Arguments>
  void call(const Napi::Env& env, const char* name, Arguments... arguments) const {
    auto* function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
    if (function == nullptr) throw Napi::Error::New(env, std::string("the driver has no ") + name);
    if (const int status = function(arguments...); status != 0) {
      throw Napi::Error::New(env, std::string(name) + " answered " + std::to_string(status));
    }
  }

  void use_device(const Napi::Env& env, int ordinal) const {
    int device = 0;
    void* context = nullptr;
    call(env, "cuDeviceGet", &device, ordinal);
    call(env, "cuDevicePrimaryCtxRetain", &context, device);
    call(env, "cuCtxSetCurrent", context);
  }
};

Driver driver{nullptr};

Pointer pointer_of(Napi::Value value) {
  bool exact = false;
  return value.As<Napi::BigInt>().Uint64Value(&exact);
}

size_t size_of(Napi::Value value) { return static_cast<size_t>(value.As<Napi::Number>().Int64Value()); }

// `open(path)`: loads and initialises the driver. Returns the number of devices.
Napi::Value open(const Napi::CallbackInfo& info) {
  driver.library = dlopen(info[0].As<Napi::String>().Utf8Value().c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (driver.library == nullptr) throw Napi::Error::New(info.Env(), dlerror());
  int count = 0;
  driver.call(info.Env(), "cuInit", 0u);
  driver.call(info.Env(), "cuDeviceGetCount", &count);
  return Napi::Number::New(info.Env(), count);
}

// `allocate(device, lengthBytes): bigint`
Napi::Value allocate(const Napi::CallbackInfo& info) {
  Pointer pointer = 0;
  driver.use_device(info.Env(), info[0].As<Napi::Number>().Int32Value());
  driver.call(info.Env(), "cuMemAlloc_v2", &pointer, size_of(info[1]));
  return Napi::BigInt::New(info.Env(), static_cast<uint64_t>(pointer));
}

// `free(pointer)`
void release(const Napi::CallbackInfo& info) { driver.call(info.Env(), "cuMemFree_v2", pointer_of(info[0])); }

// `write(pointer, bytes)`
void write(const Napi::CallbackInfo& info) {
  const auto bytes = info[1].As<Napi::Uint8Array>();
  driver.call(info.Env(), "cuMemcpyHtoD_v2", pointer_of(info[0]), static_cast<const void*>(bytes.Data()), bytes.ByteLength());
}

// `read(pointer, lengthBytes): Uint8Array`
Napi::Value read(const Napi::CallbackInfo& info) {
  auto bytes = Napi::Uint8Array::New(info.Env(), size_of(info[1]));
  driver.call(info.Env(), "cuMemcpyDtoH_v2", static_cast<void*>(bytes.Data()), pointer_of(info[0]), bytes.ByteLength());
  return bytes;
}

// `split(pointer, firstBytes, deviceOfRest)`: with the fake driver only.
void split(const Napi::CallbackInfo& info) {
  driver.call(info.Env(), "fake_cuda_split", pointer_of(info[0]), size_of(info[1]), info[2].As<Napi::Number>().Int32Value());
}

Napi::Object initialize(Napi::Env env, Napi::Object exports) {
  exports.Set("open", Napi::Function::New(env, open));
  exports.Set("allocate", Napi::Function::New(env, allocate));
  exports.Set("free", Napi::Function::New(env, release));
  exports.Set("write", Napi::Function::New(env, write));
  exports.Set("read", Napi::Function::New(env, read));
  exports.Set("split", Napi::Function::New(env, split));
  return exports;
}

}  // namespace

NODE_API_MODULE(kv_cuda_memory, initialize)
