#pragma once

#include <cstdint>

namespace kv::nixl {

// How many types of memory the loaded UCX knows. UCX uses a type in a peer's key as an index without a check. 9, as in UCX 1.19, where no UCX is
// loaded or it does not say.
uint8_t ucx_memory_type_count();

}  // namespace kv::nixl
