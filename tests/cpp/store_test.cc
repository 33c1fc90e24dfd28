// The store among strangers, hostile ranks and failed rounds.
#include "common/transport/store.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/rendezvous_fixture.h"

namespace bagua::rendezvous_test {
namespace {

TEST(StoreServer, RefusesWhatItCannotServe) {
  EXPECT_EQ(StoreServer::Start("127.0.0.1", 0, 0, Secret()).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(StoreServer::Start("127.0.0.1", 0, 2, Bytes(3)).status().code(),
            StatusCode::kInvalidArgument);
  Job job(2);
  const Status taken = StoreServer::Start("127.0.0.1", job.port(), 2, Secret()).status();
  EXPECT_EQ(taken.code(), StatusCode::kInternal);
  EXPECT_TRUE(Contains(taken.message(), job.address())) << taken.message();
}

TEST(StoreServer, EndsWithCallersInEveryStage) {
  auto job = std::make_unique<Job>(3);
  const UniqueFd stranger = HandRank::ConnectTo(job->port());
  HandRank proved(*job, 0);
  HandRank reported(*job, 1);
  reported.Report(3);
  job->StopStore();
  const std::optional<StoreMessage> told = reported.Hear();
  ASSERT_TRUE(told);
  EXPECT_EQ(DecodeFailure(told->payload).code(), StatusCode::kPeerLost);
  EXPECT_FALSE(proved.Hear());
}

TEST(StoreServer, DropsARankThatPromisesTooMuch) {
  Job job(2);
  HandRank hostile(job, 1);
  Writer frame;
  frame.Put(uint32_t{0xffffffff});
  frame.Put(StoreWord::kReport);
  const Bytes bytes = frame.Take();
  ASSERT_EQ(::send(hostile.channel().fd(), bytes.data(), bytes.size(), 0), 5);
  EXPECT_FALSE(hostile.Hear());
  ExpectFailure(Bootstrap(job.OptionsOf(0)), StatusCode::kPeerLost, {"rank 1", "4294967295"});
}

TEST(StoreServer, ServesRanksAmongGarbageConnections) {
  Job job(4);
  const SocketAddress address = Resolve({"127.0.0.1", job.port()}).value().front();
  Noise before(1);
  for (int i = 0; i < 200; ++i) before.Throw(address);
  std::atomic<bool> stop{false};
  std::thread thrower([&] {
    Noise during(2);
    while (!stop) during.Throw(address);
  });
  for (int round = 0; round < 3; ++round) {
    std::vector<Outcome> outcomes = RunAll(job, 4);
    ExpectConnected(&outcomes, false);
  }
  stop = true;
  thrower.join();
}

TEST(StoreServer, TellsAFailedRoundToLateRanksTooAndStartsAnewWithARetry) {
  Job job(3);
  {
    HandRank doomed(job, 1);
    doomed.Report(3);
    HandRank first(job, 0);
    first.Report(3);
    doomed.Hang();
    const std::optional<StoreMessage> told = first.Hear();
    ASSERT_TRUE(told);
    EXPECT_EQ(told->word, StoreWord::kFailed);
  }
  ExpectFailure(Bootstrap(job.OptionsOf(2)), StatusCode::kPeerLost, {"rank 1"});
  std::vector<Outcome> outcomes = RunAll(job, 3);
  ExpectConnected(&outcomes, false);
}

}  // namespace
}  // namespace bagua::rendezvous_test
