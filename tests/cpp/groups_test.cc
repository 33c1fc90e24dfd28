// Groups of some of the ranks, which overlap and work side by side.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/runtime/engine.h"
#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"

namespace bagua {
namespace {

class GroupsTest : public testing::TestWithParam<Fabric> {};

INSTANTIATE_TEST_SUITE_P(Fabrics, GroupsTest, EveryFabric(), NameOfFabric);

uint32_t Add(Engine* engine, const std::vector<int>& ranks) {
  Result<uint32_t> group = engine->AddGroup(ranks, Patience());
  ExpectOk(group.status());
  return group.ok() ? group.value() : 0;
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

TEST_P(GroupsTest, NeighboursOfARingWorkInBothTheirGroupsAtOnce) {
  static constexpr int kSize = 4;
  Cluster cluster(GetParam(), kSize);
  cluster.Run([](int rank, Engine& engine) {
    // {0, 1} and {2, 3} have one number, {1, 2} and {0, 3} the next.
    std::vector<int> first = rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
    std::vector<int> second =
        rank == 1 || rank == 2 ? std::vector<int>{1, 2} : std::vector<int>{0, 3};
    EXPECT_EQ(Add(&engine, first), 1u);
    EXPECT_EQ(Add(&engine, second), 2u);
    EXPECT_EQ(engine.GroupSize(1), 2);
    EXPECT_EQ(engine.GroupSize(0), kSize);
    EXPECT_EQ(engine.GroupSize(3), 0);
    for (int round = 0; round < 20; ++round) {
      // The same name in every group, submitted in an order of the rank's own.
      const size_t count = round % 4 == 3 ? 30011 : 100;
      std::vector<std::unique_ptr<Started>> started;
      for (int i = 0; i < 3; ++i) {
        const int which = (i + rank + round) % 3;
        const std::vector<int> members = which == 0   ? RanksUpTo(kSize)
                                         : which == 1 ? first
                                                      : second;
        started.push_back(std::make_unique<Started>(&engine, which, members, "same name",
                                                    count + which, 10 * round + which));
      }
      for (const auto& one : started) one->Check(&engine);
    }
  });
}

TEST_P(GroupsTest, NestedGroupsOfEverySizeGiveTheirOwnSums) {
  static constexpr int kSize = 4;
  Cluster cluster(GetParam(), kSize);
  cluster.Run([](int rank, Engine& engine) {
    // Group k holds the last kSize - k ranks; a rank is in the groups up to its own number, so that
    // numbers agree.
    std::vector<std::vector<int>> groups = {RanksUpTo(kSize)};
    for (int k = 1; k <= rank; ++k) {
      std::vector<int> members;
      for (int r = k; r < kSize; ++r) members.push_back(r);
      EXPECT_EQ(Add(&engine, members), static_cast<uint32_t>(k));
      groups.push_back(members);
    }
    for (int round = 0; round < 5; ++round) {
      std::vector<std::unique_ptr<Started>> started;
      for (uint32_t g = 0; g < groups.size(); ++g)
        started.push_back(std::make_unique<Started>(&engine, g, groups[g], "", 77, 8 * round + g));
      for (const auto& one : started) one->Check(&engine);
    }
  });
}

TEST_P(GroupsTest, OperationsOfAGroupDoNotWaitForOthers) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    if (rank < 2) {
      const uint32_t pair = Add(&engine, {0, 1});
      // Rank 2 does not submit this one until the pair is through.
      Started all(&engine, 0, {0, 1, 2}, "all", 50000, 1);
      for (int i = 0; i < 5; ++i) Started(&engine, pair, {0, 1}, "pair", 50000, i).Check(&engine);
      ExpectOk(RunOne(&engine, MakeBarrier("pair is through")));
      all.Check(&engine);
    } else {
      ExpectOk(RunOne(&engine, MakeBarrier("pair is through")));
      Started(&engine, 0, {0, 1, 2}, "all", 50000, 1).Check(&engine);
    }
  });
}

TEST_P(GroupsTest, RootsAndSplitsAreOfTheGroup) {
  Cluster cluster(GetParam(), 4);
  cluster.Run([](int rank, Engine& engine) {
    if (rank % 2 == 0) return;
    const std::vector<int> odd = {1, 3};
    const uint32_t group = Add(&engine, odd);
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
    ExpectFails(engine.Enqueue(outside), StatusCode::kInvalidArgument, {"root_rank 2"});
  });
}

TEST_P(GroupsTest, RefusesRanksThatMakeNoGroup) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    for (const std::vector<int>& ranks :
         {std::vector<int>{}, {1, 0}, {0, 0, 1, 2}, {-1, 0, 1, 2}, {0, 1, 2, 3}})
      EXPECT_EQ(engine.AddGroup(ranks, Patience()).status().code(), StatusCode::kInvalidArgument);
    const std::vector<int> others = {(rank + 1) % 3};
    ExpectFails(engine.AddGroup(others, Patience()).status(), StatusCode::kInvalidArgument,
                {StrCat("rank ", rank)});
    // A refusal takes no number.
    const uint32_t group = Add(&engine, {0, 1, 2});
    EXPECT_EQ(group, 1u);
    Started(&engine, group, {0, 1, 2}, "afterwards", 10, 2).Check(&engine);
    ExpectFails(engine.Enqueue(MakeBarrier("nowhere", 9)), StatusCode::kInvalidArgument,
                {"barrier 'nowhere'", "no group 9"});
  });
}

TEST(GroupsOfSharedMemory, TimeOutWhenAMemberNeverMakesTheGroup) {
  Cluster cluster(Fabric::kShm, 3);
  cluster.Run([](int rank, Engine& engine) {
    if (rank == 0) {
      const Status status = engine.AddGroup({0, 2}, After(Seconds(0.05))).status();
      ExpectFails(status, StatusCode::kTimeout, {"rank 2"});
    }
    ExpectOk(RunAllreduce(&engine, "still works", 100, 1));
  });
}

}  // namespace
}  // namespace bagua
