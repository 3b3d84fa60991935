// The process's one libnixl_capi.so: dlopened on first use, by whichever thread comes first, and never unloaded.
#pragma once

#include <string>

#include "library/nixl_capi.h"

namespace kv::nixl {

class NixlLibrary {
 public:
  // Loads `path` and binds every function. A second call with the same file answers the same; another file is an error,
  // since two NIXLs in one process would share global state. Throws Failure.
  static const NixlLibrary& load(const std::string& path);

  // Loads a library that plugins need before the loader looks for it by name: one of the same name that is loaded already serves. Throws Failure.
  static void preload(const std::string& path);

  // Whether one has been loaded: variables set from now on come too late for it.
  static bool loaded();

  const capi::Functions& functions() const { return functions_; }
  // Why the loader refuses the plugin of a backend: for an error message, since NIXL only says that it does. Empty if it does not.
  std::string plugin_problem(const std::string& name) const;

 private:
  explicit NixlLibrary(std::string path);

  std::string path_;
  capi::Functions functions_;
};

}  // namespace kv::nixl
