// What CUDA's driver knows of an address. Bound to the driver that the process has loaded already, and to nothing where there is none: a
// pointer of CUDA's means something only in the process that has it from its driver.
#pragma once

#include <cstdint>

namespace kv::nixl {

// Throws Failure KV_MEMORY_INVALID unless all of the bytes are memory of that device.
void require_device_memory(uint64_t address, uint64_t length, uint64_t device);

}  // namespace kv::nixl
