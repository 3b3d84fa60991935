#pragma once

#include <optional>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

namespace kv::nixl {

// Names and values of environment variables.
using Variables = std::vector<std::pair<std::string, std::string>>;

// Prepares the process's real environment before NIXL loads. (In a Node worker, process.env is only
// a copy of it.) Sets `wanted`, also where a variable has another value, then sets NIXL's defaults
// where a variable has no value. Returns the defaults that it set. setenv is not safe while another
// thread calls getenv: returns none, and sets nothing, when a variable must be set while
// `reading_environment` is held. Call it on the JavaScript thread, which reads the environment as
// well.
std::optional<Variables> prepare_environment(const Variables& wanted);

// Held while NIXL and its backends read the environment: when they are loaded and created. From any
// thread; blocks while variables are set.
std::shared_lock<std::shared_mutex> reading_environment();

}  // namespace kv::nixl
