#include "common/transport/lifeline.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/base/thread.h"

namespace bagua {
namespace {

constexpr uint32_t kGoodbye = 1;
constexpr uint32_t kAbort = 2;
constexpr uint32_t kSegment = 3;
constexpr uint32_t kMaxPayload = 1u << 16;
constexpr int kSendPatienceMs = 2000;

struct Header {
  uint32_t type;
  uint32_t bytes;
  uint64_t id;
};

// Descriptor and kind of event in one epoll word.
constexpr uint64_t kPidfdFlag = uint64_t{1} << 32;
constexpr uint64_t kStopWord = ~uint64_t{0};

void WatchDescriptor(int epoll, int fd, uint64_t word) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = word;
  ::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

}  // namespace

struct Lifelines::Watched {
  UniqueFd socket;
  UniqueFd pidfd;
  std::mutex sending;
  bool left = false;
  bool gone = false;
  Header header{};
  size_t header_bytes = 0;
  Bytes payload;
  size_t payload_bytes = 0;
  UniqueFd received;
};

Lifelines::Lifelines(std::vector<Peer> peers, std::function<void()> on_event)
    : on_event_(std::move(on_event)) {
  for (Peer& peer : peers) {
    auto watched = std::make_unique<Watched>();
    watched->socket = std::move(peer.socket);
    if (peer.pid > 0)
      watched->pidfd = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));
    peers_.push_back(std::move(watched));
  }
}

Lifelines::~Lifelines() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

Status Lifelines::Start() {
  epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  stop_ = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!epoll_.valid() || !stop_.valid()) return ErrnoStatus("watching the peers", errno);
  WatchDescriptor(epoll_.get(), stop_.get(), kStopWord);
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    if (peers_[peer]->socket.valid())
      WatchDescriptor(epoll_.get(), peers_[peer]->socket.get(), peer);
    if (peers_[peer]->pidfd.valid())
      WatchDescriptor(epoll_.get(), peers_[peer]->pidfd.get(), peer | kPidfdFlag);
  }
  thread_ = StartThread("bagua-lifeline", [this] { Watch(); });
  return {};
}

void Lifelines::Watch() {
  while (true) {
    epoll_event events[16];
    const int count = ::epoll_wait(epoll_.get(), events, 16, -1);
    for (int i = 0; i < count; ++i) {
      const uint64_t word = events[i].data.u64;
      if (word == kStopWord) return;
      const int peer = static_cast<int>(word & 0xffffffffu);
      // Said before dying, a goodbye or an abort stands in the socket: read it first.
      OnSocket(peer);
      if ((word & kPidfdFlag) != 0) {
        ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peers_[peer]->pidfd.get(), nullptr);
        OnGone(peer, "its process ended");
      }
    }
  }
}

void Lifelines::OnSocket(int peer) {
  if (peers_[peer]->gone || !peers_[peer]->socket.valid()) return;
  while (ReadSome(peer)) {
  }
}

bool Lifelines::ReadSome(int peer) {
  Watched& watched = *peers_[peer];
  const bool in_header = watched.header_bytes < sizeof(Header);
  iovec piece;
  if (in_header) {
    piece = {reinterpret_cast<std::byte*>(&watched.header) + watched.header_bytes,
             sizeof(Header) - watched.header_bytes};
  } else {
    piece = {watched.payload.data() + watched.payload_bytes,
             watched.payload.size() - watched.payload_bytes};
  }
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = ::recvmsg(watched.socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return errno == EINTR;
  if (got <= 0) {
    OnGone(peer, got == 0 ? "its connection closed" : std::strerror(errno));
    return false;
  }
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(c), sizeof(fd));
    watched.received.Reset(fd);
  }
  if (in_header) {
    watched.header_bytes += static_cast<size_t>(got);
    if (watched.header_bytes < sizeof(Header)) return true;
    if (watched.header.bytes > kMaxPayload) {
      OnGone(peer, "it sent a malformed message");
      return false;
    }
    watched.payload.assign(watched.header.bytes, std::byte{});
    watched.payload_bytes = 0;
  } else {
    watched.payload_bytes += static_cast<size_t>(got);
  }
  if (watched.payload_bytes < watched.payload.size()) return true;
  watched.header_bytes = 0;
  OnMessage(peer);
  return true;
}

void Lifelines::OnMessage(int peer) {
  Watched& watched = *peers_[peer];
  if (watched.header.type == kGoodbye) {
    watched.left = true;
    Push({PeerEvent::Kind::kLeft, peer, {}});
  } else if (watched.header.type == kAbort) {
    const bool known = watched.header.id >= static_cast<uint64_t>(StatusCode::kMismatch) &&
                       watched.header.id <= static_cast<uint64_t>(StatusCode::kInternal);
    const auto code = known ? static_cast<StatusCode>(watched.header.id) : StatusCode::kInternal;
    std::string text(reinterpret_cast<const char*>(watched.payload.data()), watched.payload.size());
    Push({PeerEvent::Kind::kAborted, peer, Status(code, std::move(text))});
  } else if (watched.header.type == kSegment) {
    {
      std::lock_guard lock(mutex_);
      segments_[{peer, watched.header.id}] = std::move(watched.received);
    }
    on_event_();
  }
}

void Lifelines::OnGone(int peer, const std::string& how) {
  Watched& watched = *peers_[peer];
  if (watched.gone) return;
  watched.gone = true;
  if (watched.socket.valid())
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, watched.socket.get(), nullptr);
  if (watched.left) return;
  Push({PeerEvent::Kind::kLost, peer, Status(StatusCode::kPeerLost, how)});
}

void Lifelines::Push(PeerEvent event) {
  {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  has_events_.store(true, std::memory_order_release);
  on_event_();
}

std::vector<PeerEvent> Lifelines::TakeEvents() {
  std::lock_guard lock(mutex_);
  has_events_.store(false, std::memory_order_relaxed);
  return std::exchange(events_, {});
}

bool Lifelines::HasSegment(int peer, uint64_t id) const {
  std::lock_guard lock(mutex_);
  return segments_.contains({peer, id});
}

UniqueFd Lifelines::TakeSegment(int peer, uint64_t id) {
  std::lock_guard lock(mutex_);
  auto node = segments_.extract({peer, id});
  return node.empty() ? UniqueFd() : std::move(node.mapped());
}

Status Lifelines::SendSegment(int peer, uint64_t id, int fd) {
  return SendMessage(peer, kSegment, id, {}, fd);
}

void Lifelines::SendAbort(const Status& reason) {
  const std::string text = reason.message().substr(0, kMaxPayload);
  Writer writer;
  writer.PutRaw(std::as_bytes(std::span(text)));
  const Bytes payload = writer.Take();
  for (size_t peer = 0; peer < peers_.size(); ++peer)
    [[maybe_unused]] const Status told = SendMessage(
        static_cast<int>(peer), kAbort, static_cast<uint64_t>(reason.code()), payload, -1);
}

void Lifelines::SendGoodbye() {
  for (size_t peer = 0; peer < peers_.size(); ++peer)
    [[maybe_unused]] const Status told = SendMessage(static_cast<int>(peer), kGoodbye, 0, {}, -1);
}

Status Lifelines::SendMessage(int peer, uint32_t type, uint64_t id, const Bytes& payload, int fd) {
  Watched& watched = *peers_[peer];
  if (!watched.socket.valid()) return {};
  const Header header{type, static_cast<uint32_t>(payload.size()), id};
  Writer writer;
  writer.Put(header);
  writer.PutRaw(payload);
  const Bytes bytes = writer.Take();
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  std::lock_guard lock(watched.sending);
  size_t sent = 0;
  while (sent < bytes.size()) {
    iovec piece{const_cast<std::byte*>(bytes.data()) + sent, bytes.size() - sent};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    if (fd >= 0 && sent == 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
    }
    const ssize_t put = ::sendmsg(watched.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put > 0) {
      sent += static_cast<size_t>(put);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET)
      return Status(StatusCode::kPeerLost, StrCat("rank ", peer, " closed its lifeline"));
    if (errno != EAGAIN) return ErrnoStatus(StrCat("telling rank ", peer), errno);
    // The peer's watcher always reads; a full socket means that its process is stopped.
    pollfd room{watched.socket.get(), POLLOUT, 0};
    if (::poll(&room, 1, kSendPatienceMs) <= 0)
      return Status(StatusCode::kPeerLost, StrCat("rank ", peer, " does not read its lifeline"));
  }
  return {};
}

void Lifelines::CloseInChild() {
  for (const auto& peer : peers_) {
    peer->socket.Reset();
    peer->pidfd.Reset();
  }
  epoll_.Reset();
  stop_.Reset();
  // The thread exists in the parent alone; its handle must not be joined here.
  if (thread_.joinable()) thread_.detach();
}

}  // namespace bagua
