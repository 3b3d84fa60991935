#include "memory/process_memory.h"

#include <inttypes.h>
#include <stdio.h>

#include <memory>
#include <string>

#include "library/failure.h"

namespace kv::nixl {

void require_process_memory(uint64_t address, uint64_t length) {
  const std::unique_ptr<FILE, int (*)(FILE*)> maps(fopen("/proc/self/maps", "re"), fclose);
  if (!maps) throw Failure("KV_MEMORY_INVALID", "the address cannot be checked: /proc/self/maps cannot be read", "mount /proc in this container");
  // Everything before this address can be read and written.
  uint64_t checked = address;
  const uint64_t end = address + length;
  char line[4096];
  while (checked < end && fgets(line, sizeof(line), maps.get()) != nullptr) {
    uint64_t first = 0;
    uint64_t last = 0;
    char rights[5] = {};
    if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &first, &last, rights) != 3) continue;
    if (first <= checked && checked < last && rights[0] == 'r' && rights[1] == 'w') checked = last;
  }
  if (checked >= end) return;
  throw Failure("KV_MEMORY_INVALID",
                std::to_string(length) + " bytes at " + std::to_string(address) + " are not memory of this process from " +
                    std::to_string(checked) + " on: nothing is mapped there, or it cannot be read and written",
                "pass the address and the length of one allocation that is still alive");
}

}  // namespace kv::nixl
