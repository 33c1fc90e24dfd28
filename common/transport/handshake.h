// The handshake with which every socket of a job begins. Both sides prove that they hold the job's
// secret; neither sends it, and what is said once is worth nothing a second time.
//
//   connecting side                         accepting side
//   hello: magic, version, purpose,   ->
//          rank, peer's rank, nonce
//                                     <-    hello with its own nonce; HMAC("accept", both hellos)
//   HMAC("connect", both hellos)      ->
//                                     <-    verdict: one byte
//
// Every message has a fixed length, so that a stranger costs some hundred bytes and as much time as
// the caller grants. A round's number, known to its members alone, goes into the HMACs: a rank of
// another round or job is a stranger.
#ifndef BAGUA_COMMON_TRANSPORT_HANDSHAKE_H_
#define BAGUA_COMMON_TRANSPORT_HANDSHAKE_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/base/clock.h"
#include "common/base/crypto.h"
#include "common/base/status.h"
#include "common/base/wire.h"

namespace bagua {

inline constexpr uint32_t kProtocolVersion = 1;

// What a connection is for. Values travel on the wire.
enum class Purpose : uint32_t { kStore = 1, kLifeline = 2, kControl = 3, kData = 4 };
const char* Name(Purpose purpose);

using RoundId = std::array<std::byte, 16>;

// Rank of the rendezvous store.
inline constexpr int kStoreRank = -1;

// How long an accepting side bears with a connection that has not proved itself.
inline constexpr std::chrono::seconds kHandshakePatience{10};

// kInvalidArgument saying how to give one, for a secret of less than 16 bytes.
Status CheckSecret(const Bytes& secret);

// One side of one handshake, without blocking. Thread-safety: one thread at a time.
class Handshake {
 public:
  // What one side says of itself; its bytes are the hello.
  struct Hello {
    uint64_t magic;
    uint32_t version;
    uint32_t purpose;
    int32_t rank;
    int32_t peer_rank;
    std::array<std::byte, 32> nonce;
  };

  static Result<Handshake> Connect(Bytes secret, const RoundId& round, Purpose purpose, int rank,
                                   int peer_rank);
  static Result<Handshake> Accept(Bytes secret, const RoundId& round, int rank);

  // Goes on as far as the socket lets it; OK also when more is to come. After a failure the socket
  // is to be closed: kInvalidArgument: another secret, another version, or no peer of ours at all;
  // kPeerLost: the connection ended.
  Status Advance(int fd);
  bool done() const { return step_ == kSteps; }
  // A hello of this protocol came from the other side; nothing is proved before done().
  bool met() const { return step_ > (connects_ ? 1 : 0); }
  // POLLIN or POLLOUT: what Advance waits for.
  short events() const;
  // Proved once done().
  int peer_rank() const { return theirs_.rank; }
  Purpose purpose() const {
    return static_cast<Purpose>(connects_ ? ours_.purpose : theirs_.purpose);
  }

 private:
  static constexpr int kSteps = 4;

  Handshake(bool connects, Bytes secret, const RoundId& round) noexcept;
  bool sending() const { return (step_ % 2 == 0) == connects_; }
  size_t StepBytes() const;
  Status Transfer(int fd, bool* complete);
  // What follows when the message of this step has gone through.
  Status EndStep();
  Status CheckHello();
  Status TakeTheirHello();
  Status CheckProof();
  void PrepareHello(bool with_proof);
  Digest Proof(bool of_connecting_side) const;
  void BeginStep();

  bool connects_;
  Bytes secret_;
  RoundId round_;
  Hello ours_{};
  Hello theirs_{};
  int step_ = 0;
  Bytes buffer_;
  size_t moved_ = 0;
  Status refusal_;  // what is wrong with the peer, told after the answer has been sent
};

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_HANDSHAKE_H_
