#include "common/transport/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>

namespace bagua {
namespace {

constexpr int kSliceMs = 100;

in_port_t* PortOf(sockaddr_storage* storage) {
  if (storage->ss_family == AF_INET) return &reinterpret_cast<sockaddr_in*>(storage)->sin_port;
  if (storage->ss_family == AF_INET6) return &reinterpret_cast<sockaddr_in6*>(storage)->sin6_port;
  return nullptr;
}

std::string UnixText(const SocketAddress& address) {
  const auto* unix_address = reinterpret_cast<const sockaddr_un*>(&address.storage);
  const size_t header = offsetof(sockaddr_un, sun_path) + 1;
  if (address.bytes <= header) return "@";
  return "@" + std::string(unix_address->sun_path + 1, address.bytes - header);
}

bool SameAddress(const SocketAddress& a, const SocketAddress& b) {
  return a.bytes == b.bytes && std::memcmp(&a.storage, &b.storage, a.bytes) == 0;
}

// A retry towards a free port of this host may, by chance, be given that port and meet itself.
bool MetItself(int fd) {
  const SocketAddress peer = PeerAddress(fd);
  return peer.bytes > 0 && peer.storage.ss_family != AF_UNIX && SameAddress(peer, LocalAddress(fd));
}

}  // namespace

SocketAddress SocketAddress::WithAnyPort() const {
  SocketAddress copy = *this;
  if (in_port_t* port = PortOf(&copy.storage)) *port = 0;
  return copy;
}

int SocketAddress::port() const {
  sockaddr_storage copy = storage;
  const in_port_t* port = PortOf(&copy);
  return port != nullptr ? ntohs(*port) : 0;
}

bool SocketAddress::IsLoopback() const {
  if (storage.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&storage);
    return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
  }
  if (storage.ss_family != AF_INET6) return storage.ss_family == AF_UNIX;
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr) != 0;
}

std::string ToText(const SocketAddress& address) {
  if (address.storage.ss_family == AF_UNIX) return UnixText(address);
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  if (::getnameinfo(address.raw(), address.bytes, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "?";
  const bool v6 = address.storage.ss_family == AF_INET6;
  return v6 ? StrCat("[", host, "]:", port) : StrCat(host, ":", port);
}

Result<HostPort> ParseHostPort(const std::string& text) {
  const size_t colon = text.rfind(':');
  HostPort parsed;
  bool good = colon != std::string::npos && colon > 0;
  if (good) {
    parsed.host = text.substr(0, colon);
    if (parsed.host.size() > 2 && parsed.host.front() == '[' && parsed.host.back() == ']')
      parsed.host = parsed.host.substr(1, parsed.host.size() - 2);
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, parsed.port);
    good = error == std::errc{} && stop == end && parsed.port > 0 && parsed.port < 65536;
  }
  if (good) return parsed;
  return Status(StatusCode::kInvalidArgument,
                StrCat("'", text, "' is no address; write host:port, as in 10.0.0.1:29500"));
}

Result<std::vector<SocketAddress>> Resolve(const HostPort& where) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error =
      ::getaddrinfo(where.host.c_str(), std::to_string(where.port).c_str(), &hints, &found);
  if (error != 0) {
    const auto code = error == EAI_AGAIN || error == EAI_SYSTEM ? StatusCode::kInternal
                                                                : StatusCode::kInvalidArgument;
    return Status(code, StrCat("host '", where.host, "': ", ::gai_strerror(error)));
  }
  std::vector<SocketAddress> addresses;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    SocketAddress address;
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.bytes = entry->ai_addrlen;
    addresses.push_back(address);
  }
  ::freeaddrinfo(found);
  return addresses;
}

SocketAddress UnixAddress(const std::string& name) {
  SocketAddress address;
  auto* raw = reinterpret_cast<sockaddr_un*>(&address.storage);
  raw->sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof(raw->sun_path) - 1);
  std::memcpy(raw->sun_path + 1, name.data(), length);  // a leading NUL: the abstract name space
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return address;
}

Result<UniqueFd> Listen(const SocketAddress& address) {
  const int family = address.storage.ss_family;
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus("making a socket", errno);
  const int one = 1;
  if (family != AF_UNIX && address.port() != 0)
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  if (::bind(fd.get(), address.raw(), address.bytes) != 0 || ::listen(fd.get(), SOMAXCONN) != 0)
    return ErrnoStatus(StrCat("listening at ", ToText(address)), errno);
  return fd;
}

Result<UniqueFd> Listen(const HostPort& where) {
  Result<std::vector<SocketAddress>> addresses = Resolve(where);
  if (!addresses.ok()) return addresses.status();
  Result<UniqueFd> listener = Status(StatusCode::kInvalidArgument, where.host + " has no address");
  for (const SocketAddress& address : addresses.value()) {
    listener = Listen(address);
    if (listener.ok()) break;
  }
  return listener;
}

SocketAddress LocalAddress(int fd) {
  SocketAddress address;
  address.bytes = sizeof(address.storage);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.bytes) != 0)
    address.bytes = 0;
  return address;
}

SocketAddress PeerAddress(int fd) {
  SocketAddress address;
  address.bytes = sizeof(address.storage);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.bytes) != 0)
    address.bytes = 0;
  return address;
}

UniqueFd AcceptFrom(int listener) {
  return UniqueFd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

Result<UniqueFd> StartConnect(const SocketAddress& address) {
  UniqueFd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus("making a socket", errno);
  // A unix socket whose queue is full answers EAGAIN: not begun, to be tried again.
  if (::connect(fd.get(), address.raw(), address.bytes) != 0 && errno != EINPROGRESS)
    return ErrnoStatus(StrCat("connecting to ", ToText(address)), errno);
  return fd;
}

Status FinishConnect(int fd, const SocketAddress& address) {
  int error = 0;
  socklen_t bytes = sizeof(error);
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) error = errno;
  if (error == 0 && MetItself(fd)) error = ECONNREFUSED;
  if (error == 0) return {};
  return ErrnoStatus(StrCat("connecting to ", ToText(address)), error);
}

void SetNoDelay(int fd) {
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

void SetHeartbeat(int fd) {
  constexpr int kOn = 1;
  constexpr int kSeconds = 1;
  constexpr int kLostMs = 3000;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &kOn, sizeof(kOn));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kSeconds, sizeof(kSeconds));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kSeconds, sizeof(kSeconds));
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kLostMs, sizeof(kLostMs));
}

Status Patience::Check() {
  const Deadline time = Clock::now();
  if (interrupted_ && !aborted_ && time >= next_ask_) {
    next_ask_ = time + std::chrono::milliseconds(kSliceMs);
    aborted_ = interrupted_();
  }
  if (aborted_) return Status(StatusCode::kAborted, "init was interrupted");
  if (time >= deadline_) return Status(StatusCode::kTimeout, "time is up");
  return {};
}

int Patience::SliceMs() const {
  if (deadline_ == kForever) return kSliceMs;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, kSliceMs));
}

void AwaitEvents(int fd, short events, const Patience& patience, int limit_ms) {
  pollfd entry{fd, events, 0};
  ::poll(&entry, fd >= 0 ? 1 : 0, std::min(limit_ms, patience.SliceMs()));
}

}  // namespace bagua
