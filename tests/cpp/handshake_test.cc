// The handshake between honest sides, and against whatever else may be at the other end.
#include "common/transport/handshake.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/base/fd.h"

namespace bagua {
namespace {

constexpr size_t kHelloBytes = sizeof(Handshake::Hello);
constexpr size_t kProofBytes = sizeof(Digest);

Bytes Secret(int seed = 0) {
  return Bytes(32, static_cast<std::byte>(seed));
}

bool Contains(const Status& status, const std::string& part) {
  return status.message().find(part) != std::string::npos;
}

struct Ends {
  UniqueFd ours;
  UniqueFd theirs;
};

Ends MakeEnds() {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

Bytes ReadAll(int fd) {
  Bytes bytes(4096);
  const ssize_t got = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
  bytes.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return bytes;
}

void WriteAll(int fd, const Bytes& bytes) {
  if (bytes.empty()) return;
  ASSERT_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
}

// One side, and the end of its socket that the test holds in place of the other side.
class Side {
 public:
  explicit Side(Result<Handshake> handshake) : handshake_(std::move(handshake).value()) {}

  void Step() {
    if (status_.ok()) status_ = handshake_.Advance(ends_.ours.get());
    if (!status_.ok()) ends_.ours.Reset();
  }
  void Give(const Bytes& bytes) {
    if (status_.ok()) WriteAll(ends_.theirs.get(), bytes);
    Step();
  }
  Bytes Take() {
    Step();
    return ReadAll(ends_.theirs.get());
  }
  void HangUp() {
    ends_.theirs.Reset();
    Step();
  }
  bool accepted() const { return status_.ok() && handshake_.done(); }
  const Status& status() const { return status_; }
  const Handshake& handshake() const { return handshake_; }

 private:
  Handshake handshake_;
  Ends ends_ = MakeEnds();
  Status status_;
};

struct Terms {
  Bytes connect_secret = Secret();
  Bytes accept_secret = Secret();
  RoundId connect_round{};
  RoundId accept_round{};
  int meant = 2;
  int answers = 2;
};

// Changes what passes; `from_connector` and the number of bytes that passed before in this
// direction.
using Tamper = std::function<void(bool from_connector, size_t before, Bytes* bytes)>;

class Pair {
 public:
  explicit Pair(const Terms& terms = {})
      : connector(Handshake::Connect(terms.connect_secret, terms.connect_round, Purpose::kControl,
                                     1, terms.meant)),
        acceptor(Handshake::Accept(terms.accept_secret, terms.accept_round, terms.answers)) {}

  // Passes everything on until nothing moves.
  void Run(const Tamper& tamper = {}) {
    while (true) {
      Bytes up = connector.Take();
      if (tamper) tamper(true, said_by_connector.size(), &up);
      said_by_connector.insert(said_by_connector.end(), up.begin(), up.end());
      acceptor.Give(up);
      Bytes down = acceptor.Take();
      if (tamper) tamper(false, said_by_acceptor.size(), &down);
      said_by_acceptor.insert(said_by_acceptor.end(), down.begin(), down.end());
      connector.Give(down);
      if (up.empty() && down.empty()) return;
    }
  }

  Side connector;
  Side acceptor;
  Bytes said_by_connector;
  Bytes said_by_acceptor;
};

TEST(Handshake, LetsBothSidesKnowWhoIsThere) {
  Pair pair;
  pair.Run();
  EXPECT_TRUE(pair.connector.accepted());
  EXPECT_TRUE(pair.acceptor.accepted());
  EXPECT_EQ(pair.acceptor.handshake().peer_rank(), 1);
  EXPECT_EQ(pair.connector.handshake().peer_rank(), 2);
  EXPECT_EQ(pair.acceptor.handshake().purpose(), Purpose::kControl);
  EXPECT_EQ(pair.connector.handshake().purpose(), Purpose::kControl);
  EXPECT_EQ(pair.said_by_connector.size(), kHelloBytes + kProofBytes);
  EXPECT_EQ(pair.said_by_acceptor.size(), kHelloBytes + kProofBytes + 1);
}

TEST(Handshake, GoesOnByteByByte) {
  Pair pair;
  for (int turn = 0; turn < 20; ++turn) {
    for (const std::byte byte : pair.connector.Take()) pair.acceptor.Give({byte});
    for (const std::byte byte : pair.acceptor.Take()) pair.connector.Give({byte});
  }
  EXPECT_TRUE(pair.connector.accepted());
  EXPECT_TRUE(pair.acceptor.accepted());
}

TEST(Handshake, WaitsForWhatItNeeds) {
  Pair pair;
  EXPECT_EQ(pair.connector.handshake().events(), POLLOUT);
  EXPECT_EQ(pair.acceptor.handshake().events(), POLLIN);
  pair.connector.Step();
  EXPECT_EQ(pair.connector.handshake().events(), POLLIN);
  EXPECT_FALSE(pair.acceptor.handshake().met());
}

TEST(Handshake, RefusesAnotherSecretAndSaysHowToGiveOne) {
  Pair pair(Terms{.accept_secret = Secret(1)});
  pair.Run();
  EXPECT_EQ(pair.connector.status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(Contains(pair.connector.status(), "secret differs"));
  EXPECT_TRUE(Contains(pair.connector.status(), "BAGUA_SECRET_FILE"));
  EXPECT_FALSE(pair.acceptor.accepted());
  EXPECT_TRUE(pair.acceptor.handshake().met());
}

TEST(Handshake, RefusesAnotherRound) {
  Pair pair(Terms{.accept_round = {std::byte{1}}});
  pair.Run();
  EXPECT_FALSE(pair.connector.accepted());
  EXPECT_FALSE(pair.acceptor.accepted());
}

TEST(Handshake, RefusesAnotherRankThanTheOneMeant) {
  Pair pair(Terms{.answers = 5});
  pair.Run();
  EXPECT_FALSE(pair.acceptor.accepted());
  EXPECT_EQ(pair.connector.status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(Contains(pair.connector.status(), "rank 2 was meant, rank 5 answered"))
      << pair.connector.status().message();
}

// The version stands after the magic in the hello.
TEST(Handshake, TellsBothSidesOfAnotherVersion) {
  for (const bool newer_connects : {false, true}) {
    Pair pair;
    pair.Run([&](bool from_connector, size_t before, Bytes* bytes) {
      if (from_connector == newer_connects && before == 0 && bytes->size() >= kHelloBytes)
        (*bytes)[offsetof(Handshake::Hello, version)] = std::byte{77};
    });
    const Side& older = newer_connects ? pair.acceptor : pair.connector;
    EXPECT_EQ(older.status().code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(Contains(older.status(), "version 77")) << older.status().message();
    EXPECT_FALSE(pair.connector.accepted());
    EXPECT_FALSE(pair.acceptor.accepted());
  }
}

TEST(Handshake, ToleratesNoFlippedBit) {
  const size_t up = kHelloBytes + kProofBytes;
  const size_t down = kHelloBytes + kProofBytes + 1;
  for (size_t bit = 0; bit < (up + down) * 8; ++bit) {
    const bool in_up = bit < up * 8;
    const size_t at = (in_up ? bit : bit - up * 8) / 8;
    Pair pair;
    pair.Run([&](bool from_connector, size_t before, Bytes* bytes) {
      if (from_connector == in_up && before <= at && at < before + bytes->size())
        (*bytes)[at - before] ^= static_cast<std::byte>(1 << (bit % 8));
    });
    ASSERT_FALSE(pair.connector.accepted()) << (in_up ? "up " : "down ") << at;
    // The last byte, the verdict, is said when the accepting side has decided already.
    if (in_up || at + 1 < down) {
      ASSERT_FALSE(pair.acceptor.accepted()) << (in_up ? "up " : "down ") << at;
    }
  }
}

TEST(Handshake, EndsAsLostWhereverTheConnectionEnds) {
  Pair whole;
  whole.Run();
  for (size_t length = 0; length < kHelloBytes + kProofBytes; ++length) {
    Pair pair;
    pair.acceptor.Give(Bytes(
        whole.said_by_connector.begin(),
        whole.said_by_connector.begin() + static_cast<ptrdiff_t>(std::min(length, kHelloBytes))));
    pair.acceptor.HangUp();
    ASSERT_EQ(pair.acceptor.status().code(), StatusCode::kPeerLost) << length;
    ASSERT_FALSE(pair.acceptor.handshake().done());
    pair.connector.HangUp();
    ASSERT_EQ(pair.connector.status().code(), StatusCode::kPeerLost);
  }
}

TEST(Handshake, IsWorthNothingASecondTime) {
  Pair recorded;
  recorded.Run();
  ASSERT_TRUE(recorded.acceptor.accepted());
  const auto middle = recorded.said_by_connector.begin() + kHelloBytes;

  Pair replayed;
  replayed.acceptor.Give(Bytes(recorded.said_by_connector.begin(), middle));
  replayed.acceptor.Take();
  replayed.acceptor.Give(Bytes(middle, recorded.said_by_connector.end()));
  EXPECT_EQ(replayed.acceptor.status().code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(replayed.acceptor.accepted());

  replayed.connector.Take();
  replayed.connector.Give(recorded.said_by_acceptor);
  EXPECT_EQ(replayed.connector.status().code(), StatusCode::kInvalidArgument);
}

TEST(Handshake, DoesNotTakeItsOwnWordsForAnAnswer) {
  Pair pair;
  Bytes echo = pair.connector.Take();
  echo.resize(kHelloBytes + kProofBytes + 1);
  pair.connector.Give(echo);
  EXPECT_FALSE(pair.connector.accepted());

  // The accepting side's proof, sent back as the connecting side's.
  pair.acceptor.Give(Pair().connector.Take());
  const Bytes answer = pair.acceptor.Take();
  ASSERT_EQ(answer.size(), kHelloBytes + kProofBytes);
  pair.acceptor.Give(Bytes(answer.begin() + kHelloBytes, answer.end()));
  EXPECT_FALSE(pair.acceptor.accepted());
  EXPECT_EQ(pair.acceptor.status().code(), StatusCode::kInvalidArgument);
}

TEST(Handshake, SurvivesNoise) {
  std::mt19937 random(7);
  const Bytes hello = Pair().connector.Take();
  for (int i = 0; i < 3000; ++i) {
    Bytes noise(random() % 400);
    for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
    // Half of it begins as a hello does, up to some byte.
    if (i % 2 == 0)
      std::copy_n(hello.begin(), std::min(noise.size(), random() % (kHelloBytes + 1)),
                  noise.begin());
    Pair pair;
    pair.acceptor.Give(noise);
    pair.acceptor.Take();
    ASSERT_FALSE(pair.acceptor.accepted());
    pair.connector.Take();
    pair.connector.Give(noise);
    ASSERT_FALSE(pair.connector.accepted());
  }
}

TEST(Handshake, KnowsAStrangerByItsFirstBytes) {
  Pair pair;
  const std::string http = "GET / HT";
  const auto raw = std::as_bytes(std::span(http));
  pair.acceptor.Give(Bytes(raw.begin(), raw.end()));
  EXPECT_EQ(pair.acceptor.status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(Contains(pair.acceptor.status(), "does not speak"));
}

TEST(CheckSecret, WantsSixteenBytes) {
  EXPECT_TRUE(CheckSecret(Bytes(16)).ok());
  EXPECT_EQ(CheckSecret(Bytes(15)).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(Contains(CheckSecret({}), "BAGUA_SECRET_FILE"));
}

}  // namespace
}  // namespace bagua
