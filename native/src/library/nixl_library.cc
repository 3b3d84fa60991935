#include "library/nixl_library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>

#include <atomic>
#include <mutex>

#include "library/descriptors.h"
#include "library/exit_guard.h"
#include "library/failure.h"

namespace kv::nixl {

namespace {

// Resolves links, so that a file has one name. A bare soname is left to the loader.
std::string canonical(const std::string& path) {
  if (path.find('/') == std::string::npos) return path;
  char resolved[PATH_MAX];
  return realpath(path.c_str(), resolved) == nullptr ? path : std::string(resolved);
}

// Never destroyed: agents' threads may still use it while the process exits.
std::atomic<const NixlLibrary*> the_library{nullptr};

}  // namespace

bool NixlLibrary::loaded() { return the_library != nullptr; }

const NixlLibrary& NixlLibrary::load(const std::string& path) {
  static std::mutex* mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  const std::string wanted = canonical(path);
  const NixlLibrary* library = the_library;
  if (library == nullptr) {
    keep_descriptors_from_children();
    library = new NixlLibrary(wanted);
    the_library = library;
    install_exit_handler();
  } else if (library->path_ != wanted) {
    throw Failure("KV_LIBRARY_INCOMPATIBLE",
                  "this process has already loaded NIXL from " + library->path_ + " and cannot load " + wanted + " as well",
                  "use the same library path for all transports of a process");
  }
  return *library;
}

void NixlLibrary::preload(const std::string& path) {
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) != nullptr) return;
  const char* reason = dlerror();
  throw Failure("KV_BACKEND_UNAVAILABLE", "the loader refused " + path + ": " + (reason == nullptr ? "no reason given" : reason),
                "install it again: npx --no-install kv-nixl install --with libfabric");
}

NixlLibrary::NixlLibrary(std::string path) : path_(std::move(path)) {
  // NODELETE: NIXL starts threads and has thread-local state, both of which outlive a worker.
  void* handle = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw Failure("KV_LIBRARY_INCOMPATIBLE",
                  "the loader refused " + path_ + ": " + (reason == nullptr ? "no reason given" : reason),
                  "run: npx --no-install kv-nixl install");
  }
  std::string first_missing;
  int missing = 0;
#define KV_NIXL_BIND(name, ...)                                                                     \
  functions_.name = reinterpret_cast<decltype(functions_.name)>(dlsym(handle, "nixl_capi_" #name)); \
  if (functions_.name == nullptr && ++missing == 1) first_missing = "nixl_capi_" #name;
  KV_NIXL_CAPI_FUNCTIONS(KV_NIXL_BIND)
#undef KV_NIXL_BIND
  if (missing > 0) {
    throw Failure("KV_LIBRARY_INCOMPATIBLE",
                  path_ + " lacks " + std::to_string(missing) + " of NIXL's functions, " + first_missing + " first",
                  "NIXL 1.5.0 works: npx --no-install kv-nixl install");
  }
  auto* is_stub = reinterpret_cast<bool (*)()>(dlsym(handle, "nixl_capi_is_stub"));
  if (is_stub != nullptr && is_stub()) {
    throw Failure("KV_LIBRARY_INCOMPATIBLE", path_ + " is NIXL's stub library, in which every call fails",
                  "point KV_NIXL_LIBRARY at a real libnixl_capi.so, or run: npx --no-install kv-nixl install");
  }
}

std::string NixlLibrary::plugin_load_error(const std::string& backend) const {
  const char* folder = getenv("NIXL_PLUGIN_DIR");
  const std::string beside = path_.substr(0, path_.find_last_of('/') + 1) + "plugins";
  const std::string file = (folder != nullptr && *folder != '\0' ? std::string(folder) : beside) + "/libplugin_" + backend + ".so";
  void* handle = dlopen(file.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle != nullptr) {
    dlclose(handle);
    return {};
  }
  const char* reason = dlerror();
  return reason == nullptr ? "the loader refused " + file : reason;
}

}  // namespace kv::nixl
