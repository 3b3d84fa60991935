#pragma once

#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace kv::nixl {

// Watches whether a peer's process is alive, for a backend that does not report its death.
// libfabric's tcp provider listens on an address that the peer's metadata contains. The watch holds
// an idle TCP connection to it: the connection ends when the process does, and a new one is
// refused.
class PeerLiveness {
 public:
  // Whether a LIBFABRIC backend's connection data contains a TCP address, as with the tcp provider;
  // those of EFA do not.
  static bool has_tcp_address(const std::string& connection);
  // Starts to connect to that address. Null if the connection data contains none.
  static std::unique_ptr<PeerLiveness> connect_to(const std::string& connection);

  ~PeerLiveness();
  PeerLiveness(const PeerLiveness&) = delete;
  PeerLiveness& operator=(const PeerLiveness&) = delete;

  // Whether the process is alive, or may be while the connection is being made. Stays false once it
  // was false. Costs one system call while nothing changes, and never blocks.
  bool maybe_alive();
  // The same, for a call that would not return if the process were dead. When a connection has
  // ended, another one is made: waits for it up to 250 ms from its beginning.
  bool alive();
  // Makes another connection, since the present one proves nothing: the provider may leave it open
  // when it closes its address.
  void ask_again();
  // Whether it is alive and has accepted a connection.
  bool connected() { return alive() && !connecting_since_; }
  // When the death was noticed; none while the process is alive.
  const std::optional<std::chrono::steady_clock::time_point>& died_at() const { return died_at_; }
  // Records that the process, which is alive, did not answer a call in its time.
  void note_slow() { slow_at_ = std::chrono::steady_clock::now(); }
  // Whether that was in the last 10 s.
  bool is_slow() const { return slow_at_ && std::chrono::steady_clock::now() - *slow_at_ < std::chrono::seconds(10); }
  // Time since the death was noticed; zero while the process is alive.
  std::chrono::steady_clock::duration dead_for() const;

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
  std::optional<std::chrono::steady_clock::time_point> connecting_since_;
  // An earlier connection has ended.
  bool reconnects_ = false;
  std::optional<std::chrono::steady_clock::time_point> died_at_;
  std::optional<std::chrono::steady_clock::time_point> slow_at_;
};

}  // namespace kv::nixl
