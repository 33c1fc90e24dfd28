// Ranks meet, connect, and name each other when they do not.
#include "common/transport/bootstrap.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/rendezvous_fixture.h"

namespace bagua::rendezvous_test {
namespace {

class BootstrapTest : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  bool tcp() const { return std::get<1>(GetParam()); }
};

TEST_P(BootstrapTest, ConnectsEveryPairInOneRoundAfterTheOther) {
  const int before = OpenDescriptors();
  {
    Job job(size(), tcp());
    for (int round = 0; round < 2; ++round) {
      std::vector<Outcome> outcomes = RunAll(job, size());
      ExpectConnected(&outcomes, tcp());
    }
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_P(BootstrapTest, MixesHostsAndChoosesUnixSocketsInsideEach) {
  Job job(size(), false);
  std::vector<BootstrapOptions> options;
  for (int rank = 0; rank < size(); ++rank) {
    options.push_back(job.OptionsOf(rank));
    options.back().self.host_id = rank % 2 == 0 ? "even" : "odd";
  }
  std::vector<Outcome> outcomes = Ranks(std::move(options)).Take();
  for (int rank = 0; rank < size(); ++rank) {
    ASSERT_TRUE(outcomes[rank].ok()) << outcomes[rank].status().message();
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank) continue;
      const PeerLink& link = outcomes[rank].value().links[peer];
      EXPECT_EQ(link.local, (rank + peer) % 2 == 0);
      EXPECT_EQ(link.data.valid(), !link.local);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, BootstrapTest,
                         testing::Combine(testing::Values(1, 2, 3, 4, 7), testing::Bool()));

TEST(BootstrapFailure, NamesTheRanksThatNeverCame) {
  Job job(5);
  std::vector<Outcome> outcomes =
      Ranks({job.OptionsOf(0, 0.3), job.OptionsOf(3, 5), job.OptionsOf(2, 5)}).Take();
  for (const Outcome& outcome : outcomes)
    ExpectFailure(outcome, StatusCode::kTimeout,
                  {"0.3 s for ranks 1, 4,", "never came", "BAGUA_START_TIMEOUT_SECONDS"});
}

TEST(BootstrapFailure, NamesTheStoreThatIsNotThere) {
  Job job(2);
  BootstrapOptions options = job.OptionsOf(0, 0.3);
  job.StopStore();
  ExpectFailure(Bootstrap(std::move(options)), StatusCode::kTimeout,
                {job.address(), "Connection refused", "BAGUA_START_TIMEOUT_SECONDS"});
}

TEST(BootstrapFailure, RefusesAnAddressThatIsNone) {
  Job job(2);
  BootstrapOptions options = job.OptionsOf(0);
  options.rendezvous = "nowhere";
  ExpectFailure(Bootstrap(std::move(options)), StatusCode::kInvalidArgument, {"'nowhere'"});
  options = job.OptionsOf(0);
  options.secret.resize(15);
  ExpectFailure(Bootstrap(std::move(options)), StatusCode::kInvalidArgument,
                {"15 bytes", "BAGUA_SECRET_FILE"});
  options = job.OptionsOf(0);
  options.rank = 2;
  ExpectFailure(Bootstrap(std::move(options)), StatusCode::kInvalidArgument, {"rank 2", "size 2"});
}

TEST(Bootstrap, WaitsForAStoreThatStartsLater) {
  int port = 0;
  {
    Job other(2);
    port = other.port();
  }
  Job job(2);
  std::vector<BootstrapOptions> options = {job.OptionsOf(0), job.OptionsOf(1)};
  for (BootstrapOptions& option : options) option.rendezvous = StrCat("127.0.0.1:", port);
  std::atomic<int> asked{0};
  options[0].interrupted = [&asked] { return ++asked, false; };
  Ranks ranks(std::move(options));
  while (asked < 3) std::this_thread::yield();
  Result<std::unique_ptr<StoreServer>> store = StoreServer::Start("127.0.0.1", port, 2, Secret());
  ASSERT_TRUE(store.ok()) << store.status().message();
  for (const Outcome& outcome : ranks.Take())
    EXPECT_TRUE(outcome.ok()) << outcome.status().message();
}

TEST(BootstrapFailure, ReportLostFailsTheWaitingRanksAtOnceAndEveryLaterRound) {
  Job job(3);
  Ranks ranks({job.OptionsOf(0), job.OptionsOf(2)});
  const Deadline reported = Clock::now();
  job.store().ReportLost(1, "exited with code 3");
  for (const Outcome& outcome : ranks.Take())
    ExpectFailure(outcome, StatusCode::kPeerLost, {"rank 1", "exited with code 3"});
  EXPECT_LT(ranks.SecondsSince(reported), 1.0);
  for (const Outcome& outcome : RunAll(job, 2))
    ExpectFailure(outcome, StatusCode::kPeerLost, {"rank 1", "exited with code 3"});
}

TEST(BootstrapFailure, ARankThatEndsAfterItsRoundFailsTheNextOneAlone) {
  Job job(2);
  std::vector<Outcome> outcomes = RunAll(job, 2);
  ExpectConnected(&outcomes, false);
  job.store().ReportLost(0, "exited with code 0");
  job.store().ReportLost(77, "is none of the ranks");
  ExpectFailure(Bootstrap(job.OptionsOf(1)), StatusCode::kPeerLost, {"rank 0"});
}

class RankDies : public testing::TestWithParam<int> {};

// The rank hangs up: 0 after the handshake, 1 after its report, 2 after the table, 3 when it has
// connected to all, 4 with garbage in place of a report.
TEST_P(RankDies, InInitAndEveryOtherRankNamesIt) {
  const int moment = GetParam();
  Job job(3);
  HandRank doomed(job, 1);
  ASSERT_TRUE(doomed.status().ok()) << doomed.status().message();
  if (moment >= 1 && moment <= 3) doomed.Report(3);
  Ranks ranks({job.OptionsOf(0), job.OptionsOf(2)});
  Membership membership;
  if (moment == 2) doomed.HearTable();
  if (moment == 3) membership = doomed.ConnectAll(doomed.HearTable(), false);
  const Deadline death = Clock::now();
  if (moment == 4) doomed.channel().Post(StoreWord::kReport, Bytes(7, std::byte{1}));
  if (moment != 4) doomed.Hang();
  for (const Outcome& outcome : ranks.Take())
    ExpectFailure(outcome, StatusCode::kPeerLost, {"rank 1"});
  EXPECT_LT(ranks.SecondsSince(death), 1.0);
}

INSTANTIATE_TEST_SUITE_P(Moments, RankDies, testing::Range(0, 5));

TEST(BootstrapFailure, AnotherSecretSaysHowToGiveOneAndIsHintedAtToTheOthers) {
  Job job(2);
  BootstrapOptions wrong = job.OptionsOf(1);
  wrong.secret = Secret(9);
  ExpectFailure(Bootstrap(std::move(wrong)), StatusCode::kInvalidArgument,
                {"secret differs", "BAGUA_SECRET_FILE"});
  ExpectFailure(Bootstrap(job.OptionsOf(0, 0.2)), StatusCode::kTimeout,
                {"rank 1,", "as rank 1 did not pass the handshake"});
}

TEST(BootstrapFailure, ARankGivenTwiceIsNamedWithBothProcesses) {
  Job job(3);
  HandRank first(job, 1);
  first.Report(3);
  Ranks ranks({job.OptionsOf(0), job.OptionsOf(1)});
  for (const Outcome& outcome : ranks.Take())
    ExpectFailure(outcome, StatusCode::kInvalidArgument,
                  {"rank 1 was given twice", StrCat("pid ", ::getpid(), " on host testhost")});
}

TEST(BootstrapFailure, ADifferentSizeIsNamedWithBothValues) {
  Job job(2);
  BootstrapOptions wrong = job.OptionsOf(2);
  wrong.size = 3;
  for (const Outcome& outcome : Ranks({job.OptionsOf(0), wrong}).Take())
    ExpectFailure(outcome, StatusCode::kInvalidArgument, {"rank 2", "size 3", "2 ranks"});
}

TEST(BootstrapFailure, ADifferentTransportIsNamedWithBothRanks) {
  Job job(2);
  BootstrapOptions other = job.OptionsOf(1);
  other.tcp_everywhere = true;
  for (const Outcome& outcome : Ranks({job.OptionsOf(0), other}).Take())
    ExpectFailure(outcome, StatusCode::kMismatch,
                  {"BAGUA_TRANSPORT", "rank 0", "rank 1", "tcp", "auto"});
}

TEST(BootstrapFailure, AnInterruptedRankIsLostToTheOthers) {
  Job job(3);
  BootstrapOptions options = job.OptionsOf(1);
  // Once only, as Python's pending signals are told once.
  options.interrupted = [asked = 0]() mutable { return ++asked == 3; };
  const Deadline start = Clock::now();
  Ranks ranks({job.OptionsOf(0), options});
  std::vector<Outcome> outcomes = ranks.Take();
  ExpectFailure(outcomes[0], StatusCode::kPeerLost, {"rank 1", "interrupted"});
  ExpectFailure(outcomes[1], StatusCode::kAborted, {"interrupted"});
  EXPECT_LT(ranks.SecondsSince(start), 1.0);
}

TEST(BootstrapFailure, AnUnreachableRankIsNamedWithItsAddressOnEveryRank) {
  Job job(3, true);
  HandRank deaf(job, 0);
  deaf.Report(3, true);
  std::vector<Outcome> outcomes = Ranks({job.OptionsOf(1, 0.4), job.OptionsOf(2, 0.4)}).Take();
  for (const Outcome& outcome : outcomes)
    ExpectFailure(outcome, StatusCode::kTimeout, {"could not connect to rank 0 at 127.0.0.1:"});
}

TEST(BootstrapFailure, AStoreThatStopsIsNamed) {
  Job job(2);
  BootstrapOptions options = job.OptionsOf(0);
  std::atomic<int> asked{0};
  options.interrupted = [&asked] { return ++asked, false; };
  Ranks ranks({options});
  while (asked < 3) std::this_thread::yield();
  job.StopStore();
  ExpectFailure(ranks.Take()[0], StatusCode::kPeerLost, {"rendezvous store", "rank 0"});
}

class ListenersTest : public testing::TestWithParam<bool> {};

TEST_P(ListenersTest, ConnectAmongGarbageConnections) {
  const bool tcp = GetParam();
  Job job(3, tcp);
  HandRank last(job, 2);
  last.Report(3, tcp);
  Ranks ranks({job.OptionsOf(0), job.OptionsOf(1)});
  const RoundTable table = last.HearTable();
  Noise noise(3);
  for (int i = 0; i < 200; ++i)
    for (int rank = 0; rank < 2; ++rank) {
      const Member& member = table.members[rank];
      noise.Throw(Resolve(ParseHostPort(member.address).value()).value().front());
      if (!tcp) noise.Throw(UnixAddress(member.unix_name));
    }
  Membership membership = last.ConnectAll(table, tcp);
  last.channel().Post(StoreWord::kConnected);
  std::vector<Outcome> outcomes = ranks.Take();
  outcomes.emplace_back(std::move(membership));
  for (Member& member : outcomes.back().value().members) member.framework = "test";
  for (Outcome& outcome : outcomes)
    if (outcome.ok()) outcome.value().members[2].framework = "test";
  ExpectConnected(&outcomes, tcp);
}

INSTANTIATE_TEST_SUITE_P(Transports, ListenersTest, testing::Bool());

Member At(int rank, const string& address) {
  Member member;
  member.rank = rank;
  member.address = address;
  return member;
}

TEST(Connects, IsAnsweredOppositelyByBothSides) {
  const std::vector<Member> members = {At(0, "127.0.0.1:1"), At(1, "10.0.0.1:1"), At(2, "[::1]:1"),
                                       At(3, "10.0.0.2:1"), At(4, "junk")};
  for (const Member& a : members)
    for (const Member& b : members)
      for (const bool local : {false, true})
        EXPECT_EQ(Connects(a, b, local), a.rank != b.rank && !Connects(b, a, local));
  EXPECT_TRUE(Connects(members[0], members[1], false)) << "nobody else can reach rank 0";
  EXPECT_TRUE(Connects(members[1], members[0], true));
  EXPECT_TRUE(Connects(members[3], members[1], false));
}

TEST(DefaultHostId, IsTheSameEveryTimeAndNotEmpty) {
  EXPECT_EQ(DefaultHostId(), DefaultHostId());
  EXPECT_GT(DefaultHostId().size(), 10u);
}

}  // namespace
}  // namespace bagua::rendezvous_test
