#include "libfabric/peer_liveness.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include <string_view>

namespace kv::nixl {

namespace {

using Clock = std::chrono::steady_clock;

// The key of the address in NIXL's connection data. An entry is its key, the length of its value as 8 bytes, and the value.
constexpr std::string_view kEndpoint = "dest_data_ep_0";
// How long the agent's thread waits for a new connection when the old one has ended.
constexpr int kReconnectWaitMs = 250;
// A host that does not answer for this long is dead. The kernel repeats its request twice within it. The check of metadata in a child process
// waits a little longer than this.
constexpr auto kConnectTimeout = std::chrono::seconds(4);
// Keepalive of the connection: a host that vanished is noticed after 5 + 3 * 2 seconds.
constexpr int kKeepIdleSeconds = 5;
constexpr int kKeepIntervalSeconds = 2;
constexpr int kKeepCount = 3;

// Reads the TCP address out of connection data. Returns its size; 0 if there is none.
socklen_t read_address(const std::string& connection, sockaddr_storage& address) {
  const size_t at = connection.find(kEndpoint);
  uint64_t length = 0;
  if (at == std::string::npos || connection.size() - at < kEndpoint.size() + sizeof(length)) return 0;
  const std::string_view rest = std::string_view(connection).substr(at + kEndpoint.size());
  memcpy(&length, rest.data(), sizeof(length));
  const std::string_view value = rest.substr(sizeof(length));
  sa_family_t family = 0;
  if (length > value.size() || length < sizeof(family)) return 0;
  memcpy(&family, value.data(), sizeof(family));
  const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : family == AF_INET6 ? sizeof(sockaddr_in6) : 0;
  if (length < size) return 0;
  memcpy(&address, value.data(), size);
  return size;
}

}  // namespace

bool PeerLiveness::has_tcp_address(const std::string& connection) {
  sockaddr_storage address{};
  return read_address(connection, address) != 0;
}

std::unique_ptr<PeerLiveness> PeerLiveness::connect_to(const std::string& connection) {
  sockaddr_storage address{};
  const socklen_t size = read_address(connection, address);
  if (size == 0) return nullptr;
  std::unique_ptr<PeerLiveness> liveness(new PeerLiveness(address, size));
  if (!liveness->open_connection(0)) liveness->mark_dead();
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

// Returns false if the peer refuses the connection or its host is unreachable.
bool PeerLiveness::open_connection(int wait_ms) {
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
  return check_connecting(wait_ms);
}

// Returns false if the connection that is being made has failed or takes too long.
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

bool PeerLiveness::alive() {
  if (died_at_) return false;
  if (socket_ < 0) return open_connection(kReconnectWaitMs) || mark_dead();
  if (connecting_since_) return check_connecting(0) || mark_dead();
  char byte = 0;
  const ssize_t got = recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))) return true;
  // The provider may close an idle connection. The peer is dead only if it refuses a new one.
  return open_connection(kReconnectWaitMs) || mark_dead();
}

}  // namespace kv::nixl
