#pragma once

#include <string_view>

namespace kv::nixl {

// Makes the calls of `symbol` that loaded libraries make go to `replacement`, in the libraries whose file names begin with `library`, such as "libucs".
// It changes their tables of addresses, so other libraries and this process's own calls are as before. Does nothing where no such library is loaded
// or calls the function, when called again, and where the system does not let the table be changed: the library then calls what it called before.
void replace_calls(std::string_view library, std::string_view symbol, void* replacement);

// Writes one address of such a table, which may lie in pages that are read-only since the library was loaded. Leaves it where they stay read-only.
void set_address(void** slot, void* value);

}  // namespace kv::nixl
