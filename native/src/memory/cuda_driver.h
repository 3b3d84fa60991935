#pragma once

#include <cstdint>

namespace kv::nixl {

// Asks CUDA's driver about an address range. Throws KV_MEMORY_INVALID unless all of it is memory of
// that device, or where the process has not loaded the driver: a CUDA pointer is valid only in the
// process whose driver allocated it.
void require_device_memory(uint64_t address, uint64_t length, uint64_t device);

}  // namespace kv::nixl
