#include "peers/ucx_memory_types.h"

#include <dlfcn.h>
#include <link.h>
#include <string.h>

#include <atomic>

namespace kv::nixl {

namespace {

constexpr uint8_t kUcx119 = 9;
// No UCX has nearly as many. The table that is counted ends with a null pointer.
constexpr uint8_t kMost = 64;

// `data`: where the path of libucs goes. The wheel's file has a hash in its name, and stands beside others, such as libucs_signal.
int find_libucs(struct dl_phdr_info* info, size_t, void* data) {
  const char* path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
  const char* slash = strrchr(path, '/');
  const char* name = slash == nullptr ? path : slash + 1;
  if (strncmp(name, "libucs", 6) != 0 || (name[6] != '.' && name[6] != '-')) return 0;
  *static_cast<const char**>(data) = path;
  return 1;
}

// The names of the types, then "unknown" and null.
uint8_t count_names(const char* const* names) {
  for (uint8_t count = 0; count < kMost && names[count] != nullptr; ++count) {
    if (strcmp(names[count], "unknown") == 0) return count;
  }
  return 0;
}

}  // namespace

uint8_t ucx_memory_type_count() {
  static std::atomic<uint8_t> known{0};
  if (known > 0) return known;
  const char* path = nullptr;
  if (dl_iterate_phdr(find_libucs, &path) == 0) return kUcx119;
  void* library = dlopen(path, RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL);
  const void* names = library == nullptr ? nullptr : dlsym(library, "ucs_memory_type_names");
  const uint8_t count = names == nullptr ? 0 : count_names(static_cast<const char* const*>(names));
  if (library != nullptr) dlclose(library);
  known = count > 0 ? count : kUcx119;
  return known;
}

}  // namespace kv::nixl
