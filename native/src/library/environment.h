#pragma once

#include <string>
#include <utility>
#include <vector>

namespace kv::nixl {

// Names and values of environment variables.
using Variables = std::vector<std::pair<std::string, std::string>>;

// Prepares the process's real environment before NIXL loads. (In a Node worker, process.env is only a copy of it.) Sets `wanted`, also where
// a variable has another value, then sets NIXL's defaults where a variable has no value. Returns the defaults that it set.
// Call it on the JavaScript thread before an agent exists: setenv is not safe while another thread calls getenv.
Variables prepare_environment(const Variables& wanted);

}  // namespace kv::nixl
