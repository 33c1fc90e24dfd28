#include "common/transport/tcp_pipe.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace bagua {
namespace {

class TcpPipe final : public Pipe {
 public:
  explicit TcpPipe(UniqueFd socket) : socket_(std::move(socket)) {}

  Status Write(std::span<const std::byte> src, bool more, size_t* taken) override {
    *taken = 0;
    if (!write_failure_.ok()) return write_failure_;
    while (!src.empty()) {
      const int flags = MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0);
      const ssize_t sent = ::send(socket_.get(), src.data(), src.size(), flags);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && (errno == EAGAIN || errno == ENOBUFS)) return {};
      if (sent < 0) return write_failure_ = Broken(errno);
      *taken += static_cast<size_t>(sent);
      src = src.subspan(static_cast<size_t>(sent));
    }
    return {};
  }

  Status Read(std::span<std::byte> dst, size_t* moved) override {
    *moved = 0;
    if (!read_failure_.ok()) return read_failure_;
    if (ended_ || dst.empty()) return {};
    while (true) {
      const ssize_t got = ::recv(socket_.get(), dst.data(), dst.size(), MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return {};
      if (got < 0) return read_failure_ = Broken(errno);
      *moved = static_cast<size_t>(got);
      ended_ = got == 0;
      return {};
    }
  }

  bool ended() const override { return ended_; }
  void CloseWrite() override { ::shutdown(socket_.get(), SHUT_WR); }
  bool leaves_host() const override { return true; }
  int fd() const override { return socket_.get(); }

 private:
  static Status Broken(int error) {
    return Status(StatusCode::kPeerLost, StrCat("connection broke: ", std::strerror(error)));
  }

  UniqueFd socket_;
  // Two: what the peer wrote before it closed can be read when nothing can be written any more. The
  // kernel tells an error once and then an orderly end; here it stays.
  Status write_failure_;
  Status read_failure_;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<Pipe> MakeTcpPipe(UniqueFd socket) {
  return std::make_unique<TcpPipe>(std::move(socket));
}

}  // namespace bagua
