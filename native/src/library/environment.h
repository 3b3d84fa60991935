#pragma once

#include <shared_mutex>

#include "library/std_names.h"

namespace kv::nixl {

using Variables = vector<std::pair<string, string>>;

// Prepares the process's real environment before NIXL loads: a Node worker's process.env is a copy.
// Overwrites variables with `wanted`, then sets NIXL's defaults where there is no value. Returns
// the defaults that it set.
// setenv is unsafe while another thread calls getenv: sets nothing and returns none if
// `reading_environment` is held. Call it on the JavaScript thread, which reads the environment too.
optional<Variables> prepare_environment(const Variables& wanted);

// Held by any thread that loads NIXL or creates a backend. Blocks while variables are set.
std::shared_lock<std::shared_mutex> reading_environment();

}  // namespace kv::nixl
