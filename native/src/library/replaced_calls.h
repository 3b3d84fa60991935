#pragma once

#include <string_view>
#include <vector>

namespace kv::nixl {

// Libraries are named by the begin of their file's name, such as "libucs", which a wheel's tools
// may have lengthened: libucs-1141f529.so.0.0.0.

// Makes the calls of `symbol` that loaded libraries make go to `replacement`, in the libraries of
// that name. It changes their tables of addresses, so other libraries and this process's own calls
// are as before. Does nothing where no such library is loaded or calls the function, when called
// again, and where the system does not let the table be changed: the library then calls what it
// called before.
void replace_calls(std::string_view library, std::string_view symbol, void* replacement);

// The entries of these tables.
std::vector<void**> addresses_in(std::string_view library, std::string_view symbol);

// Whether a library of that name is loaded.
bool is_loaded(std::string_view library);

// The address of a function of the one loaded library of that name; null where the library, or its
// function, is not there, or several have the name.
void* function_of(std::string_view library, const char* symbol);

// Writes one address of such a table, which may lie in pages that are read-only since the library
// was loaded. Leaves it where they stay read-only.
void set_address(void** slot, void* value);

}  // namespace kv::nixl
