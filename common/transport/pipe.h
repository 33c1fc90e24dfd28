// One direction-pair of ordered bytes to one peer, without blocking: a socket (tcp_pipe), a ring in
// shared memory (ring_pipe), or a ring in this process's memory (loopback).
#ifndef BAGUA_COMMON_TRANSPORT_PIPE_H_
#define BAGUA_COMMON_TRANSPORT_PIPE_H_

#include <cstddef>
#include <span>

#include "common/base/status.h"

namespace bagua {

// Thread-safety: one thread at a time.
class Pipe {
 public:
  virtual ~Pipe() = default;

  // Takes bytes from the front of `src` and sets `*taken`; 0 when nothing fits now. `more`: the
  // next Write follows at once, so a small piece may be held back. Non-OK (kPeerLost, without the
  // rank's name, which the caller adds): the peer's end is gone; every later Write fails too.
  virtual Status Write(std::span<const std::byte> src, bool more, size_t* taken) = 0;

  // Moves available bytes to the front of `dst` and sets `*moved`; 0 when none is there now.
  // Non-OK: the connection broke. The peer's orderly end is no error, see ended().
  virtual Status Read(std::span<std::byte> dst, size_t* moved) = 0;

  // The peer closed its direction (orderly or by dying) and every byte before was read.
  virtual bool ended() const = 0;

  // Ends this side's direction after what was written; reading goes on.
  virtual void CloseWrite() = 0;

  // Whether payloads need a checksum: true where bytes leave the host.
  virtual bool leaves_host() const = 0;

  // Descriptor to wait on for arrivals and room; -1 when the peer rings this engine's doorbell.
  virtual int fd() const = 0;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_PIPE_H_
