// A fake libnrt on host memory for tests. It aborts when calls come in a wrong order.
// KV_FAKE_NRT_FAIL names a call that fails.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include <unistd.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0;
constexpr int kFailure = 1;
constexpr int kInvalid = 2;
constexpr int kResource = 4;
constexpr size_t kMostBytes = size_t{1} << 30;

struct Tensor {
  size_t size;
  unsigned char* data;
};
struct BatchOp {
  uint64_t offset;
  uint64_t size;
  void* buffer;
};
struct Batch {
  const Tensor* tensor;
  const BatchOp* ops;
  uint32_t num_ops;
};

std::mutex mutex;
bool initialised = false;
std::set<const Tensor*> tensors;

void require(bool condition, const char* what) {
  if (condition) return;
  fprintf(stderr, "fake_nrt: %s\n", what);
  abort();
}

bool fails(const char* call) {
  const char* named = getenv("KV_FAKE_NRT_FAIL");
  return named != nullptr && strcmp(named, call) == 0;
}

int copy(const Tensor* tensor, void* to_host, const void* from_host, uint64_t offset, uint64_t size) {
  require(initialised, "a copy before nrt_init or after nrt_close");
  require(tensors.count(tensor) == 1, "a copy of a tensor that is not allocated");
  if (offset > tensor->size || size > tensor->size - offset) return kInvalid;
  if (to_host != nullptr) memcpy(to_host, tensor->data + offset, size);
  if (from_host != nullptr) memcpy(tensor->data + offset, from_host, size);
  return kSuccess;
}

}  // namespace

EXPORT int nrt_init(int framework, const char* framework_version, const char* fal_version) {
  const std::lock_guard<std::mutex> guard(mutex);
  require(!initialised, "nrt_init twice");
  if (framework != 1 || framework_version == nullptr || fal_version == nullptr) return kInvalid;
  if (fails("nrt_init")) return kFailure;
  // A runtime that does not match its driver may crash or hang.
  if (fails("nrt_init crashes")) abort();
  while (fails("nrt_init hangs")) pause();
  initialised = true;
  return kSuccess;
}

EXPORT void nrt_close() {
  const std::lock_guard<std::mutex> guard(mutex);
  require(initialised, "nrt_close without nrt_init");
  require(tensors.empty(), "nrt_close with tensors");
  initialised = false;
}

EXPORT int nrt_tensor_allocate(int placement, int core, size_t size, const char* name, Tensor** tensor) {
  const std::lock_guard<std::mutex> guard(mutex);
  require(initialised, "nrt_tensor_allocate before nrt_init");
  if (placement != 0 || core < 0 || size == 0 || name == nullptr || tensor == nullptr) return kInvalid;
  if (size > kMostBytes || fails("nrt_tensor_allocate")) return kResource;
  *tensor = new Tensor{size, static_cast<unsigned char*>(calloc(1, size))};
  tensors.insert(*tensor);
  return kSuccess;
}

EXPORT void nrt_tensor_free(Tensor** tensor) {
  const std::lock_guard<std::mutex> guard(mutex);
  require(tensor != nullptr && tensors.erase(*tensor) == 1, "nrt_tensor_free of a tensor that is not allocated");
  free((*tensor)->data);
  delete *tensor;
  *tensor = nullptr;
}

EXPORT int nrt_tensor_read(const Tensor* tensor, void* buffer, size_t offset, size_t size) {
  const std::lock_guard<std::mutex> guard(mutex);
  return fails("nrt_tensor_read") ? kFailure : copy(tensor, buffer, nullptr, offset, size);
}

EXPORT int nrt_tensor_write(Tensor* tensor, const void* buffer, size_t offset, size_t size) {
  const std::lock_guard<std::mutex> guard(mutex);
  return fails("nrt_tensor_write") ? kFailure : copy(tensor, nullptr, buffer, offset, size);
}

EXPORT int nrt_tensor_read_batch(const Batch* batches, uint64_t count, bool) {
  const std::lock_guard<std::mutex> guard(mutex);
  if (fails("nrt_tensor_read_batch")) return kFailure;
  for (uint64_t at = 0; at < count; ++at) {
    for (uint32_t op = 0; op < batches[at].num_ops; ++op) {
      const BatchOp& each = batches[at].ops[op];
      const int status = copy(batches[at].tensor, each.buffer, nullptr, each.offset, each.size);
      if (status != kSuccess) return status;
    }
  }
  return kSuccess;
}

EXPORT int nrt_tensor_write_batch(const Batch* batches, uint64_t count, bool) {
  const std::lock_guard<std::mutex> guard(mutex);
  if (fails("nrt_tensor_write_batch")) return kFailure;
  for (uint64_t at = 0; at < count; ++at) {
    for (uint32_t op = 0; op < batches[at].num_ops; ++op) {
      const BatchOp& each = batches[at].ops[op];
      const int status = copy(batches[at].tensor, nullptr, each.buffer, each.offset, each.size);
      if (status != kSuccess) return status;
    }
  }
  return kSuccess;
}
