#pragma once

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "library/std_names.h"

namespace kv::nixl {

// Watches a peer's process for a backend that does not report its death. Holds an idle TCP
// connection to the address in the peer's metadata, where libfabric's tcp provider listens. The
// process's end closes it and refuses new ones.
class PeerLiveness {
 public:
  // Whether LIBFABRIC's connection data has a TCP address. EFA's has none.
  static bool has_tcp_address(const string& connection) {
    sockaddr_storage address{};
    return read_address(connection, address) != 0;
  }
  // Starts to connect. Null if the connection data has no address.
  static unique_ptr<PeerLiveness> connect_to(const string& connection) {
    sockaddr_storage address{};
    const socklen_t size = read_address(connection, address);
    if (size == 0) return nullptr;
    unique_ptr<PeerLiveness> liveness(new PeerLiveness(address, size));
    if (!liveness->open_connection()) liveness->mark_dead();
    return liveness;
  }

  ~PeerLiveness() { close_socket(); }
  PeerLiveness(const PeerLiveness&) = delete;
  PeerLiveness& operator=(const PeerLiveness&) = delete;

  // Also true while a connection is being made. Once false, it stays false. Never blocks, and costs
  // one system call while nothing changes.
  bool maybe_alive() { return check(false); }
  // As `maybe_alive`, for calls that would not return if the process were dead. Replaces an ended
  // connection, and waits up to 250 ms from its beginning.
  bool alive() { return check(true); }
  // Reconnects: the provider may leave the old connection open when it closes its address.
  void ask_again() {
    if (died_at_ || connecting_since_) return;
    reconnects_ = true;
    if (!open_connection()) mark_dead();
  }
  bool connected() { return alive() && !connecting_since_; }
  // None while the process is alive.
  const optional<Clock::time_point>& died_at() const { return died_at_; }
  // The live process did not answer in time.
  void note_slow() { slow_at_ = Clock::now(); }
  // Whether that was in the last 10 s.
  bool is_slow() const { return slow_at_ && Clock::now() - *slow_at_ < seconds(10); }
  // Zero while the process is alive.
  Clock::duration dead_for() const {
    return died_at_ ? Clock::now() - *died_at_ : Clock::duration::zero();
  }

 private:
  // The key of the address in connection data. The length of its value in 8 bytes follows, then the
  // value.
  static constexpr string_view kEndpoint = "dest_data_ep_0";
  // How long to wait for a replaced connection, from its beginning: those to several peers are made
  // together.
  static constexpr auto kReconnectWait = milliseconds(250);
  // A host silent for this long is dead. The kernel repeats its request twice meanwhile. The child
  // process that checks metadata waits a little longer.
  static constexpr auto kConnectTimeout = seconds(4);
  // Keepalive notices a vanished host after 5 + 3 * 2 seconds.
  static constexpr int kKeepIdleSeconds = 5;
  static constexpr int kKeepIntervalSeconds = 2;
  static constexpr int kKeepCount = 3;

  // Returns the size of the TCP address, or 0 if there is none.
  static socklen_t read_address(const string& connection, sockaddr_storage& address) {
    const size_t at = connection.find(kEndpoint);
    uint64_t length = 0;
    if (at == string::npos || connection.size() - at < kEndpoint.size() + sizeof(length)) return 0;
    const string_view rest = string_view(connection).substr(at + kEndpoint.size());
    memcpy(&length, rest.data(), sizeof(length));
    const string_view value = rest.substr(sizeof(length));
    sa_family_t family = 0;
    if (length > value.size() || length < sizeof(family)) return 0;
    memcpy(&family, value.data(), sizeof(family));
    const socklen_t size = family == AF_INET    ? sizeof(sockaddr_in)
                           : family == AF_INET6 ? sizeof(sockaddr_in6)
                                                : 0;
    if (length < size) return 0;
    memcpy(&address, value.data(), size);
    return size;
  }

  // The host was silent for 11 seconds, or cannot be reached. Another connection would only wait
  // again.
  static bool host_vanished(int error) {
    return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
           error == EHOSTDOWN;
  }

  PeerLiveness(const sockaddr_storage& address, socklen_t length)
      : address_(address), length_(length) {}

  bool check(bool wait) {
    if (died_at_) return false;
    if (!connecting_since_) {
      char byte = 0;
      const ssize_t got = socket_ < 0 ? 0 : recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
      if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)))
        return true;
      if (got < 0 && host_vanished(errno)) return mark_dead();
      // The provider may close idle connections. Only a refused new one proves death.
      reconnects_ = true;
      if (!open_connection()) return mark_dead();
      if (!connecting_since_) return true;
    }
    const auto left =
        std::chrono::ceil<milliseconds>(*connecting_since_ + kReconnectWait - Clock::now());
    const bool waits = wait && reconnects_ && left > left.zero();
    return check_connecting(waits ? static_cast<int>(left.count()) : 0) || mark_dead();
  }
  // False if the peer refuses or its host is unreachable.
  bool open_connection() {
    close_socket();
    socket_ = socket(address_.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    // A lack of sockets says nothing about the peer.
    if (socket_ < 0) return true;
    const int on = 1;
    setsockopt(socket_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    setsockopt(socket_, IPPROTO_TCP, TCP_KEEPIDLE, &kKeepIdleSeconds, sizeof(int));
    setsockopt(socket_, IPPROTO_TCP, TCP_KEEPINTVL, &kKeepIntervalSeconds, sizeof(int));
    setsockopt(socket_, IPPROTO_TCP, TCP_KEEPCNT, &kKeepCount, sizeof(int));
    if (::connect(socket_, reinterpret_cast<const sockaddr*>(&address_), length_) == 0) return true;
    if (errno != EINPROGRESS) return false;
    connecting_since_ = Clock::now();
    return true;
  }
  // False if the connection failed or takes too long.
  bool check_connecting(int wait_ms) {
    pollfd entry{.fd = socket_, .events = POLLOUT, .revents = 0};
    if (poll(&entry, 1, wait_ms) <= 0) return Clock::now() - *connecting_since_ < kConnectTimeout;
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return false;
    connecting_since_.reset();
    return true;
  }
  bool mark_dead() {
    close_socket();
    died_at_ = Clock::now();
    return false;
  }
  void close_socket() {
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
    connecting_since_.reset();
  }

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
