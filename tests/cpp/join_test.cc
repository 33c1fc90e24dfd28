// Ranks that run out of work join; the others go on, and all are in step afterwards.
#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "common/runtime/engine.h"
#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"
#include "tests/cpp/plan_steps.h"

namespace bagua {
namespace {

// A join under way.
struct Join {
  Bytes last = Bytes(sizeof(int32_t), std::byte{0xff});
  OperationPtr operation;

  explicit Join(uint32_t group = 0) : operation(MakeOperation(Kind::kJoin, kJoinName, group)) {
    operation->outputs.push_back(last.data());
  }
  int answer() const { return ReadAs<int32_t>(last.data()); }
};

void MustJoin(Engine* engine, int expected_last, uint32_t group = 0) {
  Join join(group);
  ExpectOk(RunOne(engine, join.operation));
  EXPECT_EQ(join.answer(), expected_last);
}

// Ranks `first` and above.
std::vector<int> RanksFrom(int first, int size) {
  std::vector<int> ranks;
  for (int r = first; r < size; ++r) ranks.push_back(r);
  return ranks;
}

class JoinTest : public testing::TestWithParam<FabricAndSize> {
 protected:
  explicit JoinTest(const Config& config = UnwatchedConfig())
      : cluster_(std::get<0>(GetParam()), std::get<1>(GetParam()), config) {}
  int size() const { return cluster_.size(); }
  Cluster cluster_;
};

INSTANTIATE_TEST_SUITE_P(Ranks, JoinTest,
                         testing::Combine(EveryFabric(), testing::Values(1, 2, 3, 4)),
                         NameOfFabricAndSize);

// ---- Operations ---------------------------------------------------------------------------------

// An allreduce to which only `ranks` submit; the others of `size` have joined, or will.
void RunAmong(Engine* engine, const std::vector<int>& ranks, const std::string& name, DType dtype,
              ReduceOp op, size_t count, int seed) {
  Bytes data = ValuesOf(dtype, count, engine->rank(), seed, op);
  ExpectOk(RunOne(engine, MakeAllreduce(name, dtype, &data, op)));
  const double factor =
      op == ReduceOp::kAverage ? static_cast<double>(ranks.size()) / engine->size() : 1;
  ExpectReduced(data, dtype, op, ranks, seed, 0, factor);
}

// New and known names, unnamed ones, small and large, on rank after rank fewer.
void RunUneven(Engine* engine, int round) {
  const int size = engine->size();
  for (int joined = 0; joined <= engine->rank(); ++joined) {
    const std::vector<int> ranks = RanksFrom(joined, size);
    const int seed = 10 * round + joined;
    for (int turn = 0; turn < 2; ++turn) {
      RunAmong(engine, ranks, "known", DType::kFloat32, ReduceOp::kSum, 50, seed);
      RunAmong(engine, ranks, "", DType::kInt64, ReduceOp::kSum, 33, seed);
      RunAmong(engine, ranks, StrCat("new ", round, ".", joined, ".", turn), DType::kFloat64,
               ReduceOp::kAverage, 30011, seed);
      RunAmong(engine, ranks, "", DType::kFloat32, ReduceOp::kAverage, 7, seed);
    }
  }
}

TEST_P(JoinTest, ServesZerosUntilAllHaveJoinedAndLeavesAllInStep) {
  cluster_.Run([](int, Engine& engine) {
    for (int round = 0; round < 3; ++round) {
      RunUneven(&engine, round);
      // The last rank's operations needed the joins of all others.
      MustJoin(&engine, engine.size() - 1);
      for (const char* name : {"known", "", "new 0.0.0"})
        ExpectOk(RunAllreduce(&engine, name, 60, round));
    }
    // The last rounds sent ids of what all ranks had done together.
    EXPECT_GT(engine.counters().negotiated_cached, 0);
  });
}

TEST_P(JoinTest, ServesGroupedOperationsOfSeveralTypes) {
  cluster_.Run([](int rank, Engine& engine) {
    if (rank == engine.size() - 1) {
      Bytes a = ValuesOf(DType::kFloat32, 9, rank, 1), b = ValuesOf(DType::kInt8, 500, rank, 2),
            c = ValuesOf(DType::kFloat32, 0, rank, 3);
      const OperationPtr group = MakeOperation(Kind::kAllreduce, "group");
      AddTensor(group.get(), MetaOf(DType::kFloat32, {3, 3}), a, &a);
      AddTensor(group.get(), MetaOf(DType::kInt8, {500}), b, &b);
      AddTensor(group.get(), MetaOf(DType::kFloat32, {0, 5}), c, &c);
      ExpectOk(RunOne(&engine, group));
      ExpectReduced(a, DType::kFloat32, ReduceOp::kSum, {rank}, 1);
      ExpectReduced(b, DType::kInt8, ReduceOp::kSum, {rank}, 2);
    }
    MustJoin(&engine, engine.size() - 1);
  });
}

TEST_P(JoinTest, LetsWhatIsInFlightEnd) {
  cluster_.Run([](int rank, Engine& engine) {
    // The rank joins without waiting for its operations, which the others submit in another order.
    std::vector<Bytes> data(6);
    std::vector<OperationPtr> operations(6);
    for (int i = 0; i < 6; ++i) {
      const int which = rank % 2 == 0 ? i : 5 - i;
      data[which] = ValuesOf(DType::kInt32, 900, rank, which);
      operations[which] = MakeAllreduce(StrCat("flying ", which), DType::kInt32, &data[which]);
      ExpectOk(engine.Enqueue(operations[which]));
    }
    Join join;
    ExpectOk(RunOne(&engine, join.operation));
    for (int i = 0; i < 6; ++i) {
      ExpectOk(Await(&engine, operations[i]));
      ExpectReduced(data[i], DType::kInt32, ReduceOp::kSum, RanksUpTo(engine.size()), i);
    }
  });
}

class TinyCacheJoinTest : public JoinTest {
 protected:
  static Config TinyCache() {
    Config config = UnwatchedConfig();
    config.cache_capacity = 2;
    return config;
  }
  TinyCacheJoinTest() : JoinTest(TinyCache()) {}
};
INSTANTIATE_TEST_SUITE_P(Ranks, TinyCacheJoinTest,
                         testing::Combine(EveryFabric(), testing::Values(2, 3)),
                         NameOfFabricAndSize);

TEST_P(TinyCacheJoinTest, GoesWithIdsThatAreForgottenOnTheWay) {
  cluster_.Run([](int rank, Engine& engine) {
    static constexpr int kNames = 5;
    for (int round = 0; round < 20; ++round) {
      // More names than the cache holds, all in flight at once; rank 0 joins right behind them.
      std::vector<Bytes> data(kNames);
      std::vector<OperationPtr> operations(kNames);
      for (int i = 0; i < kNames; ++i) {
        const int name = (i + rank) % kNames;
        data[name] = ValuesOf(DType::kInt32, 10, rank, name);
        operations[name] = MakeAllreduce(StrCat("name ", name), DType::kInt32, &data[name]);
        ExpectOk(engine.Enqueue(operations[name]));
      }
      if (rank != 0) {
        for (const OperationPtr& operation : operations) ExpectOk(Await(&engine, operation));
        RunAmong(&engine, RanksFrom(1, engine.size()), "name 0", DType::kInt32, ReduceOp::kSum, 10,
                 9);
      }
      Join join;
      ExpectOk(RunOne(&engine, join.operation));
      for (int name = 0; name < kNames; ++name) {
        ExpectOk(Await(&engine, operations[name]));
        ExpectReduced(data[name], DType::kInt32, ReduceOp::kSum, RanksUpTo(engine.size()), name);
      }
    }
  });
}

// ---- What joined ranks cannot serve -------------------------------------------------------------

class JoinOfThreeTest : public testing::TestWithParam<Fabric> {};
INSTANTIATE_TEST_SUITE_P(Fabrics, JoinOfThreeTest, EveryFabric(), NameOfFabric);

TEST_P(JoinOfThreeTest, FailsEverythingElseOnTheRanksThatSubmittedIt) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    for (int round = 0; round < 2; ++round) {
      if (rank != 1) {
        // That it is served says that rank 1 has joined.
        RunAmong(&engine, {0, 2}, "", DType::kInt32, ReduceOp::kSum, 5, round);
        std::vector<OperationPtr> refused;
        Bytes data = ValuesOf(DType::kInt32, 6, rank, 1);
        for (const Kind kind : {Kind::kAllgather, Kind::kBroadcast, Kind::kReduceScatter,
                                Kind::kAlltoall, Kind::kBarrier}) {
          // Unnamed and named ones.
          const OperationPtr operation = MakeOperation(kind, round == 0 ? Name(kind) : "");
          if (kind != Kind::kBarrier)
            AddTensor(operation.get(), MetaOf(DType::kInt32, {6}), data, &data);
          if (kind == Kind::kAlltoall) operation->request.splits = {1, 2, 3};
          refused.push_back(operation);
        }
        for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct})
          refused.push_back(MakeAllreduce("reduced", DType::kInt32, &data, op));
        Result<OperationPtr> add = engine.AddGroup({0, 2});
        refused.push_back(add.value());
        const PlanPtr plan =
            Plan::Make(OptionsOf("late", {{DType::kFloat32, 5}}), engine.size()).value();
        refused.push_back(engine.RegisterPlan(plan, 0));
        for (const OperationPtr& operation : refused)
          ExpectFails(RunOne(&engine, operation), StatusCode::kMismatch,
                      {Name(operation->request.kind), "rank 1 has joined"});
        RunAmong(&engine, {0, 2}, "still usable", DType::kInt32, ReduceOp::kSum, 5, 3);
      }
      Join join;
      ExpectOk(RunOne(&engine, join.operation));
      for (const char* name : {"", "reduced", "barrier"})
        ExpectOk(RunAllreduce(&engine, name, 20, round));
    }
  });
}

TEST_P(JoinOfThreeTest, MisfitsOfTheOthersAreStillTold) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    ExpectOk(RunAllreduce(&engine, "known", 8, 1));
    if (rank != 1) {
      Bytes data(4 * (rank == 2 ? 9 : 8));
      for (const char* name : {"known", "new"})
        ExpectFails(RunOne(&engine, MakeAllreduce(name, DType::kFloat32, &data)),
                    StatusCode::kMismatch, {"rank 2 sent float32[9]", "rank 0 sent float32[8]"});
    }
    Join join;
    ExpectOk(RunOne(&engine, join.operation));
    ExpectOk(RunAllreduce(&engine, "known", 8, 1));
  });
}

TEST_P(JoinOfThreeTest, TakesNothingMoreFromARankThatHasJoined) {
  Cluster cluster(GetParam(), 3);
  std::barrier gate(3);
  cluster.Run([&gate](int rank, Engine& engine) {
    const PlanPtr plan =
        MustRegister(&engine, OptionsOf("model", {{DType::kFloat32, 7}, {DType::kFloat32, 9}}));
    if (rank == 0) {
      // In the midst of a step it does not join at all.
      Fill(&engine, plan.get(), 1, SeedOf(1, 1));
      Join early;
      ExpectFails(engine.Enqueue(early.operation), StatusCode::kInvalidArgument,
                  {"join: plan 'model'", "midst of step 1"});
    }
    ExpectOk(engine.FinishStep(plan.get(), Patience()));
    Join join;
    if (rank == 0) {
      ExpectOk(engine.Enqueue(join.operation));
      const std::vector<std::string> parts = {"this rank has joined"};
      ExpectFails(engine.Enqueue(MakeBarrier("more")), StatusCode::kInvalidArgument, parts);
      ExpectFails(engine.MakeReady(plan.get(), 0), StatusCode::kInvalidArgument, parts);
      ExpectFails(engine.FinishStep(plan.get(), Patience()), StatusCode::kInvalidArgument, parts);
      Join again;
      ExpectFails(engine.Enqueue(again.operation), StatusCode::kInvalidArgument, parts);
    }
    gate.arrive_and_wait();
    if (rank != 0) ExpectOk(engine.Enqueue(join.operation));
    ExpectOk(Await(&engine, join.operation));
    ExpectOk(RunOne(&engine, MakeBarrier("more")));
    FillAll(&engine, plan.get(), 2);
    ExpectOk(engine.FinishStep(plan.get(), Patience()));
    ExpectAll(*plan, ReduceOp::kAverage, {0, 1, 2}, 2);
  });
}

TEST_P(JoinOfThreeTest, WorksInAGroupWhileOthersWork) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    const uint32_t pair = MustAddGroup(&engine, {0, 2});
    if (rank == 2) {
      Bytes data = ValuesOf(DType::kInt32, 40, rank, 5);
      ExpectOk(RunOne(&engine, MakeAllreduce("", DType::kInt32, &data, ReduceOp::kSum, pair)));
      ExpectReduced(data, DType::kInt32, ReduceOp::kSum, {2}, 5);
    }
    Join join(pair);
    if (rank != 1) ExpectOk(engine.Enqueue(join.operation));
    ExpectOk(RunAllreduce(&engine, "everyone", 100, 1));
    if (rank == 1)
      ExpectFails(engine.Enqueue(join.operation), StatusCode::kInvalidArgument,
                  {"rank 1 is not in process set 1"});
    else
      ExpectOk(Await(&engine, join.operation));
    EXPECT_EQ(join.answer(), rank == 1 ? -1 : 2);
  });
}

// ---- Plans --------------------------------------------------------------------------------------

void ExpectStep(const Plan& plan, const std::vector<int>& ranks, int step) {
  for (size_t t = 0; t < plan.tensor_count(); ++t) {
    ExpectReduced(Held(plan, t), DTypeOf(plan, t), ReduceOp::kSum, ranks, SeedOf(step, t));
    EXPECT_EQ(plan.used()[t], 1) << t;
  }
}

// Rank r makes `least` + r steps and joins.
void MakeUnevenSteps(Engine* engine, const std::vector<PlanPtr>& plans, int least, int first) {
  const int size = engine->size();
  for (int step = 0; step < least + engine->rank(); ++step) {
    const std::vector<int> ranks = RanksFrom(std::max(0, step - least + 1), size);
    for (const PlanPtr& plan : plans) FillAll(engine, plan.get(), first + step);
    for (const PlanPtr& plan : plans) {
      ExpectOk(engine->FinishStep(plan.get(), Patience()));
      ExpectStep(*plan, ranks, first + step);
    }
  }
}

PlanOptions SumOf(PlanOptions options) {
  options.op = ReduceOp::kSum;
  return options;
}

TEST_P(JoinTest, ServesThePlansStepsOfOthersAndKeepsThemInStep) {
  cluster_.Run([](int, Engine& engine) {
    // Two plans under way at once, and one that nobody uses.
    std::vector<PlanPtr> plans = {MustRegister(&engine, SumOf(MixedOptions("first")))};
    plans.push_back(MustRegister(&engine, SumOf(OptionsOf("second", {{DType::kFloat32, 30011}}))));
    const PlanPtr idle = MustRegister(&engine, SumOf(MixedOptions("idle")));
    uint64_t steps = 0;
    for (int round = 0; round < 3; ++round) {
      MakeUnevenSteps(&engine, plans, round % 2, 100 * round);
      MustJoin(&engine, engine.size() - 1);
      steps += round % 2 + engine.size() - 1;
      for (const PlanPtr& plan : plans) EXPECT_EQ(plan->steps_finished(), steps);
      EXPECT_EQ(idle->steps_finished(), 0u);
      for (int step = 1; step <= 2; ++step, ++steps)
        for (const PlanPtr& plan : plans) {
          FillAll(&engine, plan.get(), 1000 + step);
          ExpectOk(engine.FinishStep(plan.get(), Patience()));
          ExpectStep(*plan, RanksUpTo(engine.size()), 1000 + step);
        }
    }
  });
}

TEST_P(JoinTest, ServesPlansThatAverageThroughACodec) {
  cluster_.Run([](int rank, Engine& engine) {
    PlanOptions options = OptionsOf("narrow", {{DType::kFloat32, 4}, {DType::kFloat32, 3000}});
    options.codec = "bf16";
    const PlanPtr plan = MustRegister(&engine, options);
    const int size = engine.size();
    for (int step = 0; step < 2 * rank + 1; ++step) {
      // Powers of two stay exact, and so does a sum of few of them.
      for (size_t t = 0; t < 2; ++t) {
        auto* const values = reinterpret_cast<float*>(PlaceOf(*plan, t));
        for (size_t i = 0; i < plan->places()[t].count; ++i)
          values[i] = static_cast<float>(size * (1 << ((rank + i + t) % 4)));
        ExpectOk(engine.MakeReady(plan.get(), t));
      }
      ExpectOk(engine.FinishStep(plan.get(), Patience()));
      for (size_t t = 0; t < 2; ++t)
        for (size_t i = 0; i < plan->places()[t].count; ++i) {
          float want = 0;
          for (int r = (step + 1) / 2; r < size; ++r)
            want += static_cast<float>(1 << ((r + i + t) % 4));
          ASSERT_EQ(reinterpret_cast<float*>(PlaceOf(*plan, t))[i], want) << step << " " << i;
        }
    }
    MustJoin(&engine, size - 1);
    EXPECT_EQ(plan->steps_finished(), static_cast<uint64_t>(2 * size - 1));
  });
}

TEST_P(JoinTest, ServesPlansThatWereDroppedEarly) {
  cluster_.Run([](int, Engine& engine) {
    for (int round = 0; round < 3; ++round) {
      std::vector<PlanPtr> plans = {MustRegister(&engine, SumOf(MixedOptions("model")))};
      MakeUnevenSteps(&engine, plans, 1, 100 * round);
      engine.DropPlan(plans[0].get());
      plans.clear();
      MustJoin(&engine, engine.size() - 1);
    }
  });
}

TEST_P(JoinTest, PlansAreForgottenOnceAllRanksHaveDroppedThem) {
  std::vector<std::weak_ptr<Plan>> dropped(cluster_.size());
  cluster_.Run([&dropped](int rank, Engine& engine) {
    PlanPtr plan = MustRegister(&engine, MixedOptions("model"));
    ExpectOk(engine.FinishStep(plan.get(), Patience()));
    dropped[rank] = plan;
    engine.DropPlan(plan.get());
    plan.reset();
    // What each rank says of the drop comes before what it says of this.
    for (int i = 0; i < 2; ++i) ExpectOk(RunOne(&engine, MakeBarrier("dropped")));
  });
  for (int rank = 0; rank < size(); ++rank) {
    cluster_.engine(rank).Shutdown();
    EXPECT_TRUE(dropped[rank].expired()) << rank;
  }
}

// ---- Failure ------------------------------------------------------------------------------------

TEST_P(JoinOfThreeTest, ARankThatLeavesEndsTheJoinOfTheOthers) {
  for (const int victim : {0, 2}) {
    Cluster cluster(GetParam(), 3);
    cluster.Run([&](int rank, Engine& engine) {
      ExpectOk(RunAllreduce(&engine, "before", 100, 1));
      if (rank == victim) {
        // Served, so that the others have joined.
        RunAmong(&engine, {rank}, "served", DType::kInt32, ReduceOp::kSum, 5, 1);
        cluster.Destroy(rank);
        return;
      }
      Join join;
      ExpectFails(RunOne(&engine, join.operation), StatusCode::kPeerLost,
                  {"join", StrCat("rank ", victim)});
      EXPECT_EQ(join.answer(), -1);
    });
  }
}

TEST(JoinOfProcesses, ADeathEndsTheJoinOfTheOthers) {
  for (const Fabric fabric : {Fabric::kShm, Fabric::kTcp})
    for (const int victim : {0, 1}) {
      Cluster cluster(fabric, 3);
      cluster.Run([&](int rank, Engine& engine) {
        const PlanPtr plan = MustRegister(&engine, MixedOptions("model"));
        if (rank == victim) {
          FillAll(&engine, plan.get(), 1);
          ExpectOk(engine.FinishStep(plan.get(), Patience()));
          cluster.CutLifelines(rank);
          Status status;
          Bytes data(4);
          while (status.ok()) status = RunOne(&engine, MakeAllreduce("x", DType::kInt32, &data));
          ExpectFails(status, StatusCode::kPeerLost, {"rank "});
          return;
        }
        Join join;
        ExpectFails(RunOne(&engine, join.operation), StatusCode::kPeerLost,
                    {StrCat("rank ", victim), "was lost"});
      });
    }
}

Config Impatient() {
  Config config = UnwatchedConfig();
  config.timeout_seconds = kSanitized ? 3 : 0.5;
  return config;
}

TEST_P(JoinOfThreeTest, IsNotTimedOutWhileOthersWork) {
  for (const int worker : {0, 2}) {
    const Config config = Impatient();
    Cluster cluster(GetParam(), 3, config);
    cluster.Run([&](int rank, Engine& engine) {
      const PlanPtr plan = MustRegister(&engine, OptionsOf("model", {{DType::kFloat32, 70}}));
      const Deadline end = After(Seconds(3 * config.timeout_seconds));
      // By turns operations alone, and plans alone.
      for (int step = 0; rank == worker && Clock::now() < end; ++step) {
        if (Seconds(end - Clock::now()).count() > 1.5 * config.timeout_seconds)
          RunAmong(&engine, {rank}, "work", DType::kInt32, ReduceOp::kSum, 5, step % 7);
        else
          ExpectOk(engine.FinishStep(plan.get(), Patience()));
      }
      MustJoin(&engine, worker);
    });
  }
}

TEST_P(JoinOfThreeTest, IsTimedOutWhenNothingGoesOnAndTheJobGoesOn) {
  Cluster cluster(GetParam(), 3, Impatient());
  std::barrier gate(3);
  cluster.Run([&gate](int rank, Engine& engine) {
    for (int round = 0; round < 2; ++round) {
      if (rank == 1) {
        Join join;
        ExpectFails(RunOne(&engine, join.operation), StatusCode::kTimeout,
                    {"join", "ranks 0, 2", "never submitted it"});
      } else {
        RunAmong(&engine, {0, 2}, "", DType::kInt32, ReduceOp::kSum, 5, round);
      }
      gate.arrive_and_wait();
      for (int i = 0; i < 3; ++i) ExpectOk(RunAllreduce(&engine, "", 20, i));
    }
  });
}

}  // namespace
}  // namespace bagua
