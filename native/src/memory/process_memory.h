#pragma once

#include <cstdint>

namespace kv::nixl {

// Throws KV_MEMORY_INVALID unless this process can read and write the whole range now. NIXL
// registers any address, and UCX fails or ends the process when it copies.
void require_process_memory(uint64_t address, uint64_t length);

}  // namespace kv::nixl
