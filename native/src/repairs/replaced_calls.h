#pragma once

#include "library/std_names.h"

namespace kv::nixl {

// A library is named by how its file's name starts, such as "libucs": a wheel's tools make it
// libucs-1141f529.so.0.0.0.

// Sends the named libraries' calls of `symbol` to `replacement`, and no other calls, by changing
// tables of addresses. False when no such library is loaded or calls the function, or the system
// refuses.
bool replace_calls(string_view library, string_view symbol, void* replacement);

// The entries of these tables.
vector<void**> addresses_in(string_view library, string_view symbol);

bool is_loaded(string_view library);

// Null when the library or function is missing, or several libraries have the name.
void* function_of(string_view library, const char* symbol);

// Writes such an entry, even in read-only pages. Returns whether it is there now.
bool set_address(void** slot, void* value);

}  // namespace kv::nixl
