// Ranks agree on operations in whatever order they submit them, with any cache, and say what does
// not fit together.
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "common/runtime/engine.h"
#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"

namespace bagua {
namespace {

Config WithCapacity(size_t capacity) {
  Config config = UnwatchedConfig();
  config.cache_capacity = capacity;
  return config;
}

// Submits `names`, each an allreduce of its own, in an order given by `seed`; then waits for all.
void RunShuffled(Engine* engine, int names, unsigned seed, int round) {
  std::vector<int> order(names);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  std::vector<Bytes> data(names);
  std::vector<OperationPtr> operations(names);
  for (const int i : order) {
    data[i] = ValuesOf(DType::kInt32, 10 + i, engine->rank(), 7 * round + i);
    operations[i] = MakeAllreduce(StrCat("name ", i), DType::kInt32, &data[i]);
    ExpectOk(engine->Enqueue(operations[i]));
  }
  for (const int i : order) ExpectOk(Await(engine, operations[i]));
  for (int i = 0; i < names; ++i)
    ExpectReduced(data[i], DType::kInt32, ReduceOp::kSum, RanksUpTo(engine->size()), 7 * round + i);
}

int64_t Full(const Engine& engine) {
  return engine.counters().negotiated_full;
}
int64_t Cached(const Engine& engine) {
  return engine.counters().negotiated_cached;
}

class NegotiationTest : public testing::TestWithParam<FabricAndSize> {
 protected:
  Fabric fabric() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }
};

TEST_P(NegotiationTest, RepeatsTravelAsIdsWhateverTheOrder) {
  static constexpr int kNames = 8, kRounds = 6;
  Cluster cluster(fabric(), size());
  cluster.Run([](int rank, Engine& engine) {
    for (int round = 0; round < kRounds; ++round)
      RunShuffled(&engine, kNames, 100 * round + rank, round);
    EXPECT_EQ(Full(engine), kNames);
    EXPECT_EQ(Cached(engine), kNames * (kRounds - 1));
    EXPECT_EQ(engine.counters().operations, kNames * kRounds);
  });
}

TEST_P(NegotiationTest, UnnamedOperationsMatchInTheirOrderAndRepeatsTravelAsIds) {
  static constexpr int kRounds = 10;
  Cluster cluster(fabric(), size());
  cluster.Run([](int, Engine& engine) {
    for (int round = 0; round < kRounds; ++round) {
      ExpectOk(RunAllreduce(&engine, "", 33, round));
      ExpectOk(RunAllreduce(&engine, "", 34, round));
    }
    EXPECT_EQ(Full(engine), 2);
    EXPECT_EQ(Cached(engine), 2 * kRounds - 2);
  });
}

TEST_P(NegotiationTest, UnnamedOperationsMayBeUnderWayTogether) {
  Cluster cluster(fabric(), size(), WithCapacity(2));
  cluster.Run([this](int rank, Engine& engine) {
    for (int round = 0; round < 5; ++round) {
      std::vector<Bytes> data(6);
      std::vector<OperationPtr> operations;
      for (int i = 0; i < 6; ++i) {
        data[i] = ValuesOf(DType::kFloat64, 20 + i % 3, rank, i + round);
        operations.push_back(MakeAllreduce("", DType::kFloat64, &data[i]));
        ExpectOk(engine.Enqueue(operations.back()));
      }
      for (int i = 0; i < 6; ++i) {
        ExpectOk(Await(&engine, operations[i]));
        ExpectReduced(data[i], DType::kFloat64, ReduceOp::kSum, RanksUpTo(size()), i + round);
      }
    }
  });
}

TEST_P(NegotiationTest, ACacheThatHoldsFewerThanAreInUseOnlyCostsTime) {
  for (const size_t capacity : {0, 1, 2, 5}) {
    SCOPED_TRACE(capacity);
    Cluster cluster(fabric(), size(), WithCapacity(capacity));
    cluster.Run([&](int rank, Engine& engine) {
      for (int round = 0; round < 20; ++round)
        RunShuffled(&engine, 1 + round % 6, 31 * round + rank, round);
      EXPECT_EQ(Cached(engine) > 0, capacity > 0);
    });
  }
}

TEST_P(NegotiationTest, AnOperationThatOneRankChangesIsLearntAnew) {
  for (int changing = 0; changing < size(); ++changing) {
    Cluster cluster(fabric(), size());
    cluster.Run([&](int rank, Engine& engine) {
      const auto gather = [&](int64_t rows) {
        const auto rows_of = [&](int r) { return r == changing ? rows : 2; };
        const Bytes in = ValuesOf(DType::kInt8, rows_of(rank), rank, 1);
        const OperationPtr operation = MakeOperation(Kind::kAllgather, "changing");
        AddTensor(operation.get(), MetaOf(DType::kInt8, {rows_of(rank)}), in);
        ExpectOk(RunOne(&engine, operation));
        Bytes expected;
        for (int r = 0; r < size(); ++r) {
          const Bytes theirs = ValuesOf(DType::kInt8, rows_of(r), r, 1);
          expected.insert(expected.end(), theirs.begin(), theirs.end());
        }
        EXPECT_EQ(ResultBytes(*operation), expected);
      };
      for (const int64_t rows : {3, 3, 5, 5, 5, 0, 0, 4}) gather(rows);
      const int64_t cached = Cached(engine);
      for (int i = 0; i < 3; ++i) gather(4);
      EXPECT_EQ(Cached(engine), cached + 3);
    });
  }
}

TEST_P(NegotiationTest, ANameMayMeanSomethingElseNextTime) {
  Cluster cluster(fabric(), size());
  cluster.Run([](int, Engine& engine) {
    for (const size_t count : {4, 4, 9, 9, 4}) {
      ExpectOk(RunAllreduce(&engine, "reused", count, 2));
      ExpectOk(RunAllreduce(&engine, "other", count + 1, 2, DType::kInt64));
    }
    ExpectOk(RunOne(&engine, MakeBarrier("reused")));
    ExpectOk(RunAllreduce(&engine, "reused", 4, 2));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, NegotiationTest,
                         testing::Combine(EveryFabric(), testing::Values(1, 2, 3, 4)),
                         NameOfFabricAndSize);

TEST(Fusion, SmallAllreducesThatWaitTogetherShareACollective) {
  Cluster cluster(Fabric::kLoopback, 2);
  cluster.Run([](int rank, Engine& engine) {
    constexpr int kOperations = 16;
    // Rank 0 decides and submits everything before rank 1 submits anything, in one batch.
    std::vector<Bytes> data(kOperations);
    std::vector<OperationPtr> operations;
    for (int i = 0; i < kOperations; ++i) {
      data[i] = ValuesOf(DType::kFloat32, 5, rank, i);
      operations.push_back(MakeAllreduce(StrCat("small ", i), DType::kFloat32, &data[i]));
    }
    if (rank == 1) ExpectOk(RunOne(&engine, MakeBarrier("rank 0 has submitted")));
    for (const OperationPtr& operation : operations)
      ExpectOk(engine.Enqueue(operation, /*caller_drives=*/true));
    if (rank == 0) ExpectOk(RunOne(&engine, MakeBarrier("rank 0 has submitted")));
    for (const OperationPtr& operation : operations) ExpectOk(Await(&engine, operation));
    for (int i = 0; i < kOperations; ++i)
      ExpectReduced(data[i], DType::kFloat32, ReduceOp::kSum, {0, 1}, i);
    EXPECT_LT(engine.counters().units, kOperations + 1);
    EXPECT_GT(engine.counters().fused_tensors, 1);
  });
}

TEST(Fusion, IsOffWhenNoBytesAreAllowed) {
  Config config = UnwatchedConfig();
  config.fusion_bytes = 0;
  Cluster cluster(Fabric::kShm, 3, config);
  cluster.Run([](int rank, Engine& engine) {
    for (int round = 0; round < 5; ++round) RunShuffled(&engine, 8, 10 * round + rank, round);
    EXPECT_EQ(engine.counters().units, 40);
    EXPECT_EQ(engine.counters().fused_tensors, 0);
  });
}

// ---- What does not fit together -----------------------------------------------------------------

struct Misfit {
  const char* what;
  std::function<OperationPtr(int rank, Bytes* data)> make;
  std::vector<std::string> parts;  // of the text on every rank
};

std::vector<Misfit> Misfits() {
  const auto allreduce = [](DType dtype, int64_t count, Bytes* data) {
    data->assign(static_cast<size_t>(count) * SizeOf(dtype), std::byte{1});
    return MakeAllreduce("layer3.bias", dtype, data);
  };
  return {
      {"count",
       [=](int rank, Bytes* data) {
         return allreduce(DType::kFloat32, rank == 2 ? 64 : 128, data);
       },
       {"allreduce 'layer3.bias'", "rank 2 sent float32[64]", "rank 0 sent float32[128]"}},
      {"dtype",
       [=](int rank, Bytes* data) {
         return allreduce(rank == 1 ? DType::kFloat64 : DType::kInt8, 4, data);
       },
       {"rank 1 sent float64[4]", "rank 0 sent int8[4]"}},
      {"op",
       [=](int rank, Bytes* data) {
         const OperationPtr operation = allreduce(DType::kFloat32, 4, data);
         if (rank == 2) operation->request.op = ReduceOp::kAverage;
         return operation;
       },
       {"rank 2 sent op=Average", "rank 0 sent op=Sum"}},
      {"prescale",
       [=](int rank, Bytes* data) {
         const OperationPtr operation = allreduce(DType::kFloat32, 4, data);
         operation->request.prescale = rank == 1 ? 0.5 : 2;
         return operation;
       },
       {"rank 1 sent prescale_factor=0.5", "rank 0 sent prescale_factor=2"}},
      {"kind",
       [=](int rank, Bytes* data) {
         const OperationPtr operation = allreduce(DType::kFloat32, 4, data);
         if (rank == 1) operation->request.kind = Kind::kBroadcast;
         return operation;
       },
       {"rank 1 sent broadcast", "rank 0 sent allreduce"}},
      {"root",
       [=](int rank, Bytes* data) {
         const OperationPtr operation = allreduce(DType::kFloat32, 4, data);
         operation->request.kind = Kind::kBroadcast;
         operation->request.root = rank == 2 ? 1 : 0;
         return operation;
       },
       {"broadcast 'layer3.bias'", "rank 2 sent root_rank=1", "rank 0 sent root_rank=0"}},
      {"row",
       [=](int rank, Bytes* data) {
         const OperationPtr operation = allreduce(DType::kFloat32, 12, data);
         operation->request.kind = Kind::kAllgather;
         operation->request.tensors[0] =
             rank == 2 ? MetaOf(DType::kFloat32, {3, 4}) : MetaOf(DType::kFloat32, {4, 3});
         return operation;
       },
       {"rank 2 sent float32[3, 4]", "rank 0 sent float32[4, 3]", "but the first"}},
  };
}

TEST(Mismatch, IsToldToEveryRankWithBothValuesAndTheJobGoesOn) {
  for (const Fabric fabric : {Fabric::kLoopback, Fabric::kShm, Fabric::kTcp}) {
    Cluster cluster(fabric, 3);
    cluster.Run([](int rank, Engine& engine) {
      for (const Misfit& misfit : Misfits()) {
        SCOPED_TRACE(misfit.what);
        Bytes data;
        const OperationPtr operation = misfit.make(rank, &data);
        ExpectFails(RunOne(&engine, operation), StatusCode::kMismatch, misfit.parts);
        ExpectOk(RunAllreduce(&engine, "layer3.bias", 50, 1));
      }
    });
  }
}

TEST(Mismatch, OfAKnownOperationIsSeenToo) {
  Cluster cluster(Fabric::kLoopback, 3);
  cluster.Run([](int rank, Engine& engine) {
    for (int round = 0; round < 3; ++round) {
      ExpectOk(RunAllreduce(&engine, "known", 8, 1));
      Bytes data(4 * (rank == 2 ? 9 : 8));
      ExpectFails(RunOne(&engine, MakeAllreduce("known", DType::kFloat32, &data)),
                  StatusCode::kMismatch, {"rank 2 sent float32[9]", "rank 0 sent float32[8]"});
    }
    ExpectOk(RunAllreduce(&engine, "known", 8, 1));
  });
}

TEST(Mismatch, OfUnnamedOperationsNamesTheirNumber) {
  Cluster cluster(Fabric::kLoopback, 2);
  cluster.Run([](int rank, Engine& engine) {
    ExpectOk(RunAllreduce(&engine, "", 8, 1));
    Bytes data(4 * (rank == 1 ? 9 : 8));
    ExpectFails(RunOne(&engine, MakeAllreduce("", DType::kFloat32, &data)), StatusCode::kMismatch,
                {"allreduce (unnamed, number 2)", "float32[9]", "float32[8]"});
    ExpectOk(RunAllreduce(&engine, "", 8, 1));
  });
}

}  // namespace
}  // namespace bagua
