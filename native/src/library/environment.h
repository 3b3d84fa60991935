// What must stand in the process's real environment before NIXL loads. (In a Node worker, process.env is a copy.)
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace kv::nixl {

using Variables = std::vector<std::pair<std::string, std::string>>;

// Sets `wanted` over whatever is there, then the defaults NIXL needs where nothing is set. Answers the defaults that were
// set. Call it on the JavaScript thread, before an agent exists: setenv and getenv do not mix across threads.
Variables prepare_environment(const Variables& wanted);

}  // namespace kv::nixl
