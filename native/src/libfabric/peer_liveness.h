#pragma once

#include <sys/socket.h>

#include "library/std_names.h"

namespace kv::nixl {

// Watches a peer's process for a backend that does not report its death. Holds an idle TCP
// connection to the address in the peer's metadata, where libfabric's tcp provider listens. The
// process's end closes it and refuses new ones.
class PeerLiveness {
 public:
  // Whether LIBFABRIC's connection data has a TCP address. EFA's has none.
  static bool has_tcp_address(const string& connection);
  // Starts to connect. Null if the connection data has no address.
  static unique_ptr<PeerLiveness> connect_to(const string& connection);

  ~PeerLiveness();
  PeerLiveness(const PeerLiveness&) = delete;
  PeerLiveness& operator=(const PeerLiveness&) = delete;

  // Also true while a connection is being made. Once false, it stays false. Never blocks, and costs
  // one system call while nothing changes.
  bool maybe_alive();
  // As `maybe_alive`, for calls that would not return if the process were dead. Replaces an ended
  // connection, and waits up to 250 ms from its beginning.
  bool alive();
  // Reconnects: the provider may leave the old connection open when it closes its address.
  void ask_again();
  bool connected() { return alive() && !connecting_since_; }
  // None while the process is alive.
  const optional<Clock::time_point>& died_at() const { return died_at_; }
  // The live process did not answer in time.
  void note_slow() { slow_at_ = Clock::now(); }
  // Whether that was in the last 10 s.
  bool is_slow() const { return slow_at_ && Clock::now() - *slow_at_ < seconds(10); }
  // Zero while the process is alive.
  Clock::duration dead_for() const;

 private:
  PeerLiveness(const sockaddr_storage& address, socklen_t length) : address_(address), length_(length) {}

  bool check(bool wait);
  bool open_connection();
  bool check_connecting(int wait_ms);
  bool mark_dead();
  void close_socket();

  sockaddr_storage address_;
  socklen_t length_;
  int socket_ = -1;
  // Set while the connection is being made.
  optional<Clock::time_point> connecting_since_;
  // An earlier connection has ended.
  bool reconnects_ = false;
  optional<Clock::time_point> died_at_;
  optional<Clock::time_point> slow_at_;
};

}  // namespace kv::nixl
