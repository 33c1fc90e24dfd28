// Groups of some of the ranks, which overlap and work side by side.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "common/runtime/engine.h"
#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"
#include "tests/cpp/plan_steps.h"

namespace bagua {
namespace {

class GroupsTest : public testing::TestWithParam<Fabric> {};

INSTANTIATE_TEST_SUITE_P(Fabrics, GroupsTest, EveryFabric(), NameOfFabric);

bool Holds(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

Status Remove(Engine* engine, uint32_t group) {
  Result<OperationPtr> operation = engine->RemoveGroup(group);
  if (!operation.ok()) return operation.status();
  return RunOne(engine, operation.value());
}

// An allreduce among `ranks`, under way until Check.
struct Started {
  std::vector<int> ranks;
  int seed;
  Bytes data;
  OperationPtr operation;

  Started(Engine* engine, uint32_t group, std::vector<int> members, const std::string& name,
          size_t count, int seed)
      : ranks(std::move(members)),
        seed(seed),
        data(ValuesOf(DType::kInt64, count, engine->rank(), seed)),
        operation(MakeAllreduce(name, DType::kInt64, &data, ReduceOp::kSum, group)) {
    ExpectOk(engine->Enqueue(operation));
  }
  void Check(Engine* engine) {
    ExpectOk(Await(engine, operation));
    ExpectReduced(data, DType::kInt64, ReduceOp::kSum, ranks, seed);
  }
};

// ---- Work ---------------------------------------------------------------------------------------

TEST_P(GroupsTest, NeighboursOfARingWorkInBothTheirGroupsAtOnce) {
  static constexpr int kSize = 4;
  static const std::vector<std::vector<int>> kSets = {{0, 1, 2, 3}, {0, 1}, {2, 3}, {1, 2}, {0, 3}};
  Cluster cluster(GetParam(), kSize);
  cluster.Run([](int rank, Engine& engine) {
    std::vector<uint32_t> own = {0};
    for (uint32_t number = 1; number < kSets.size(); ++number) {
      // In an order of the rank's own.
      std::vector<int> ranks = kSets[number];
      if (rank % 2 == 0) std::reverse(ranks.begin(), ranks.end());
      EXPECT_EQ(MustAddGroup(&engine, ranks), number);
      EXPECT_EQ(engine.GroupSize(number), 2);
      const auto place = std::find(kSets[number].begin(), kSets[number].end(), rank);
      const bool member = place != kSets[number].end();
      EXPECT_EQ(engine.GroupRank(number), member ? place - kSets[number].begin() : -1);
      if (member) own.push_back(number);
    }
    EXPECT_EQ(engine.GroupSize(0), kSize);
    EXPECT_EQ(engine.GroupRank(0), rank);
    EXPECT_EQ(engine.GroupSize(5), 0);
    EXPECT_EQ(engine.GroupRank(5), -1);
    for (int round = 0; round < 20; ++round) {
      // The same name in every group, submitted in an order of the rank's own.
      const size_t count = round % 4 == 3 ? 30011 : 100;
      std::vector<std::unique_ptr<Started>> started;
      for (size_t i = 0; i < own.size(); ++i) {
        const uint32_t group = own[(i + rank + round) % own.size()];
        started.push_back(std::make_unique<Started>(&engine, group, kSets[group], "same name",
                                                    count + group, 10 * round + group));
      }
      for (const auto& one : started) one->Check(&engine);
    }
  });
}

TEST_P(GroupsTest, NestedGroupsOfEverySizeGiveTheirOwnSums) {
  static constexpr int kSize = 4;
  Cluster cluster(GetParam(), kSize);
  cluster.Run([](int rank, Engine& engine) {
    // Group k holds the last kSize - k ranks.
    std::vector<std::vector<int>> groups = {RanksUpTo(kSize)};
    for (int k = 1; k < kSize; ++k) {
      groups.emplace_back(groups.back().begin() + 1, groups.back().end());
      EXPECT_EQ(MustAddGroup(&engine, groups.back()), static_cast<uint32_t>(k));
    }
    for (int round = 0; round < 5; ++round) {
      std::vector<std::unique_ptr<Started>> started;
      for (uint32_t g = 0; g < groups.size(); ++g)
        if (Holds(groups[g], rank))
          started.push_back(
              std::make_unique<Started>(&engine, g, groups[g], "", 77, 8 * round + g));
      for (const auto& one : started) one->Check(&engine);
    }
  });
}

TEST_P(GroupsTest, OperationsOfAGroupDoNotWaitForOthers) {
  Cluster cluster(GetParam(), 4);
  cluster.Run([](int rank, Engine& engine) {
    const uint32_t pair = MustAddGroup(&engine, {0, 1});
    const uint32_t other = MustAddGroup(&engine, {2, 3});
    // Rank 2 submits to neither of its groups until the pair is through.
    std::unique_ptr<Started> all, theirs;
    if (rank != 2) all = std::make_unique<Started>(&engine, 0, RanksUpTo(4), "all", 50000, 1);
    if (rank == 3)
      theirs = std::make_unique<Started>(&engine, other, std::vector<int>{2, 3}, "all", 50000, 2);
    if (rank < 2)
      for (int i = 0; i < 5; ++i) Started(&engine, pair, {0, 1}, "pair", 50000, i).Check(&engine);
    ExpectOk(RunOne(&engine, MakeBarrier("pair is through")));
    if (rank == 2) {
      all = std::make_unique<Started>(&engine, 0, RanksUpTo(4), "all", 50000, 1);
      theirs = std::make_unique<Started>(&engine, other, std::vector<int>{2, 3}, "all", 50000, 2);
    }
    all->Check(&engine);
    if (theirs) theirs->Check(&engine);
  });
}

TEST_P(GroupsTest, RootsAndSplitsAreOfTheGroup) {
  Cluster cluster(GetParam(), 4);
  cluster.Run([](int rank, Engine& engine) {
    const std::vector<int> odd = {1, 3};
    const uint32_t group = MustAddGroup(&engine, odd);
    if (rank % 2 == 0) return;
    Bytes data = ValuesOf(DType::kInt16, 9, rank, 4);
    const OperationPtr broadcast = MakeOperation(Kind::kBroadcast, "from 3", group);
    broadcast->request.root = 3;
    AddTensor(broadcast.get(), MetaOf(DType::kInt16, {9}), data, &data);
    ExpectOk(RunOne(&engine, broadcast));
    EXPECT_EQ(data, ValuesOf(DType::kInt16, 9, 3, 4));
    const OperationPtr alltoall = MakeOperation(Kind::kAlltoall, "exchange", group);
    AddTensor(alltoall.get(), MetaOf(DType::kInt16, {9}), data);
    alltoall->request.splits = rank == 1 ? std::vector<int64_t>{7, 2} : std::vector<int64_t>{4, 5};
    ExpectOk(RunOne(&engine, alltoall));
    EXPECT_EQ(alltoall->received_splits,
              rank == 1 ? (std::vector<int64_t>{7, 4}) : (std::vector<int64_t>{2, 5}));
    const OperationPtr outside = MakeOperation(Kind::kBroadcast, "from 2", group);
    outside->request.root = 2;
    AddTensor(outside.get(), MetaOf(DType::kInt16, {9}), data, &data);
    ExpectFails(engine.Enqueue(outside), StatusCode::kInvalidArgument,
                {"root_rank 2", "process set 1 (ranks 1, 3)"});
  });
}

TEST_P(GroupsTest, OfSomeRanksAreClosedToTheOthers) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    const uint32_t group = MustAddGroup(&engine, {2, 0});
    for (const Kind kind : {Kind::kBarrier, Kind::kAllreduce}) {
      Bytes data = ValuesOf(DType::kInt8, 5, rank, 1);
      const OperationPtr operation =
          kind == Kind::kBarrier
              ? MakeBarrier("theirs", group)
              : MakeAllreduce("theirs", DType::kInt8, &data, ReduceOp::kSum, group);
      if (rank == 1)
        ExpectFails(engine.Enqueue(operation), StatusCode::kInvalidArgument,
                    {"'theirs'", "rank 1 is not in process set 1 (ranks 0, 2)"});
      else
        ExpectOk(RunOne(&engine, operation));
    }
    ExpectFails(engine.Enqueue(MakeBarrier("nowhere", 9)), StatusCode::kInvalidArgument,
                {"barrier 'nowhere'", "no process set 9"});
  });
}

// ---- Adding -------------------------------------------------------------------------------------

TEST_P(GroupsTest, RefusesRanksThatMakeNoGroup) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int, Engine& engine) {
    const auto refuse = [&engine](const std::vector<int>& ranks, const std::string& part) {
      ExpectFails(engine.AddGroup(ranks).status(), StatusCode::kInvalidArgument,
                  {"add_process_set", part});
    };
    refuse({}, "at least one rank");
    refuse({2, 0, 2}, "rank 2 is given twice");
    refuse({-1, 0, 1}, "no rank -1");
    refuse({0, 1, 3}, "no rank 3; ranks are 0 to 2");
    // A refusal takes no number.
    const uint32_t group = MustAddGroup(&engine, {0, 1, 2});
    EXPECT_EQ(group, 1u);
    Started(&engine, group, {0, 1, 2}, "afterwards", 10, 2).Check(&engine);
  });
}

TEST_P(GroupsTest, ListsThatDifferAreToldToEveryRankAndTakeNoNumber) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    for (int round = 0; round < 2; ++round) {
      Result<OperationPtr> add =
          engine.AddGroup(rank == 2 ? std::vector<int>{1, 2} : std::vector<int>{0, 1});
      ExpectOk(add.status());
      ExpectFails(RunOne(&engine, add.value()), StatusCode::kMismatch,
                  {"add_process_set", "rank 2 sent ranks 1, 2", "rank 0 sent ranks 0, 1"});
    }
    EXPECT_EQ(MustAddGroup(&engine, {0, 1}), 1u);
    Result<OperationPtr> change = rank == 0 ? engine.RemoveGroup(1) : engine.AddGroup({2});
    ExpectOk(change.status());
    ExpectFails(RunOne(&engine, change.value()), StatusCode::kMismatch,
                {"sent add_process_set", "sent remove_process_set"});
    if (rank < 2) Started(&engine, 1, {0, 1}, "still there", 100, 3).Check(&engine);
  });
}

TEST_P(GroupsTest, AreAddedOnceTheLastRankAsks) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    Result<OperationPtr> add = engine.AddGroup({0, 1});
    if (rank != 2) {
      ExpectOk(engine.Enqueue(add.value()));
      EXPECT_FALSE(engine.Wait(*add.value(), After(Seconds(0.01))));
      Result<OperationPtr> again = engine.AddGroup({0});
      ExpectFails(engine.Enqueue(again.value()), StatusCode::kInvalidArgument,
                  {"add_process_set", "in flight already"});
    }
    // Others are not held up meanwhile.
    ExpectOk(RunAllreduce(&engine, "between", 100, 1));
    if (rank == 2) ExpectOk(engine.Enqueue(add.value()));
    ExpectOk(Await(&engine, add.value()));
    EXPECT_EQ(add.value()->added, 1u);
  });
}

// ---- Removal ------------------------------------------------------------------------------------

TEST_P(GroupsTest, ComeAndGoWithoutEverReusingANumber) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    for (uint32_t round = 1; round <= 12; ++round) {
      const std::vector<int> ranks = round % 3 == 0   ? std::vector<int>{0, 1, 2}
                                     : round % 3 == 1 ? std::vector<int>{1, 2}
                                                      : std::vector<int>{0};
      const uint32_t group = MustAddGroup(&engine, ranks);
      EXPECT_EQ(group, round);
      if (Holds(ranks, rank))
        for (int i = 0; i < 3; ++i)
          Started(&engine, group, ranks, i == 2 ? "" : "named", 9000 * i + 5, i).Check(&engine);
      ExpectOk(Remove(&engine, group));
      EXPECT_EQ(engine.GroupSize(group), 0);
      ExpectFails(engine.Enqueue(MakeBarrier("late", group)), StatusCode::kInvalidArgument,
                  {"barrier 'late'", StrCat("no process set ", group), "removed"});
      ExpectFails(Remove(&engine, group), StatusCode::kInvalidArgument,
                  {StrCat("no process set ", group)});
    }
    ExpectFails(Remove(&engine, 0), StatusCode::kInvalidArgument, {"cannot be removed"});
    ExpectOk(RunAllreduce(&engine, "everyone", 100, 1));
  });
}

TEST_P(GroupsTest, StayWhileARankHasOperationsInFlight) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    const uint32_t group = MustAddGroup(&engine, {0, 2});
    std::unique_ptr<Started> named, unnamed;
    if (rank == 2) {
      named = std::make_unique<Started>(&engine, group, std::vector<int>{0, 2}, "mine", 100, 1);
      unnamed = std::make_unique<Started>(&engine, group, std::vector<int>{0, 2}, "", 100, 2);
    }
    ExpectFails(Remove(&engine, group), StatusCode::kMismatch,
                {"remove_process_set", "process set 1 (ranks 0, 2)", "allreduce 'mine' on rank 2",
                 "allreduce (unnamed, number 1) on rank 2"});
    if (rank == 0) {
      named = std::make_unique<Started>(&engine, group, std::vector<int>{0, 2}, "mine", 100, 1);
      unnamed = std::make_unique<Started>(&engine, group, std::vector<int>{0, 2}, "", 100, 2);
    }
    if (named) named->Check(&engine);
    if (unnamed) unnamed->Check(&engine);
    ExpectOk(Remove(&engine, group));
  });
}

TEST_P(GroupsTest, TakeNothingMoreOnceTheirRemovalIsAskedFor) {
  Cluster cluster(GetParam(), 2);
  cluster.Run([](int rank, Engine& engine) {
    const uint32_t group = MustAddGroup(&engine, {0, 1});
    Result<OperationPtr> removal = engine.RemoveGroup(group);
    ExpectOk(removal.status());
    if (rank == 0) {
      ExpectOk(engine.Enqueue(removal.value()));
      ExpectFails(engine.Enqueue(MakeBarrier("late", group)), StatusCode::kInvalidArgument,
                  {"barrier 'late'", "process set 1 (ranks 0, 1) is being removed"});
    }
    ExpectOk(RunOne(&engine, MakeBarrier("asked for")));
    if (rank == 1) ExpectOk(engine.Enqueue(removal.value()));
    ExpectOk(Await(&engine, removal.value()));
  });
}

TEST_P(GroupsTest, EndTheirPlansWithThem) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    const uint32_t group = MustAddGroup(&engine, {1, 2});
    PlanPtr plan;
    PlanOptions options = MixedOptions("pair");
    options.group = group;
    if (rank != 0) {
      plan = MustRegister(&engine, options);
      FillAll(&engine, plan.get(), 1);
      ExpectOk(engine.FinishStep(plan.get(), Patience()));
    }
    if (rank == 2) FillAll(&engine, plan.get(), 2);
    ExpectFails(Remove(&engine, group), StatusCode::kMismatch,
                {"plan 'pair', step 2, bucket 0", "on rank 2"});
    if (rank == 1) FillAll(&engine, plan.get(), 2);
    if (rank != 0) {
      ExpectOk(engine.FinishStep(plan.get(), Patience()));
      ExpectAll(*plan, ReduceOp::kAverage, {1, 2}, 2);
    }
    ExpectOk(Remove(&engine, group));
    if (rank != 0) {
      const std::vector<std::string> parts = {"plan 'pair'", "process set 1", "was removed"};
      ExpectFails(engine.MakeReady(plan.get(), 0), StatusCode::kInvalidArgument, parts);
      ExpectFails(engine.FinishStep(plan.get(), Patience()), StatusCode::kInvalidArgument, parts);
      // The framework's views keep their values.
      ExpectAll(*plan, ReduceOp::kAverage, {1, 2}, 2);
      engine.DropPlan(plan.get());
    }
    ExpectOk(RunAllreduce(&engine, "everyone", 100, 1));
  });
}

}  // namespace
}  // namespace bagua
