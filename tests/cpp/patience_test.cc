// Waits that last too long are told of, and end.
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "common/runtime/engine.h"
#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"
#include "tests/cpp/plan_steps.h"

namespace bagua {
namespace {

PlanOptions TwoBuckets() {
  return OptionsOf("model", {{DType::kFloat32, 500}, {DType::kFloat64, 70}});
}

Config Limits(double warning, double timeout) {
  Config config = UnwatchedConfig();
  config.stall_warning_seconds = warning;
  config.timeout_seconds = timeout;
  return config;
}

class PatienceTest : public testing::TestWithParam<Fabric> {};
INSTANTIATE_TEST_SUITE_P(Fabrics, PatienceTest, EveryFabric(), NameOfFabric);

TEST_P(PatienceTest, TimesOutWhenOneRankNeverSubmitsAndTheJobGoesOn) {
  Cluster cluster(GetParam(), 3, Limits(0, kSanitized ? 2 : 0.5));
  cluster.Run([](int rank, Engine& engine) {
    const std::string waited = StrCat("waited ", engine.config().timeout_seconds, " s");
    if (rank != 1)
      ExpectFails(RunAllreduce(&engine, "fc.weight", 10, 1), StatusCode::kTimeout,
                  {"allreduce 'fc.weight'", waited, "for rank 1 (never submitted it)",
                   "BAGUA_TIMEOUT_SECONDS"});
    // Late, it waits for the others.
    if (rank == 1)
      ExpectFails(RunAllreduce(&engine, "fc.bias", 10, 1), StatusCode::kTimeout,
                  {"allreduce 'fc.bias'", waited, "for ranks 0, 2"});
  });
  cluster.Run([](int, Engine& engine) {
    for (int i = 0; i < 3; ++i) ExpectOk(RunAllreduce(&engine, "fc.weight", 10, i));
  });
}

TEST_P(PatienceTest, AnUnnamedOperationThatTimedOutFailsForTheLateRankTooAndTheNextOnesMatch) {
  Cluster cluster(GetParam(), 3, Limits(0, kSanitized ? 2 : 0.5));
  const std::vector<std::string> parts = {"number 1", "for rank 1 (never submitted it)"};
  cluster.Run([&](int rank, Engine& engine) {
    if (rank != 1) ExpectFails(RunAllreduce(&engine, "", 10, 1), StatusCode::kTimeout, parts);
  });
  cluster.Run([&](int rank, Engine& engine) {
    if (rank == 1) ExpectFails(RunAllreduce(&engine, "", 10, 1), StatusCode::kTimeout, parts);
  });
  cluster.Run([](int, Engine& engine) {
    for (int i = 0; i < 3; ++i) ExpectOk(RunAllreduce(&engine, "", 10, i));
  });
}

TEST_P(PatienceTest, TimesOutAPlanThatOneRankDoesNotFillNamingBucketAndRank) {
  Cluster cluster(GetParam(), 2, Limits(0, kSanitized ? 2 : 0.5));
  cluster.Run([](int rank, Engine& engine) {
    const PlanPtr plan = MustRegister(&engine, TwoBuckets());
    if (rank == 0)
      ExpectFails(
          engine.FinishStep(plan.get(), Patience()), StatusCode::kTimeout,
          {"plan 'model'", "step 1, bucket 0 of 2", "'p0'", "for rank 1", "BAGUA_TIMEOUT_SECONDS"});
    else
      while (engine.MakeReady(plan.get(), 1).code() != StatusCode::kTimeout)
        engine.Wait(*MakeBarrier("never submitted"), After(Seconds(0.01)));
    ExpectFails(RunOne(&engine, MakeBarrier("afterwards")), StatusCode::kTimeout,
                {"plan 'model'", "for rank 1"});
  });
}

// Lines that a rank logged.
class Lines {
 public:
  void Add(int rank, const std::string& line) {
    std::lock_guard lock(mutex_);
    if (rank == 0)
      lines_.push_back(line);
    else
      ADD_FAILURE() << "rank " << rank << " logged " << line;
    added_.notify_all();
  }
  void Await(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(added_.wait_until(lock, Patience(), [&] { return lines_.size() >= count; }));
  }
  std::vector<std::string> lines() {
    std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable added_;
  std::vector<std::string> lines_;
};

TEST_P(PatienceTest, WarnsOnceOfAnOperationThatSomeRanksSubmitted) {
  Lines lines;
  Cluster cluster(GetParam(), 3, Limits(0.5, 0),
                  [&](int rank, const std::string& line) { lines.Add(rank, line); });
  cluster.Run([&](int rank, Engine& engine) {
    if (rank == 1) lines.Await(1);
    ExpectOk(RunAllreduce(&engine, "late", 10, 1));
    if (rank == 1) lines.Await(2);
    ExpectOk(RunAllreduce(&engine, "late again", 10, 1));
  });
  ASSERT_EQ(lines.lines().size(), 2u);
  for (int i = 0; i < 2; ++i) {
    const std::string line = lines.lines()[i];
    EXPECT_NE(line.find(i == 0 ? "allreduce 'late' waits" : "allreduce 'late again' waits"),
              std::string::npos)
        << line;
    EXPECT_NE(line.find("for rank 1, which did not submit it"), std::string::npos) << line;
  }
}

TEST_P(PatienceTest, WarnsOnceOfAPlanThatWaitsForARank) {
  Lines lines;
  Cluster cluster(GetParam(), 2, Limits(0.5, 0),
                  [&](int rank, const std::string& line) { lines.Add(rank, line); });
  cluster.Run([&](int rank, Engine& engine) {
    const PlanPtr plan = MustRegister(&engine, TwoBuckets());
    if (rank == 1) lines.Await(1);
    ExpectOk(engine.FinishStep(plan.get(), Patience()));
  });
  ASSERT_EQ(lines.lines().size(), 1u);
  EXPECT_NE(lines.lines()[0].find("plan 'model', step 1, bucket 0"), std::string::npos);
  EXPECT_NE(lines.lines()[0].find("for rank 1"), std::string::npos) << lines.lines()[0];
}

}  // namespace
}  // namespace bagua
