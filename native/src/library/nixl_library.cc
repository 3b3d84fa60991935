#include "library/nixl_library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>

#include "library/descriptors.h"
#include "library/exit_guard.h"

namespace kv::nixl {

namespace {

// Never destroyed: agents' threads may use it while the process exits.
atomic<const string*> loaded{nullptr};

// One name per file. The loader resolves a bare soname.
string canonical(const string& path) {
  if (path.find('/') == string::npos) return path;
  char resolved[PATH_MAX];
  return realpath(path.c_str(), resolved) == nullptr ? path : string(resolved);
}

// NODELETE: NIXL's threads and thread-local state outlive a worker.
void* open_library(const string& path, const char* code, const string& hint) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle != nullptr) return handle;
  const char* reason = dlerror();
  throw Failure(
      code, "the loader refused " + path + ": " + (reason == nullptr ? "no reason given" : reason),
      hint);
}

void bind(const string& path) {
  void* const handle =
      open_library(path, "KV_LIBRARY_INCOMPATIBLE", "run: npx --no-install kv-nixl install");
  string first_missing;
  int missing = 0;
#define KV_NIXL_BIND(name, ...)                                                           \
  capi::name = reinterpret_cast<decltype(capi::name)>(dlsym(handle, "nixl_capi_" #name)); \
  if (capi::name == nullptr && ++missing == 1) first_missing = "nixl_capi_" #name;
  KV_NIXL_CAPI_FUNCTIONS(KV_NIXL_BIND)
#undef KV_NIXL_BIND
  if (missing > 0) {
    throw Failure(
        "KV_LIBRARY_INCOMPATIBLE",
        path + " lacks " + to_string(missing) + " of NIXL's functions, " + first_missing + " first",
        "NIXL 1.5.0 works: npx --no-install kv-nixl install");
  }
  auto* is_stub = reinterpret_cast<bool (*)()>(dlsym(handle, "nixl_capi_is_stub"));
  if (is_stub != nullptr && is_stub()) {
    throw Failure(
        "KV_LIBRARY_INCOMPATIBLE", path + " is NIXL's stub library, in which every call fails",
        "point KV_NIXL_LIBRARY at a real libnixl_capi.so, or run: npx --no-install kv-nixl install");
  }
}

}  // namespace

bool is_nixl_loaded() { return loaded != nullptr; }

void load_nixl(const string& path) {
  static std::mutex* mutex = new std::mutex;
  const lock_guard lock(*mutex);
  const string wanted = canonical(path);
  if (const string* present = loaded; present != nullptr) {
    if (*present == wanted) return;
    throw Failure("KV_LIBRARY_INCOMPATIBLE",
                  "this process has already loaded NIXL from " + *present + " and cannot load " +
                      wanted + " as well",
                  "use the same library path for all transports of a process");
  }
  keep_descriptors_from_children();
  bind(wanted);
  loaded = new string(wanted);
  install_exit_handler();
}

void preload_library(const string& path) {
  open_library(path, "KV_BACKEND_UNAVAILABLE",
               "install the package @kv/nixl-libs-linux-x64-gnu (or -arm64-gnu) again");
}

}  // namespace kv::nixl
