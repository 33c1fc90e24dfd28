// Pipes over TCP: bytes arrive in order and whole, damage is seen, and the peer's end is told.
#include "common/transport/tcp_pipe.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "common/base/clock.h"
#include "common/base/crc32c.h"
#include "common/base/scheduler.h"
#include "common/base/wire.h"
#include "common/transport/mesh.h"
#include "common/transport/socket.h"

namespace bagua {
namespace {

struct Sockets {
  UniqueFd left;
  UniqueFd right;
};

void Await(int fd, short events) {
  pollfd entry{fd, events, 0};
  ASSERT_EQ(::poll(&entry, 1, 5000), 1);
}

Sockets MakeSockets() {
  const UniqueFd listener = Listen(HostPort{"127.0.0.1", 0}).value();
  const SocketAddress address = LocalAddress(listener.get());
  Sockets sockets;
  sockets.left = StartConnect(address).value();
  Await(listener.get(), POLLIN);
  sockets.right = AcceptFrom(listener.get());
  Await(sockets.left.get(), POLLOUT);
  EXPECT_TRUE(FinishConnect(sockets.left.get(), address).ok());
  SetNoDelay(sockets.left.get());
  SetNoDelay(sockets.right.get());
  return sockets;
}

struct Pipes {
  explicit Pipes(Sockets sockets = MakeSockets())
      : left(MakeTcpPipe(std::move(sockets.left))), right(MakeTcpPipe(std::move(sockets.right))) {}
  std::unique_ptr<Pipe> left;
  std::unique_ptr<Pipe> right;
};

Bytes RandomBytes(size_t count, std::mt19937* random) {
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((*random)());
  return bytes;
}

// One direction: what is still to be written in pieces of random size, and what has arrived.
struct Flow {
  Pipe* from;
  Pipe* to;
  Bytes sent;
  size_t written = 0;
  Bytes received = {};

  bool Move(std::mt19937* random) {
    const size_t piece = std::min<size_t>(sent.size() - written, (*random)() % 70'000);
    const bool more = written + piece < sent.size() && (*random)() % 2 == 0;
    size_t taken = 0;
    EXPECT_TRUE(from->Write(std::span(sent).subspan(written, piece), more, &taken).ok());
    EXPECT_LE(taken, piece);
    written += taken;
    Bytes room(1 + (*random)() % 90'000);
    size_t moved = 0;
    EXPECT_TRUE(to->Read(room, &moved).ok());
    EXPECT_LE(moved, room.size());
    received.insert(received.end(), room.begin(), room.begin() + static_cast<ptrdiff_t>(moved));
    return taken + moved > 0;
  }
  bool complete() const { return received.size() == sent.size(); }
};

// Reads until something came or the pipe ended or broke.
Status ReadSome(Pipe* pipe, std::span<std::byte> dst, size_t* moved) {
  while (true) {
    const Status status = pipe->Read(dst, moved);
    if (!status.ok() || *moved > 0 || pipe->ended()) return status;
    Await(pipe->fd(), POLLIN);
    if (testing::Test::HasFatalFailure()) return status;
  }
}

TEST(TcpPipe, MovesRandomSizesBothWaysAtOnce) {
  std::mt19937 random(1);
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{1000}, size_t{65'537}, size_t{3} << 20}) {
    Pipes pipes;
    Flow there{pipes.left.get(), pipes.right.get(), RandomBytes(bytes, &random)};
    Flow back{pipes.right.get(), pipes.left.get(), RandomBytes(bytes / 2, &random)};
    while (!there.complete() || !back.complete()) {
      const bool moved = there.Move(&random);
      if (!back.Move(&random) && !moved) {
        pollfd entries[] = {{pipes.left->fd(), POLLIN, 0}, {pipes.right->fd(), POLLIN, 0}};
        ::poll(entries, 2, 10);
      }
      ASSERT_FALSE(HasFailure());
    }
    EXPECT_EQ(Crc32c(there.received), Crc32c(there.sent));
    EXPECT_EQ(there.received, there.sent);
    EXPECT_EQ(back.received, back.sent);
    EXPECT_TRUE(pipes.left->leaves_host());
  }
}

TEST(TcpPipe, TakesNothingWhenTheSocketIsFullAndGoesOnAfterwards) {
  Pipes pipes;
  const Bytes block(1 << 20, std::byte{5});
  size_t written = 0;
  size_t taken = 1;
  while (taken > 0) {
    ASSERT_TRUE(pipes.left->Write(block, false, &taken).ok());
    written += taken;
  }
  Bytes room(1 << 20);
  size_t read = 0;
  while (read < written) {
    size_t moved = 0;
    ASSERT_TRUE(ReadSome(pipes.right.get(), room, &moved).ok());
    read += moved;
  }
  Await(pipes.left->fd(), POLLOUT);
  ASSERT_TRUE(pipes.left->Write(block, false, &taken).ok());
  EXPECT_GT(taken, 0u);
}

TEST(TcpPipe, EndsAfterTheLastByteAndStillWritesTheOtherWay) {
  Pipes pipes;
  const Bytes last(10, std::byte{9});
  size_t count = 0;
  ASSERT_TRUE(pipes.left->Write(last, true, &count).ok());
  pipes.left->CloseWrite();
  Bytes room(100);
  ASSERT_TRUE(ReadSome(pipes.right.get(), room, &count).ok());
  EXPECT_EQ(count, last.size());
  ASSERT_TRUE(ReadSome(pipes.right.get(), room, &count).ok());
  EXPECT_EQ(count, 0u);
  EXPECT_TRUE(pipes.right->ended());
  ASSERT_TRUE(pipes.right->Write(last, false, &count).ok());
  ASSERT_TRUE(ReadSome(pipes.left.get(), room, &count).ok());
  EXPECT_EQ(count, last.size());
  EXPECT_FALSE(pipes.left->ended());
}

TEST(TcpPipe, FailsToWriteForGoodOnceThePeerIsGone) {
  Pipes pipes;
  pipes.right.reset();
  const Bytes bytes(100, std::byte{1});
  Status status;
  size_t taken = 0;
  // The first bytes still find a socket; the answer to them is a reset.
  for (const Deadline end = After(Seconds(5)); status.ok() && Clock::now() < end;)
    status = pipes.left->Write(bytes, false, &taken);
  EXPECT_EQ(status.code(), StatusCode::kPeerLost);
  EXPECT_EQ(pipes.left->Write(bytes, false, &taken).code(), StatusCode::kPeerLost);
  EXPECT_EQ(taken, 0u);
}

TEST(TcpPipe, ReadsAResetAsLostEveryTime) {
  Sockets sockets = MakeSockets();
  const linger reset{1, 0};
  ::setsockopt(sockets.right.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  Pipes pipes(std::move(sockets));
  pipes.right.reset();
  Bytes room(10);
  for (int i = 0; i < 3; ++i) {
    size_t moved = 1;
    EXPECT_EQ(ReadSome(pipes.left.get(), room, &moved).code(), StatusCode::kPeerLost);
    EXPECT_EQ(moved, 0u);
    EXPECT_FALSE(pipes.left->ended());
  }
}

// Two ranks in one thread, whose data stream passes through the hands of the test.
class TwoRanks {
 public:
  // Called with each piece on its way from rank 0 to rank 1 and the number of bytes before it.
  using Tamper = std::function<void(std::span<std::byte> piece, size_t before)>;

  explicit TwoRanks(Tamper tamper = {}) : tamper_(std::move(tamper)) {
    Sockets control = MakeSockets();
    Sockets near = MakeSockets();
    Sockets far = MakeSockets();
    from_zero_ = MakeTcpPipe(std::move(near.right));
    to_one_ = MakeTcpPipe(std::move(far.left));
    zero_.emplace(0, Peers(1, std::move(control.left), std::move(near.left)), &scheduler_);
    one_.emplace(1, Peers(0, std::move(control.right), std::move(far.right)), &scheduler_);
  }

  Mesh& zero() { return *zero_; }
  Mesh& one() { return *one_; }
  void CutOff() { to_one_.reset(); }

  // Moves bytes until `task` is done or rank 1 fails; gives that failure.
  Status Drive(const Task<Status>& task) {
    for (const Deadline end = After(Seconds(10)); !task.done() && Clock::now() < end;) {
      bool moved = false;
      BAGUA_RETURN_IF_ERROR(zero_->Progress(&moved));
      Relay();
      BAGUA_RETURN_IF_ERROR(one_->Progress(&moved));
      scheduler_.Poll();
    }
    return {};
  }
  // Progress of rank 1 alone until it fails.
  Status DriveToFailure() {
    Status status;
    for (const Deadline end = After(Seconds(10)); status.ok() && Clock::now() < end;) {
      bool moved = false;
      status = one_->Progress(&moved);
      if (one_->Ended(0)) return status;
    }
    return status;
  }

 private:
  static std::vector<Mesh::PeerPipes> Peers(int peer, UniqueFd control, UniqueFd data) {
    std::vector<Mesh::PeerPipes> peers(2);
    peers[peer] = {MakeTcpPipe(std::move(control)), MakeTcpPipe(std::move(data))};
    return peers;
  }
  void Relay() {
    if (pending_.empty()) {
      pending_.resize(50'000);
      size_t moved = 0;
      EXPECT_TRUE(from_zero_->Read(pending_, &moved).ok());
      pending_.resize(moved);
      if (tamper_ && moved > 0) tamper_(pending_, passed_);
      passed_ += moved;
    }
    size_t taken = 0;
    if (!pending_.empty() && to_one_) {
      EXPECT_TRUE(to_one_->Write(pending_, false, &taken).ok());
    }
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<ptrdiff_t>(taken));
  }

  const Tamper tamper_;
  Scheduler scheduler_;
  std::unique_ptr<Pipe> from_zero_;
  std::unique_ptr<Pipe> to_one_;
  Bytes pending_;
  size_t passed_ = 0;
  std::optional<Mesh> zero_;
  std::optional<Mesh> one_;
};

TEST(MeshOverTcp, DeliversWhatWasSent) {
  std::mt19937 random(2);
  TwoRanks ranks;
  uint64_t step = 0;
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{5000}, size_t{1} << 20}) {
    const Bytes sent = RandomBytes(bytes, &random);
    Bytes received(bytes);
    const Tag tag{.step = ++step};
    const Task<Status> send = ranks.zero().Send(1, tag, sent);
    Task<Status> receive = ranks.one().Recv(0, tag, received);
    ASSERT_TRUE(ranks.Drive(receive).ok());
    ASSERT_TRUE(receive.done());
    EXPECT_TRUE(receive.Take().ok());
    EXPECT_EQ(received, sent);
    ASSERT_TRUE(ranks.Drive(send).ok());
  }
}

TEST(MeshOverTcp, FailsWhenAByteOfThePayloadWasFlipped) {
  constexpr size_t kBytes = 200'000;
  constexpr size_t kHeader = 32;
  for (const size_t flipped : {kHeader, kHeader + 77'777, kHeader + kBytes - 1}) {
    std::mt19937 random(3);
    TwoRanks ranks([flipped](std::span<std::byte> piece, size_t before) {
      if (before <= flipped && flipped < before + piece.size())
        piece[flipped - before] ^= std::byte{0x10};
    });
    const Bytes sent = RandomBytes(kBytes, &random);
    Bytes received(kBytes);
    const Task<Status> send = ranks.zero().Send(1, Tag{.step = 1}, sent);
    const Task<Status> receive = ranks.one().Recv(0, Tag{.step = 1}, received);
    const Status status = ranks.Drive(receive);
    EXPECT_EQ(status.code(), StatusCode::kInternal);
    EXPECT_NE(status.message().find("checksum"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("rank 0"), std::string::npos) << status.message();
  }
}

TEST(MeshOverTcp, NeverDeliversAfterAFlippedByteOfTheHeader) {
  // The length, the checksum and the magic; a longer length waits for bytes that never come, which
  // time limits end.
  for (size_t flipped : {size_t{0}, size_t{24}, size_t{28}}) {
    std::mt19937 random(4);
    TwoRanks ranks([flipped](std::span<std::byte> piece, size_t before) {
      if (before <= flipped && flipped < before + piece.size())
        piece[flipped - before] ^= std::byte{0x08};
    });
    const Bytes sent = RandomBytes(1000, &random);
    Bytes received(1000);
    const Task<Status> send = ranks.zero().Send(1, Tag{.step = 1}, sent);
    const Task<Status> receive = ranks.one().Recv(0, Tag{.step = 1}, received);
    EXPECT_FALSE(ranks.Drive(receive).ok()) << flipped;
    EXPECT_FALSE(receive.done());
  }
}

TEST(MeshOverTcp, NamesTheRankWhoseConnectionBreaks) {
  TwoRanks ranks;
  ranks.CutOff();
  Bytes received(10);
  const Task<Status> receive = ranks.one().Recv(0, Tag{.step = 1}, received);
  const Bytes answer(8 << 20);
  const Task<Status> send = ranks.one().Send(0, Tag{.step = 1}, answer);
  const Status status = ranks.DriveToFailure();
  EXPECT_EQ(status.code(), StatusCode::kPeerLost);
  EXPECT_NE(status.message().find("rank 0"), std::string::npos) << status.message();
  EXPECT_FALSE(receive.done());
}

}  // namespace
}  // namespace bagua
