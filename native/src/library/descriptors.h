// File descriptors of the process, which NIXL's libraries use without looking: UCX closes its
// listener for good when accept() finds none, and ends the process when it finds none while it is
// created; and what the libraries open, children of the process would inherit.
#pragma once

#include <sys/socket.h>

#include <cstdint>

namespace kv::nixl {

// From now on children of the process (fork) inherit none of the descriptors that are opened from
// now on, unless they are passed on purpose (dup2). Those that the process has itself inherited are
// left to it. Call it before NIXL is loaded; it does nothing when called again.
void keep_descriptors_from_children();

// Throws KV_TRANSPORT_UNAVAILABLE when fewer than `needed` descriptors are free for `what`.
void require_descriptors(unsigned needed, const char* what);

// Holds a descriptor in reserve, and puts accept_or_refuse in the place of accept() in UCX, which
// ends its listener for good at any error but EAGAIN. Call it when UCX is loaded.
void protect_listeners();
// accept() for a listener that must live: an error of one connection or one moment is EAGAIN. A
// connection for which no descriptor is free is taken with the one in reserve, and closed: untaken
// it would wake the listener's thread again and again.
int accept_or_refuse(int socket, sockaddr* address, socklen_t* length);
// Connections that were refused so since the last call, by all agents of the process.
uint64_t take_refused_connections();

}  // namespace kv::nixl
