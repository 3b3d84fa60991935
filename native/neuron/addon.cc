// The addon of @kv/neuron. It loads libnrt with dlopen, links nothing of AWS's, and copies tensors
// on libuv's threads.
#include <dlfcn.h>
#include <napi.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nrt_api.h"

namespace kv::neuron {
namespace {

// Owns the runtime, which a process may initialise only once.
class Runtime {
 public:
  // Throws std::runtime_error.
  explicit Runtime(const std::string& path) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) throw std::runtime_error(dlerror());
    bind_required(api.init, "nrt_init");
    bind_required(api.close, "nrt_close");
    bind_required(api.allocate, "nrt_tensor_allocate");
    bind_required(api.free, "nrt_tensor_free");
    bind_required(api.read, "nrt_tensor_read");
    bind_required(api.write, "nrt_tensor_write");
    bind_optional(api.read_batch, "nrt_tensor_read_batch");
    bind_optional(api.write_batch, "nrt_tensor_write_batch");
    const Status status = api.init(kFrameworkNone, "", "");
    if (status != kSuccess) throw std::runtime_error("nrt_init answered NRT_STATUS " + std::to_string(status));
  }
  ~Runtime() { api.close(); }
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  Api api{};

 private:
  template <typename Function>
  void bind_optional(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(handle_, name));
  }
  template <typename Function>
  void bind_required(Function& function, const char* name) {
    bind_optional(function, name);
    if (function == nullptr) throw std::runtime_error(std::string("the library has no ") + name);
  }
  void* handle_ = nullptr;
};

// Owns device memory. Copies run on any thread, one at a time.
class TensorHandle {
 public:
  // `core` is a logical core. Throws std::runtime_error.
  TensorHandle(std::shared_ptr<Runtime> runtime, size_t size, int core, const std::string& name)
      : runtime_(std::move(runtime)), size_(size) {
    const Status status = runtime_->api.allocate(kPlacementDevice, core, size, name.c_str(), &tensor_);
    if (status != kSuccess || tensor_ == nullptr) {
      throw std::runtime_error("nrt_tensor_allocate of " + std::to_string(size) + " bytes answered NRT_STATUS " +
                               std::to_string(status));
    }
  }
  ~TensorHandle() { runtime_->api.free(&tensor_); }
  TensorHandle(const TensorHandle&) = delete;
  TensorHandle& operator=(const TensorHandle&) = delete;

  // Bytes.
  size_t size() const { return size_; }

  // Makes one call where the runtime has batches. Throws std::runtime_error.
  void copy(bool write, std::vector<BatchOp> ops) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto batch_form = write ? runtime_->api.write_batch : runtime_->api.read_batch;
    if (batch_form != nullptr && ops.size() > 1) {
      const Batch batch{tensor_, ops.data(), static_cast<uint32_t>(ops.size())};
      check(batch_form(&batch, 1, false), write ? "nrt_tensor_write_batch" : "nrt_tensor_read_batch");
      return;
    }
    for (const BatchOp& op : ops) {
      if (write) {
        check(runtime_->api.write(tensor_, op.buffer, op.offset, op.size), "nrt_tensor_write");
      } else {
        check(runtime_->api.read(tensor_, op.buffer, op.offset, op.size), "nrt_tensor_read");
      }
    }
  }

 private:
  static void check(Status status, const char* call) {
    if (status != kSuccess) throw std::runtime_error(std::string(call) + " answered NRT_STATUS " + std::to_string(status));
  }
  std::shared_ptr<Runtime> runtime_;
  Tensor* tensor_ = nullptr;
  size_t size_;
  std::mutex mutex_;
};

// Holds the tensor and the buffer until the copy has ended.
class CopyWorker : public Napi::AsyncWorker {
 public:
  CopyWorker(std::shared_ptr<TensorHandle> tensor, bool write, std::vector<BatchOp> ops, Napi::ArrayBuffer buffer)
      : Napi::AsyncWorker(buffer.Env(), "kv_neuron copy"),
        tensor_(std::move(tensor)),
        write_(write),
        ops_(std::move(ops)),
        buffer_(Napi::Reference<Napi::ArrayBuffer>::New(buffer, 1)),
        deferred_(Napi::Promise::Deferred::New(buffer.Env())) {}
  Napi::Promise promise() const { return deferred_.Promise(); }

 protected:
  void Execute() override {
    try {
      tensor_->copy(write_, std::move(ops_));
    } catch (const std::exception& error) {
      SetError(error.what());
    }
  }
  void OnOK() override { deferred_.Resolve(write_ ? Env().Undefined() : buffer_.Value().As<Napi::Value>()); }
  void OnError(const Napi::Error& error) override { deferred_.Reject(error.Value()); }

 private:
  std::shared_ptr<TensorHandle> tensor_;
  bool write_;
  std::vector<BatchOp> ops_;
  Napi::Reference<Napi::ArrayBuffer> buffer_;
  Napi::Promise::Deferred deferred_;
};

// JavaScript's `Tensor`: `new Tensor(runtime, lengthBytes, logicalCore, name)`,
// `copy(write, runs, buffer): Promise`, `close()`. Runs are rows `[offset, length]`.
class TensorObject : public Napi::ObjectWrap<TensorObject> {
 public:
  static Napi::Function define(Napi::Env env) {
    return DefineClass(env, "Tensor",
                       {InstanceMethod<&TensorObject::copy>("copy"), InstanceMethod<&TensorObject::close>("close")});
  }
  explicit TensorObject(const Napi::CallbackInfo& info) : Napi::ObjectWrap<TensorObject>(info) {
    const auto runtime = *info[0].As<Napi::External<std::shared_ptr<Runtime>>>().Data();
    try {
      handle_ = std::make_shared<TensorHandle>(runtime, static_cast<size_t>(info[1].As<Napi::Number>().Int64Value()),
                                               info[2].As<Napi::Number>().Int32Value(), info[3].As<Napi::String>());
    } catch (const std::exception& error) {
      throw Napi::Error::New(info.Env(), error.what());
    }
  }

 private:
  Napi::Value copy(const Napi::CallbackInfo& info) {
    const bool write = info[0].As<Napi::Boolean>();
    const auto runs = info[1].As<Napi::Float64Array>();
    auto buffer = info[2].As<Napi::ArrayBuffer>();
    if (handle_ == nullptr) throw Napi::Error::New(info.Env(), "the tensor is closed");
    std::vector<BatchOp> ops;
    ops.reserve(runs.ElementLength() / 2);
    auto* cursor = static_cast<std::byte*>(buffer.Data());
    uint64_t total = 0;
    for (size_t at = 0; at + 1 < runs.ElementLength(); at += 2) {
      const double offset = runs[at];
      const double length = runs[at + 1];
      // JavaScript checks this too. The runtime must never see a run out of range.
      const bool inside = offset >= 0 && length >= 0 && offset + length <= static_cast<double>(handle_->size());
      if (!inside || total + static_cast<uint64_t>(length) > buffer.ByteLength()) {
        throw Napi::Error::New(info.Env(), "a run lies outside the tensor or the buffer");
      }
      ops.push_back({static_cast<uint64_t>(offset), static_cast<uint64_t>(length), cursor + total});
      total += static_cast<uint64_t>(length);
    }
    auto* worker = new CopyWorker(handle_, write, std::move(ops), buffer);
    const Napi::Promise promise = worker->promise();
    worker->Queue();
    return promise;
  }
  // A copy in progress still holds the tensor.
  void close(const Napi::CallbackInfo&) { handle_.reset(); }

  std::shared_ptr<TensorHandle> handle_;
};

// `open(path): External`: loads and initialises the runtime.
Napi::Value open(const Napi::CallbackInfo& info) {
  try {
    auto* runtime = new std::shared_ptr<Runtime>(std::make_shared<Runtime>(info[0].As<Napi::String>()));
    return Napi::External<std::shared_ptr<Runtime>>::New(
        info.Env(), runtime, [](Napi::Env, std::shared_ptr<Runtime>* held) { delete held; });
  } catch (const std::exception& error) {
    throw Napi::Error::New(info.Env(), error.what());
  }
}

// `close(runtime)`: closes the runtime once its last tensor is closed.
void close(const Napi::CallbackInfo& info) { info[0].As<Napi::External<std::shared_ptr<Runtime>>>().Data()->reset(); }

// `describe(path): {path, symbols}`: the file that the loader finds, and the functions it has.
// Initialises nothing.
Napi::Value describe(const Napi::CallbackInfo& info) {
  const std::string path = info[0].As<Napi::String>();
  void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) throw Napi::Error::New(info.Env(), dlerror());
  const auto symbols = Napi::Object::New(info.Env());
  std::string file = path;
  for (const char* name : {"nrt_init", "nrt_close", "nrt_tensor_allocate", "nrt_tensor_free", "nrt_tensor_read",
                           "nrt_tensor_write", "nrt_tensor_read_batch", "nrt_tensor_write_batch"}) {
    void* symbol = dlsym(handle, name);
    symbols.Set(name, symbol != nullptr);
    Dl_info place;
    if (symbol != nullptr && dladdr(symbol, &place) != 0 && place.dli_fname != nullptr) file = place.dli_fname;
  }
  dlclose(handle);
  const auto found = Napi::Object::New(info.Env());
  found.Set("path", file);
  found.Set("symbols", symbols);
  return found;
}

Napi::Object initialize(Napi::Env env, Napi::Object exports) {
  exports.Set("Tensor", TensorObject::define(env));
  exports.Set("open", Napi::Function::New(env, open, "open"));
  exports.Set("close", Napi::Function::New(env, close, "close"));
  exports.Set("describe", Napi::Function::New(env, describe, "describe"));
  return exports;
}

}  // namespace
}  // namespace kv::neuron

static Napi::Object kv_neuron_initialize(Napi::Env env, Napi::Object exports) {
  return kv::neuron::initialize(env, exports);
}
NODE_API_MODULE(kv_neuron, kv_neuron_initialize)
