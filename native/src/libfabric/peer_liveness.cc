#include "libfabric/peer_liveness.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

namespace kv::nixl {

namespace {

// The key of the address in connection data. The length of its value in 8 bytes follows, then the
// value.
constexpr string_view kEndpoint = "dest_data_ep_0";
// How long to wait for a replaced connection, from its beginning: those to several peers are made
// together.
constexpr auto kReconnectWait = milliseconds(250);
// A host silent for this long is dead. The kernel repeats its request twice meanwhile. The child
// process that checks metadata waits a little longer.
constexpr auto kConnectTimeout = seconds(4);
// Keepalive notices a vanished host after 5 + 3 * 2 seconds.
constexpr int kKeepIdleSeconds = 5;
constexpr int kKeepIntervalSeconds = 2;
constexpr int kKeepCount = 3;

// Returns the size of the TCP address, or 0 if there is none.
socklen_t read_address(const string& connection, sockaddr_storage& address) {
  const size_t at = connection.find(kEndpoint);
  uint64_t length = 0;
  if (at == string::npos || connection.size() - at < kEndpoint.size() + sizeof(length)) return 0;
  const string_view rest = string_view(connection).substr(at + kEndpoint.size());
  memcpy(&length, rest.data(), sizeof(length));
  const string_view value = rest.substr(sizeof(length));
  sa_family_t family = 0;
  if (length > value.size() || length < sizeof(family)) return 0;
  memcpy(&family, value.data(), sizeof(family));
  const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : family == AF_INET6 ? sizeof(sockaddr_in6) : 0;
  if (length < size) return 0;
  memcpy(&address, value.data(), size);
  return size;
}

// The host was silent for 11 seconds, or cannot be reached. Another connection would only wait
// again.
bool host_vanished(int error) { return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN; }

}  // namespace

bool PeerLiveness::has_tcp_address(const string& connection) {
  sockaddr_storage address{};
  return read_address(connection, address) != 0;
}

unique_ptr<PeerLiveness> PeerLiveness::connect_to(const string& connection) {
  sockaddr_storage address{};
  const socklen_t size = read_address(connection, address);
  if (size == 0) return nullptr;
  unique_ptr<PeerLiveness> liveness(new PeerLiveness(address, size));
  if (!liveness->open_connection()) liveness->mark_dead();
  return liveness;
}

PeerLiveness::~PeerLiveness() { close_socket(); }

void PeerLiveness::close_socket() {
  if (socket_ >= 0) close(socket_);
  socket_ = -1;
  connecting_since_.reset();
}

bool PeerLiveness::mark_dead() {
  close_socket();
  died_at_ = Clock::now();
  return false;
}

Clock::duration PeerLiveness::dead_for() const { return died_at_ ? Clock::now() - *died_at_ : Clock::duration::zero(); }

// False if the peer refuses or its host is unreachable.
bool PeerLiveness::open_connection() {
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
bool PeerLiveness::check_connecting(int wait_ms) {
  pollfd entry{.fd = socket_, .events = POLLOUT, .revents = 0};
  if (poll(&entry, 1, wait_ms) <= 0) return Clock::now() - *connecting_since_ < kConnectTimeout;
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return false;
  connecting_since_.reset();
  return true;
}

bool PeerLiveness::maybe_alive() { return check(false); }

bool PeerLiveness::alive() { return check(true); }

void PeerLiveness::ask_again() {
  if (died_at_ || connecting_since_) return;
  reconnects_ = true;
  if (!open_connection()) mark_dead();
}

bool PeerLiveness::check(bool wait) {
  if (died_at_) return false;
  if (!connecting_since_) {
    char byte = 0;
    const ssize_t got = socket_ < 0 ? 0 : recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))) return true;
    if (got < 0 && host_vanished(errno)) return mark_dead();
    // The provider may close idle connections. Only a refused new one proves death.
    reconnects_ = true;
    if (!open_connection()) return mark_dead();
    if (!connecting_since_) return true;
  }
  const auto left = std::chrono::ceil<milliseconds>(*connecting_since_ + kReconnectWait - Clock::now());
  const bool waits = wait && reconnects_ && left > left.zero();
  return check_connecting(waits ? static_cast<int>(left.count()) : 0) || mark_dead();
}

}  // namespace kv::nixl
