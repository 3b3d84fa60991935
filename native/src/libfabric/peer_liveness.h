// Whether a peer's process is still there, for a backend that does not tell. libfabric's tcp provider listens on an address that the
// peer's metadata names: an idle connection to it ends when that process does, and a new one is refused.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace kv::nixl {

class PeerLiveness {
 public:
  // Whether a LIBFABRIC backend's connection data names an address of TCP, as with its tcp provider; EFA's are others.
  static bool names_tcp(const std::string& connection);
  // From such data; null where that names no address of TCP, as with EFA.
  static std::unique_ptr<PeerLiveness> of(const std::string& connection);

  ~PeerLiveness();
  PeerLiveness(const PeerLiveness&) = delete;
  PeerLiveness& operator=(const PeerLiveness&) = delete;

  // One system call where nothing has changed. Once false it stays false.
  bool alive();
  // Whether it is alive and has answered; so long as it may still answer, it is alive.
  bool answered() { return alive() && !connecting_; }
  // Since it was found out.
  std::chrono::steady_clock::duration dead_for() const;

 private:
  PeerLiveness(const sockaddr_storage& address, socklen_t length) : address_(address), length_(length) {}

  // Waits for the answer so long.
  bool connect(int wait_ms);
  bool connected(int timeout_ms);
  bool die();
  void hang_up();

  sockaddr_storage address_;
  socklen_t length_;
  int socket_ = -1;
  std::optional<std::chrono::steady_clock::time_point> connecting_;
  std::optional<std::chrono::steady_clock::time_point> died_;
};

}  // namespace kv::nixl
