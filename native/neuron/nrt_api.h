// The part of the Neuron runtime that the addon calls. Names, signatures and values are those of
// libnrt 2 (nrt.h and neuron_driver_shared_tensor_batch_op.h).
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

// nrt_tensor_batch_op_t: one copy of a batch.
struct BatchOp {
  uint64_t offset;
  uint64_t size;
  void* buffer;
};

// nrt_tensor_batch_t: copies of one tensor.
struct Batch {
  const Tensor* tensor;
  const BatchOp* ops;
  uint32_t num_ops;
};

// The functions of libnrt, bound with dlsym.
struct Api {
  Status (*init)(int framework, const char* framework_version, const char* fal_version);
  void (*close)();
  Status (*allocate)(int placement, int logical_core, size_t size, const char* name, Tensor** tensor);
  void (*free)(Tensor** tensor);
  Status (*read)(const Tensor* tensor, void* buffer, size_t offset, size_t size);
  Status (*write)(Tensor* tensor, const void* buffer, size_t offset, size_t size);
  // Null in older runtimes, which lack them.
  Status (*read_batch)(const Batch* batches, uint64_t count, bool unsafe);
  Status (*write_batch)(const Batch* batches, uint64_t count, bool unsafe);
};

}  // namespace kv::neuron
