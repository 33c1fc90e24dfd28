#include "common/transport/handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

namespace bagua {
namespace {

constexpr uint64_t kMagic = 0x314b485341554741;  // "AGUASHK1"
constexpr std::byte kWelcome{0xa1};
constexpr std::byte kRefused{0x5e};

static_assert(sizeof(Handshake::Hello) == 56, "no padding may travel");

Status Differs() {
  return Status(StatusCode::kInvalidArgument,
                "its secret differs from this rank's. Give every rank of the job the same key: set "
                "BAGUA_SECRET_FILE to a file of at least 16 random bytes, equal on all hosts");
}

Status ConnectionEnded(const char* how) {
  return Status(StatusCode::kPeerLost, StrCat("the connection ended in the handshake (", how, ")"));
}

}  // namespace

const char* Name(Purpose purpose) {
  switch (purpose) {
    case Purpose::kStore:
      return "store";
    case Purpose::kLifeline:
      return "lifeline";
    case Purpose::kControl:
      return "control";
    case Purpose::kData:
      return "data";
  }
  return "unknown";
}

Status CheckSecret(const Bytes& secret) {
  constexpr size_t kLeast = 16;
  if (secret.size() >= kLeast) return {};
  return Status(
      StatusCode::kInvalidArgument,
      StrCat("the job's secret has ", secret.size(), " bytes instead of at least ", kLeast,
             ". Set BAGUA_SECRET_FILE to a file of random bytes, equal on all hosts"));
}

Handshake::Handshake(bool connects, Bytes secret, const RoundId& round) noexcept
    : connects_(connects), secret_(std::move(secret)), round_(round) {
  ours_.magic = kMagic;
  ours_.version = kProtocolVersion;
}

Result<Handshake> Handshake::Connect(Bytes secret, const RoundId& round, Purpose purpose, int rank,
                                     int peer_rank) {
  Handshake shake(true, std::move(secret), round);
  shake.ours_.purpose = static_cast<uint32_t>(purpose);
  shake.ours_.rank = rank;
  shake.ours_.peer_rank = peer_rank;
  BAGUA_RETURN_IF_ERROR(FillRandom(shake.ours_.nonce));
  shake.PrepareHello(false);
  return shake;
}

Result<Handshake> Handshake::Accept(Bytes secret, const RoundId& round, int rank) {
  Handshake shake(false, std::move(secret), round);
  shake.ours_.rank = rank;
  BAGUA_RETURN_IF_ERROR(FillRandom(shake.ours_.nonce));
  shake.BeginStep();
  return shake;
}

short Handshake::events() const {
  return sending() ? POLLOUT : POLLIN;
}

size_t Handshake::StepBytes() const {
  constexpr size_t kBytes[kSteps] = {sizeof(Hello), sizeof(Hello) + sizeof(Digest), sizeof(Digest),
                                     1};
  return kBytes[step_];
}

void Handshake::BeginStep() {
  moved_ = 0;
  if (!sending()) buffer_.assign(StepBytes(), std::byte{});
}

void Handshake::PrepareHello(bool with_proof) {
  Writer writer;
  writer.Put(ours_);
  if (with_proof) writer.PutRaw(Proof(false));
  buffer_ = writer.Take();
}

Digest Handshake::Proof(bool of_connecting_side) const {
  Writer transcript;
  transcript.PutString(of_connecting_side ? "bagua connect" : "bagua accept");
  transcript.PutRaw(round_);
  transcript.Put(connects_ ? ours_ : theirs_);
  transcript.Put(connects_ ? theirs_ : ours_);
  return HmacSha256(secret_, transcript.Take());
}

Status Handshake::Advance(int fd) {
  while (!done()) {
    bool complete = false;
    BAGUA_RETURN_IF_ERROR(Transfer(fd, &complete));
    if (!complete) return {};
    BAGUA_RETURN_IF_ERROR(EndStep());
  }
  return {};
}

Status Handshake::Transfer(int fd, bool* complete) {
  while (moved_ < buffer_.size()) {
    std::byte* at = buffer_.data() + moved_;
    const size_t left = buffer_.size() - moved_;
    const ssize_t n = sending() ? ::send(fd, at, left, MSG_NOSIGNAL | MSG_DONTWAIT)
                                : ::recv(fd, at, left, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return {};
    if (n < 0) return ConnectionEnded(std::strerror(errno));
    if (n == 0) return ConnectionEnded("closed by the other side");
    moved_ += static_cast<size_t>(n);
    // A stranger's first bytes give it away before the rest has come.
    if (!sending() && step_ < 2 && moved_ >= sizeof(kMagic)) BAGUA_RETURN_IF_ERROR(CheckHello());
  }
  *complete = true;
  return {};
}

Status Handshake::CheckHello() {
  uint64_t magic = 0;
  std::memcpy(&magic, buffer_.data(), sizeof(magic));
  if (magic == kMagic) return {};
  return Status(StatusCode::kInvalidArgument, "what answers there does not speak bagua's protocol");
}

Status Handshake::EndStep() {
  const bool sent = sending();
  if (!sent && step_ < 2) BAGUA_RETURN_IF_ERROR(TakeTheirHello());
  if (!sent && step_ == 2 && !EqualInConstantTime(buffer_, Proof(true))) refusal_ = Differs();
  if (!sent && step_ == 3 && buffer_[0] != kWelcome) return Differs();
  if (sent && step_ >= 1 && !connects_) BAGUA_RETURN_IF_ERROR(refusal_);
  ++step_;
  if (done()) return {};
  BeginStep();
  if (!sending()) return {};
  if (step_ == 1) PrepareHello(true);
  if (step_ == 2) {
    const Digest proof = Proof(true);
    buffer_.assign(proof.begin(), proof.end());
  }
  if (step_ == 3) buffer_.assign(1, refusal_.ok() ? kWelcome : kRefused);
  return {};
}

Status Handshake::TakeTheirHello() {
  std::memcpy(&theirs_, buffer_.data(), sizeof(theirs_));
  Status wrong;
  if (theirs_.version != kProtocolVersion) {
    wrong = Status(StatusCode::kInvalidArgument,
                   StrCat("it speaks protocol version ", theirs_.version, ", this rank version ",
                          kProtocolVersion, ". Install the same bagua_ext on all hosts"));
  } else if (connects_ &&
             !EqualInConstantTime(std::span(buffer_).subspan(sizeof(Hello)), Proof(false))) {
    wrong = Differs();
  } else if (connects_ ? theirs_.rank != ours_.peer_rank : theirs_.peer_rank != ours_.rank) {
    wrong = Status(StatusCode::kInvalidArgument,
                   StrCat("rank ", connects_ ? ours_.peer_rank : theirs_.peer_rank,
                          " was meant, rank ", connects_ ? theirs_.rank : ours_.rank, " answered"));
  }
  // The accepting side answers first, so that the other learns the version from it.
  if (connects_) return wrong;
  refusal_ = wrong;
  return {};
}

}  // namespace bagua
