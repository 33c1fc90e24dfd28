#include "common/transport/ring_pipe.h"

#include <utility>

namespace bagua {
namespace {

class RingPipe final : public Pipe {
 public:
  RingPipe(ByteRing* outgoing, ByteRing* incoming, std::shared_ptr<void> owner,
           std::function<void()> ring_peer)
      : outgoing_(outgoing),
        incoming_(incoming),
        owner_(std::move(owner)),
        ring_peer_(std::move(ring_peer)) {}

  Status Write(std::span<const std::byte> src, bool more, size_t* taken) override {
    *taken = outgoing_->Write(src);
    // A header alone is no work for the peer, unless the ring is full and must be emptied first.
    if (!more || *taken < src.size()) ring_peer_();
    return {};
  }

  Status Read(std::span<std::byte> dst, size_t* moved) override {
    *moved = incoming_->Read(dst);
    if (*moved > 0) ring_peer_();  // the writer may wait for room; ringing an awake peer is a load
    return {};
  }

  bool ended() const override { return incoming_->Ended(); }

  void CloseWrite() override {
    outgoing_->closed.store(1, std::memory_order_release);
    ring_peer_();
  }

  bool leaves_host() const override { return false; }
  int fd() const override { return -1; }

 private:
  ByteRing* outgoing_;
  ByteRing* incoming_;
  std::shared_ptr<void> owner_;
  std::function<void()> ring_peer_;
};

}  // namespace

std::unique_ptr<Pipe> MakeRingPipe(ByteRing* outgoing, ByteRing* incoming,
                                   std::shared_ptr<void> owner, std::function<void()> ring_peer) {
  return std::make_unique<RingPipe>(outgoing, incoming, std::move(owner), std::move(ring_peer));
}

}  // namespace bagua
