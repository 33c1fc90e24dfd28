// Sockets as bootstrap and store need them: addresses, listening, connecting, all of it
// non-blocking and close-on-exec. Thread-safety: free functions, any thread.
#ifndef BAGUA_COMMON_TRANSPORT_SOCKET_H_
#define BAGUA_COMMON_TRANSPORT_SOCKET_H_

#include <sys/socket.h>

#include <functional>
#include <string>
#include <vector>

#include "common/base/clock.h"
#include "common/base/fd.h"
#include "common/base/status.h"

namespace bagua {

// TCP over IPv4 or IPv6, or an abstract unix socket.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
  // The same interface with a port that the kernel chooses.
  SocketAddress WithAnyPort() const;
  int port() const;
  // Reachable from this host alone: 127.0.0.0/8, ::1 or a unix socket.
  bool IsLoopback() const;
};

// "10.0.0.1:80", "[::1]:80", "@name" for unix sockets.
std::string ToText(const SocketAddress& address);

struct HostPort {
  std::string host;
  int port = 0;
};
// "host:port" or "[host]:port"; kInvalidArgument otherwise.
Result<HostPort> ParseHostPort(const std::string& text);

// Every address of a name, literal or not. kInvalidArgument: nobody knows the name; kInternal: the
// name service does not answer now. Blocks for as long as the name service does.
Result<std::vector<SocketAddress>> Resolve(const HostPort& where);
SocketAddress UnixAddress(const std::string& name);

Result<UniqueFd> Listen(const SocketAddress& address);
// At the first address of `where` that can be had; port 0 takes a free one.
Result<UniqueFd> Listen(const HostPort& where);
SocketAddress LocalAddress(int fd);
SocketAddress PeerAddress(int fd);
// Invalid when nobody waits, or with errno set for a reason.
UniqueFd AcceptFrom(int listener);

// Begins to connect; the socket becomes writable when it is decided, FinishConnect then says how.
Result<UniqueFd> StartConnect(const SocketAddress& address);
Status FinishConnect(int fd, const SocketAddress& address);

// Small messages leave at once. No effect on unix sockets.
void SetNoDelay(int fd);
// The kernel asks a silent peer once a second; the connection breaks when its host has not answered
// for 3 s. A process that is stopped or busy still answers. No effect on unix sockets.
void SetHeartbeat(int fd);

// How long a blocking step goes on. One thread at a time.
class Patience {
 public:
  Patience(Deadline deadline, std::function<bool()> interrupted)
      : deadline_(deadline), interrupted_(std::move(interrupted)) {}
  // kAborted from when interrupted (asked about every 100 ms), else kTimeout past the deadline.
  Status Check();
  // Milliseconds that poll() may sleep before the next Check: 100 at most.
  int SliceMs() const;
  // Time since the start, for messages.
  double waited_seconds() const { return Seconds(Clock::now() - start_).count(); }
  Deadline deadline() const { return deadline_; }

 private:
  const Deadline deadline_;
  const std::function<bool()> interrupted_;
  const Deadline start_ = Clock::now();
  Deadline next_ask_ = Clock::now();
  bool aborted_ = false;
};

// Sleeps in poll() until one of `events` at `fd` or the end of the slice, `limit_ms` at most. `fd`
// -1 waits for time alone.
void AwaitEvents(int fd, short events, const Patience& patience, int limit_ms = 100);

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_SOCKET_H_
