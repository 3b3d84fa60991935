// The process's file descriptors, which NIXL's libraries use carelessly. Without a free one, UCX
// closes its listener for good or, while it is created, ends the process. Children would inherit
// the libraries' own.
#pragma once

#include <sys/socket.h>

#include <cstdint>

namespace kv::nixl {

// Notes what the process has inherited. Children made by fork() inherit nothing else, except on
// purpose (dup2). Call it before NIXL is loaded. Further calls do nothing.
void keep_descriptors_from_children();
// Marks all other descriptors as closed on exec, for children made without fork(), such as Deno's.
// Call it when the libraries may have opened some.
void close_descriptors_on_exec();

// Throws KV_TRANSPORT_UNAVAILABLE when fewer than `needed` are free for `what`.
void require_descriptors(unsigned needed, const char* what);

// Reserves a descriptor, and replaces UCX's accept() by accept_or_refuse: UCX ends its listener at
// any error but EAGAIN. New sockets of UCX and libfabric are closed on exec. Call it when UCX is
// loaded. The repair `ucx_listener` says whether it took hold.
void protect_listeners();
// Turns errors of one connection or one moment into EAGAIN. Without a free descriptor, the reserved
// one takes the connection and closes it: left waiting, it would wake the listener's thread again
// and again.
int accept_or_refuse(int socket, sockaddr* address, socklen_t* length);
// How many connections of all agents were refused since the last call.
uint64_t take_refused_connections();

}  // namespace kv::nixl
