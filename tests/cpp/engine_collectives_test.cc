// Every operation gives what a plain loop over the ranks gives: on every fabric, for every number
// of ranks, elements, types and reductions.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "common/runtime/engine.h"
#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"

namespace bagua {
namespace {

std::vector<size_t> Counts() {
  return kSanitized ? std::vector<size_t>{0, 1, 5, 20011}
                    : std::vector<size_t>{0, 1, 5, 1000, 65537};
}

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};

// With small staging memory every size above 1 KiB takes many blocks.
enum class Memory { kDefault, kSmall };

Config ConfigOf(Memory memory) {
  Config config = UnwatchedConfig();
  if (memory == Memory::kSmall) {
    config.shm_slot_bytes = 1024;
    config.shm_staging_bytes = 3 * 8192;
  }
  return config;
}

using Param = std::tuple<std::tuple<Fabric, Memory>, int>;

class CollectivesTest : public testing::TestWithParam<Param> {
 protected:
  CollectivesTest()
      : cluster_(std::get<0>(std::get<0>(GetParam())), std::get<1>(GetParam()),
                 ConfigOf(std::get<1>(std::get<0>(GetParam())))) {}
  int size() const { return cluster_.size(); }
  std::vector<int> ranks() const { return RanksUpTo(size()); }
  Cluster cluster_;
};

TEST_P(CollectivesTest, AllreduceCombinesEveryElementOnEveryRank) {
  cluster_.Run([this](int rank, Engine& engine) {
    for (const size_t count : Counts())
      for (int d = 0; d < kDTypeCount; ++d)
        for (const ReduceOp op : kOps) {
          const auto dtype = static_cast<DType>(d);
          if (dtype == DType::kBool && op == ReduceOp::kAverage) continue;
          if (kSanitized && count > 5 && (d + static_cast<int>(op)) % 4 != 0) continue;
          const int seed = 16 * d + static_cast<int>(op);
          Bytes data = ValuesOf(dtype, count, rank, seed, op);
          ExpectOk(RunOne(&engine,
                          MakeAllreduce(StrCat(Name(dtype), Name(op), count), dtype, &data, op)));
          ExpectReduced(data, dtype, op, ranks(), seed);
        }
  });
}

TEST_P(CollectivesTest, AllreduceLeavesTheInputAloneWhenTheOutputIsElsewhere) {
  cluster_.Run([this](int rank, Engine& engine) {
    for (const size_t count : Counts()) {
      const Bytes given = ValuesOf(DType::kFloat32, count, rank, 3);
      const Bytes in = given;
      Bytes out(given.size(), std::byte{0xa5});
      const OperationPtr operation = MakeOperation(Kind::kAllreduce, "elsewhere");
      operation->request.op = ReduceOp::kSum;
      AddTensor(operation.get(), MetaOf(DType::kFloat32, {static_cast<int64_t>(count)}), in, &out);
      ExpectOk(RunOne(&engine, operation));
      EXPECT_EQ(in, given);
      ExpectReduced(out, DType::kFloat32, ReduceOp::kSum, ranks(), 3);
    }
  });
}

TEST_P(CollectivesTest, AllreduceAppliesTheFactorsBeforeAndAfter) {
  cluster_.Run([this](int rank, Engine& engine) {
    for (const size_t count : Counts())
      for (const DType dtype :
           {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64})
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
          Bytes data = ValuesOf(dtype, count, rank, 5);
          const OperationPtr operation = MakeAllreduce("scaled", dtype, &data, op);
          operation->request.prescale = 0.5;
          operation->request.postscale = 8;
          ExpectOk(RunOne(&engine, operation));
          ExpectReduced(data, dtype, op, ranks(), 5, 0, 4);
        }
  });
}

TEST_P(CollectivesTest, GroupedAllreduceTakesTensorsOfAllTypesAndSizes) {
  cluster_.Run([this](int rank, Engine& engine) {
    const std::vector<std::pair<DType, size_t>> tensors = {
        {DType::kFloat32, 1000}, {DType::kInt64, 3},       {DType::kFloat32, 0},
        {DType::kFloat16, 7},    {DType::kFloat32, 20011}, {DType::kInt64, 777},
        {DType::kUint8, 1},      {DType::kFloat16, 4099}};
    for (int round = 0; round < 3; ++round) {
      std::vector<Bytes> data;
      for (size_t t = 0; t < tensors.size(); ++t)
        data.push_back(ValuesOf(tensors[t].first, tensors[t].second, rank, 100 * round + t));
      const OperationPtr operation = MakeOperation(Kind::kAllreduce, "grouped");
      operation->request.op = ReduceOp::kSum;
      for (size_t t = 0; t < tensors.size(); ++t)
        AddTensor(operation.get(),
                  MetaOf(tensors[t].first, {static_cast<int64_t>(tensors[t].second)}), data[t],
                  &data[t]);
      ExpectOk(RunOne(&engine, operation));
      for (size_t t = 0; t < tensors.size(); ++t)
        ExpectReduced(data[t], tensors[t].first, ReduceOp::kSum, ranks(), 100 * round + t);
    }
  });
}

TEST_P(CollectivesTest, OperationsUnderWayTogetherKeepTheirResultsApart) {
  cluster_.Run([this](int rank, Engine& engine) {
    constexpr int kOperations = 24;
    const auto dtype = [](int i) { return i % 3 == 0 ? DType::kFloat64 : DType::kFloat32; };
    const auto op = [](int i) { return i % 4 == 1 ? ReduceOp::kMax : ReduceOp::kSum; };
    for (int round = 0; round < 4; ++round) {
      std::vector<Bytes> data(kOperations);
      std::vector<OperationPtr> operations;
      for (int i = 0; i < kOperations; ++i) {
        data[i] = ValuesOf(dtype(i), 37 * static_cast<size_t>(i) + i % 5, rank, i + round, op(i));
        operations.push_back(MakeAllreduce(StrCat("t", i), dtype(i), &data[i], op(i)));
      }
      // Each rank in an order of its own.
      for (int i = 0; i < kOperations; ++i)
        ExpectOk(engine.Enqueue(operations[(i * 5 + rank * 7) % kOperations]));
      for (const OperationPtr& operation : operations) ExpectOk(Await(&engine, operation));
      for (int i = 0; i < kOperations; ++i)
        ExpectReduced(data[i], dtype(i), op(i), ranks(), i + round);
    }
  });
}

TEST_P(CollectivesTest, AllgatherJoinsRowsInTheOrderOfRanks) {
  cluster_.Run([this](int rank, Engine& engine) {
    struct Case {
      DType dtype;
      int64_t scale, row;
    };
    for (const Case& c : {Case{DType::kUint8, 1, 1}, Case{DType::kInt64, 1, 7},
                          Case{DType::kFloat32, 900, 5}, Case{DType::kFloat64, 0, 3}}) {
      // Unequal, with none on rank 1; on no rank for scale 0.
      const auto rows = [&](int r) { return (r * 5 + 3) % 4 * c.scale; };
      const Bytes in = ValuesOf(c.dtype, rows(rank) * c.row, rank, 9);
      const OperationPtr operation = MakeOperation(Kind::kAllgather, "rows");
      AddTensor(operation.get(), MetaOf(c.dtype, {rows(rank), c.row}), in);
      ExpectOk(RunOne(&engine, operation));
      Bytes expected;
      int64_t total = 0;
      for (const int r : ranks()) {
        const Bytes theirs = ValuesOf(c.dtype, rows(r) * c.row, r, 9);
        expected.insert(expected.end(), theirs.begin(), theirs.end());
        total += rows(r);
      }
      ASSERT_EQ(operation->results.size(), 1u);
      EXPECT_TRUE(operation->results[0].shape == MetaOf(c.dtype, {total, c.row}).shape);
      EXPECT_EQ(ResultBytes(*operation), expected);
    }
  });
}

TEST_P(CollectivesTest, GroupedAllgatherJoinsEachTensorByItself) {
  cluster_.Run([this](int rank, Engine& engine) {
    const auto rows = [](int r, int t) { return (r + 2 * t) % 3; };
    std::vector<Bytes> in;
    for (int t = 0; t < 3; ++t) in.push_back(ValuesOf(DType::kInt32, rows(rank, t) * 11, rank, t));
    const OperationPtr operation = MakeOperation(Kind::kAllgather, "grouped rows");
    for (int t = 0; t < 3; ++t)
      AddTensor(operation.get(), MetaOf(DType::kInt32, {rows(rank, t), 11}), in[t]);
    ExpectOk(RunOne(&engine, operation));
    for (int t = 0; t < 3; ++t) {
      Bytes expected;
      for (const int r : ranks()) {
        const Bytes theirs = ValuesOf(DType::kInt32, rows(r, t) * 11, r, t);
        expected.insert(expected.end(), theirs.begin(), theirs.end());
      }
      EXPECT_EQ(ResultBytes(*operation, t), expected);
    }
  });
}

TEST_P(CollectivesTest, AllgatherOfScalarsGivesOneRowPerRank) {
  cluster_.Run([this](int rank, Engine& engine) {
    const Bytes in = ValuesOf(DType::kFloat64, 1, rank, 2);
    const OperationPtr operation = MakeOperation(Kind::kAllgather, "scalar");
    AddTensor(operation.get(), MetaOf(DType::kFloat64, {}), in);
    ExpectOk(RunOne(&engine, operation));
    Bytes expected;
    for (const int r : ranks()) {
      const Bytes theirs = ValuesOf(DType::kFloat64, 1, r, 2);
      expected.insert(expected.end(), theirs.begin(), theirs.end());
    }
    EXPECT_EQ(ResultBytes(*operation), expected);
  });
}

TEST_P(CollectivesTest, BroadcastGivesEveryRankTheRootsValues) {
  cluster_.Run([this](int rank, Engine& engine) {
    for (int root = 0; root < size(); ++root)
      for (const size_t count : Counts()) {
        const Bytes given = ValuesOf(DType::kInt16, count, rank, root);
        Bytes in = given;
        Bytes out(given.size());
        const bool in_place = (rank + root + count) % 2 == 0;
        const OperationPtr operation = MakeOperation(Kind::kBroadcast, StrCat("from ", root));
        operation->request.root = root;
        AddTensor(operation.get(), MetaOf(DType::kInt16, {static_cast<int64_t>(count)}), in,
                  in_place ? &in : &out);
        ExpectOk(RunOne(&engine, operation));
        EXPECT_EQ(in_place ? in : out, ValuesOf(DType::kInt16, count, root, root));
        EXPECT_TRUE(in_place || in == given);
      }
  });
}

TEST_P(CollectivesTest, ReduceScatterGivesTheFirstRanksTheRowsThatAreOver) {
  cluster_.Run([this](int rank, Engine& engine) {
    for (const int64_t rows : {0, 1, 5, 11, 64})
      for (const int64_t row : {1, 3, 501})
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin}) {
          const DType dtype = row == 3 ? DType::kBfloat16 : DType::kFloat32;
          const Bytes given = ValuesOf(dtype, rows * row, rank, 4, op);
          const Bytes in = given;
          const OperationPtr operation = MakeOperation(Kind::kReduceScatter, "scatter");
          operation->request.op = op;
          AddTensor(operation.get(), MetaOf(dtype, {rows, row}), in);
          ExpectOk(RunOne(&engine, operation));
          EXPECT_EQ(in, given);
          int64_t begin = 0;
          for (int r = 0; r < rank; ++r) begin += rows / size() + (r < rows % size() ? 1 : 0);
          const int64_t mine = rows / size() + (rank < rows % size() ? 1 : 0);
          ASSERT_EQ(operation->results.size(), 1u);
          EXPECT_TRUE(operation->results[0].shape == MetaOf(dtype, {mine, row}).shape);
          ExpectReduced(ResultBytes(*operation), dtype, op, ranks(), 4, begin * row);
        }
  });
}

TEST_P(CollectivesTest, AlltoallDeliversUnevenAndEmptyParts) {
  cluster_.Run([this](int rank, Engine& engine) {
    for (const int64_t scale : {0, 1, 700}) {
      const auto rows = [&](int from, int to) { return (from * 3 + to * 5) % 4 * scale; };
      const auto part = [&](int from, int to) {
        return ValuesOf(DType::kFloat32, rows(from, to) * 3, from, 8 + to);
      };
      Bytes in, expected;
      std::vector<int64_t> splits, received;
      int64_t sent = 0;
      for (const int r : ranks()) {
        const Bytes out = part(rank, r), back = part(r, rank);
        in.insert(in.end(), out.begin(), out.end());
        expected.insert(expected.end(), back.begin(), back.end());
        splits.push_back(rows(rank, r));
        received.push_back(rows(r, rank));
        sent += rows(rank, r);
      }
      const OperationPtr operation = MakeOperation(Kind::kAlltoall, "exchange");
      AddTensor(operation.get(), MetaOf(DType::kFloat32, {sent, 3}), in);
      operation->request.splits = splits;
      ExpectOk(RunOne(&engine, operation));
      EXPECT_EQ(operation->received_splits, received);
      EXPECT_EQ(ResultBytes(*operation), expected);
    }
  });
}

TEST_P(CollectivesTest, BarrierEndsWhenTheLastRankHasCome) {
  std::atomic<int> came{0};
  cluster_.Run([&](int, Engine& engine) {
    for (int round = 1; round <= 10; ++round) {
      came.fetch_add(1);
      ExpectOk(RunOne(&engine, MakeBarrier("meet")));
      EXPECT_GE(came.load(), round * size());
      ExpectOk(RunOne(&engine, MakeBarrier("")));
    }
  });
}

const auto kFabrics = testing::Values(
    std::tuple{Fabric::kLoopback, Memory::kDefault}, std::tuple{Fabric::kShm, Memory::kDefault},
    std::tuple{Fabric::kShm, Memory::kSmall}, std::tuple{Fabric::kTcp, Memory::kDefault});

std::string NameOf(const testing::TestParamInfo<Param>& info) {
  const auto [kind, size] = info.param;
  const auto [fabric, memory] = kind;
  return StrCat(Name(fabric), memory == Memory::kSmall ? "_small" : "", "_", size);
}

std::vector<int> Sizes() {
  return kSanitized ? std::vector<int>{1, 3, 4} : std::vector<int>{1, 2, 3, 4, 7};
}

INSTANTIATE_TEST_SUITE_P(Ranks, CollectivesTest,
                         testing::Combine(kFabrics, testing::ValuesIn(Sizes())), NameOf);

// ---- Results in the user's memory ---------------------------------------------------------------

struct Given {
  Bytes memory;
  int calls = 0;
  std::vector<int64_t> shape;
};

void* GiveMemory(void* context, int32_t index, int32_t ndim, const int64_t* shape) {
  auto* const given = static_cast<Given*>(context);
  EXPECT_EQ(index, 0);
  ++given->calls;
  given->shape.assign(shape, shape + ndim);
  size_t count = 1;
  for (int i = 0; i < ndim; ++i) count *= static_cast<size_t>(shape[i]);
  given->memory.resize(count * sizeof(float));
  return given->memory.data();
}

void* GiveNothing(void*, int32_t, int32_t, const int64_t*) {
  return nullptr;
}

TEST(Results, GoToTheMemoryThatTheUserGives) {
  Cluster cluster(Fabric::kLoopback, 3);
  cluster.Run([](int rank, Engine& engine) {
    Given given;
    const Bytes in = ValuesOf(DType::kFloat32, 2 * (rank + 1), rank);
    const OperationPtr operation = MakeOperation(Kind::kAllgather, "given");
    AddTensor(operation.get(), MetaOf(DType::kFloat32, {rank + 1, 2}), in);
    operation->allocate = GiveMemory;
    operation->context = &given;
    ExpectOk(RunOne(&engine, operation));
    EXPECT_EQ(given.calls, 1);
    EXPECT_EQ(given.shape, (std::vector<int64_t>{6, 2}));
    EXPECT_EQ(operation->results[0].data, given.memory.data());
    EXPECT_EQ(operation->results[0].owned, nullptr);
  });
}

TEST(Results, WithoutMemoryFailOnThatRankAlone) {
  Cluster cluster(Fabric::kShm, 3);
  cluster.Run([](int rank, Engine& engine) {
    const Bytes in = ValuesOf(DType::kFloat32, 4, rank);
    const OperationPtr operation = MakeOperation(Kind::kAllgather, "short of memory");
    AddTensor(operation.get(), MetaOf(DType::kFloat32, {4}), in);
    if (rank == 1) operation->allocate = GiveNothing;
    const Status status = RunOne(&engine, operation);
    if (rank == 1)
      ExpectFails(status, StatusCode::kInternal, {"short of memory", "float32[12]"});
    else
      ExpectOk(status);
    ExpectOk(RunAllreduce(&engine, "afterwards", 100, 1));
  });
}

}  // namespace
}  // namespace bagua
