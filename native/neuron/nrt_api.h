// What the addon calls of libnrt 2, as in nrt.h and neuron_driver_shared_tensor_batch_op.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv::neuron {

using Status = int;
constexpr Status kSuccess = 0;
constexpr int kFrameworkNone = 1;
constexpr int kPlacementDevice = 0;

// Opaque: nrt_tensor_t.
struct Tensor;

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

struct Api {
  Status (*init)(int framework, const char* framework_version, const char* fal_version);
  void (*close)();
  Status (*allocate)(int placement, int logical_core, size_t size, const char* name, Tensor** tensor);
  void (*free)(Tensor** tensor);
  Status (*read)(const Tensor* tensor, void* buffer, size_t offset, size_t size);
  Status (*write)(Tensor* tensor, const void* buffer, size_t offset, size_t size);
  // Null in older runtimes.
  Status (*read_batch)(const Batch* batches, uint64_t count, bool unsafe);
  Status (*write_batch)(const Batch* batches, uint64_t count, bool unsafe);
};

}  // namespace kv::neuron
