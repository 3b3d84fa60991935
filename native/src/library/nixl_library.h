#pragma once

#include <string>

#include "library/nixl_capi.h"

namespace kv::nixl {

// The process's one libnixl_capi.so. The thread that needs it first loads it; it is never unloaded.
class NixlLibrary {
 public:
  // Loads `path` and binds every function that the addon calls. Returns the loaded library when
  // called again with the same file. Throws KV_LIBRARY_INCOMPATIBLE, also for another file: two
  // copies of NIXL in one process would share global state.
  static const NixlLibrary& load(const std::string& path);

  // Loads a library that a plugin needs and that the loader would not find by its name. A library
  // of the same soname that is already loaded serves as well. Throws KV_BACKEND_UNAVAILABLE.
  static void preload(const std::string& path);

  // Whether NIXL has been loaded: it does not see environment variables that are set from now on.
  static bool loaded();

  // The bound functions of the C API.
  const capi::Functions& functions() const { return functions_; }
  // The loader's reason for refusing a backend's plugin, or empty if it loads. For error messages:
  // NIXL itself gives no reason.
  std::string plugin_load_error(const std::string& backend) const;

 private:
  explicit NixlLibrary(std::string path);

  std::string path_;
  capi::Functions functions_;
};

}  // namespace kv::nixl
