// What goes wrong reaches every waiter, with its cause, in bounded time.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/runtime/engine.h"
#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"

namespace bagua {
namespace {

// Operations of every kind that wait for all ranks, and the memory that they use.
struct OneOfEachKind {
  std::vector<Bytes> memory;
  std::vector<OperationPtr> operations;

  OneOfEachKind(Engine* engine, const std::string& prefix) {
    const auto size = static_cast<int64_t>(engine->size());
    memory.reserve(8);
    for (const Kind kind : {Kind::kAllreduce, Kind::kAllgather, Kind::kBroadcast,
                            Kind::kReduceScatter, Kind::kAlltoall, Kind::kBarrier}) {
      const OperationPtr operation = MakeOperation(kind, prefix + " " + Name(kind));
      if (kind != Kind::kBarrier) {
        memory.push_back(ValuesOf(DType::kFloat32, 7 * size, engine->rank()));
        AddTensor(operation.get(), MetaOf(DType::kFloat32, {size, 7}), memory.back(),
                  &memory.back());
      }
      if (kind == Kind::kAlltoall) operation->request.splits.assign(size, 1);
      operations.push_back(operation);
    }
    operations.push_back(engine->RegisterPlan(PlanOf(engine, prefix + " plan"), 0));
    memory.push_back(ValuesOf(DType::kFloat32, 9, engine->rank()));
    operations.push_back(MakeAllreduce("", DType::kFloat32, &memory.back()));
  }

  static std::shared_ptr<Plan> PlanOf(Engine* engine, const std::string& name) {
    PlanOptions options;
    options.name = name;
    options.tensors = {{"p0", MetaOf(DType::kFloat32, {500})},
                       {"p1", MetaOf(DType::kFloat64, {70})}};
    return Plan::Make(options, engine->size()).value();
  }

  void ExpectAllFail(Engine* engine, StatusCode code, const std::vector<std::string>& parts) {
    for (const OperationPtr& operation : operations) {
      std::vector<std::string> all = parts;
      all.push_back(operation->Describe());
      ExpectFails(Await(engine, operation), code, all);
    }
  }
};

void EnqueueAll(Engine* engine, const OneOfEachKind& each) {
  for (const OperationPtr& operation : each.operations) ExpectOk(engine->Enqueue(operation));
}

// What is submitted after a failure ends with it, without waiting for anyone.
void ExpectEverythingFails(Engine* engine, StatusCode code, const std::string& part) {
  const Deadline before = Clock::now();
  OneOfEachKind each(engine, "later");
  EnqueueAll(engine, each);
  each.ExpectAllFail(engine, code, {part});
  EXPECT_LT(Seconds(Clock::now() - before).count(), 5);
}

class FailureTest : public testing::TestWithParam<std::tuple<Fabric, int>> {
 protected:
  static constexpr int kSize = 3;
  Fabric fabric() const { return std::get<0>(GetParam()); }
  // The rank that goes; rank 0 decides the order of operations.
  int victim() const { return std::get<1>(GetParam()); }
  std::string victim_name() const { return StrCat("rank ", victim()); }
};

std::string NameOf(const testing::TestParamInfo<std::tuple<Fabric, int>>& info) {
  return StrCat(Name(std::get<0>(info.param)), "_rank", std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Fabrics, FailureTest,
                         testing::Combine(EveryFabric(), testing::Values(0, 1)), NameOf);

TEST_P(FailureTest, ARankThatLeavesFailsWhatWaitsForIt) {
  Cluster cluster(fabric(), kSize);
  cluster.Run([&](int rank, Engine& engine) {
    ExpectOk(RunAllreduce(&engine, "before", 1000, 1));
    if (rank == victim()) {
      cluster.Destroy(rank);
      return;
    }
    OneOfEachKind each(&engine, "pending");
    EnqueueAll(&engine, each);
    // What is sent to it over TCP meanwhile may find the connection closed before its goodbye is
    // read.
    const std::string how = fabric() == Fabric::kTcp && victim() == 0 ? "" : "left the job";
    each.ExpectAllFail(&engine, StatusCode::kPeerLost, {victim_name(), how});
    ExpectEverythingFails(&engine, StatusCode::kPeerLost, victim_name());
  });
}

TEST_P(FailureTest, ARankThatLeavesWithHalfAPlanFailsItOnAllOthers) {
  Cluster cluster(fabric(), kSize);
  std::barrier gate(kSize);
  cluster.Run([&](int rank, Engine& engine) {
    const auto plan = OneOfEachKind::PlanOf(&engine, "model");
    ExpectOk(RunOne(&engine, engine.RegisterPlan(plan, 0)));
    ExpectOk(engine.FinishStep(plan.get(), Patience()));
    ExpectOk(engine.MakeReady(plan.get(), 0));
    gate.arrive_and_wait();
    if (rank == victim()) {
      engine.Shutdown();
      ExpectFails(engine.MakeReady(plan.get(), 1), StatusCode::kAborted, {"plan 'model'"});
      ExpectFails(engine.FinishStep(plan.get(), Patience()), StatusCode::kAborted, {"shutdown"});
      return;
    }
    ExpectFails(engine.FinishStep(plan.get(), Patience()), StatusCode::kPeerLost,
                {"plan 'model'", victim_name(), "left the job"});
    ExpectFails(engine.MakeReady(plan.get(), 1), StatusCode::kPeerLost, {victim_name()});
    ExpectFails(engine.FinishStep(plan.get(), Patience()), StatusCode::kPeerLost, {victim_name()});
    // The views of the framework stay valid.
    plan->bucket_data(0)[0] = std::byte{1};
    ExpectEverythingFails(&engine, StatusCode::kPeerLost, victim_name());
  });
}

TEST_P(FailureTest, GroupsWithoutTheLeaverGoOn) {
  Cluster cluster(fabric(), kSize);
  std::vector<int> stayers;
  for (int r = 0; r < kSize; ++r)
    if (r != victim()) stayers.push_back(r);
  std::barrier gate(kSize);
  cluster.Run([&](int rank, Engine& engine) {
    const uint32_t group = MustAddGroup(&engine, stayers);
    gate.arrive_and_wait();
    if (rank == victim()) {
      cluster.Destroy(rank);
      gate.arrive_and_wait();
      return;
    }
    gate.arrive_and_wait();
    ExpectFails(RunOne(&engine, MakeBarrier("everyone")), StatusCode::kPeerLost, {victim_name()});
    for (int i = 0; i < 5; ++i) {
      Bytes data = ValuesOf(DType::kInt32, 30000, rank, i);
      ExpectOk(
          RunOne(&engine, MakeAllreduce("stayers", DType::kInt32, &data, ReduceOp::kSum, group)));
      ExpectReduced(data, DType::kInt32, ReduceOp::kSum, stayers, i);
    }
  });
}

class CutTest : public FailureTest {};
INSTANTIATE_TEST_SUITE_P(Fabrics, CutTest,
                         testing::Combine(testing::Values(Fabric::kShm, Fabric::kTcp),
                                          testing::Values(0, 2)),
                         NameOf);

TEST_P(CutTest, ADeadRanksLifelinesFailEverythingAtOnce) {
  Cluster cluster(fabric(), kSize);
  std::barrier gate(kSize);
  cluster.Run([&](int rank, Engine& engine) {
    const auto plan = OneOfEachKind::PlanOf(&engine, "model");
    ExpectOk(RunOne(&engine, engine.RegisterPlan(plan, 0)));
    ExpectOk(engine.MakeReady(plan.get(), 0));
    gate.arrive_and_wait();
    if (rank == victim()) {
      cluster.CutLifelines(rank);
      // Cut off, it hears that it is lost, or finds the others dead.
      ExpectFails(RunOne(&engine, MakeBarrier("never")), StatusCode::kPeerLost, {"rank "});
      return;
    }
    OneOfEachKind each(&engine, "pending");
    EnqueueAll(&engine, each);
    each.ExpectAllFail(&engine, StatusCode::kPeerLost, {victim_name(), "was lost"});
    ExpectFails(engine.FinishStep(plan.get(), Patience()), StatusCode::kPeerLost, {victim_name()});
    ExpectEverythingFails(&engine, StatusCode::kPeerLost, victim_name());
  });
}

TEST_P(CutTest, DeathAmidDataEndsEveryRanksOperations) {
  Cluster cluster(fabric(), kSize);
  cluster.Run([&](int rank, Engine& engine) {
    Status status;
    int ended = 0;
    for (; status.ok() && ended < 100000; ++ended) {
      std::vector<Bytes> data;
      for (int i = 0; i < 3; ++i) data.push_back(ValuesOf(DType::kFloat32, 100003, rank, i));
      std::vector<OperationPtr> operations;
      for (int i = 0; i < 3; ++i) {
        operations.push_back(MakeAllreduce(StrCat("t", i), DType::kFloat32, &data[i]));
        ExpectOk(engine.Enqueue(operations.back()));
      }
      if (rank == victim() && ended == 3) cluster.CutLifelines(rank);
      for (int i = 0; i < 3; ++i) {
        const Status one = Await(&engine, operations[i]);
        if (one.ok() && ended == 0)
          ExpectReduced(data[i], DType::kFloat32, ReduceOp::kSum, {0, 1, 2}, i);
        if (!one.ok()) status = one;
      }
    }
    EXPECT_EQ(status.code(), StatusCode::kPeerLost) << status.message();
    EXPECT_TRUE(rank == victim() || status.message().find(victim_name()) != std::string::npos)
        << status.message();
  });
}

// ---- Ends and repeats ---------------------------------------------------------------------------

struct Heard {
  std::atomic<int> calls{0};
  std::atomic<int> status{-1};
};

void Hear(void* context, int status, const char*) {
  auto* const heard = static_cast<Heard*>(context);
  heard->status = status;
  ++heard->calls;
}

TEST(Shutdown, EndsWhatIsInFlightTellsTheCallbackAndRefusesWhatComes) {
  Cluster cluster(Fabric::kShm, 2);
  cluster.Run([](int rank, Engine& engine) {
    Heard well, badly;
    const OperationPtr ends = MakeBarrier("ends");
    ends->done = Hear;
    ends->context = &well;
    ExpectOk(RunOne(&engine, ends));
    EXPECT_EQ(well.calls, 1);
    EXPECT_EQ(well.status, 0);
    if (rank == 1) return;
    const OperationPtr pending = MakeBarrier("pending");
    pending->done = Hear;
    pending->context = &badly;
    ExpectOk(engine.Enqueue(pending));
    engine.Shutdown();
    engine.Shutdown();
    ASSERT_TRUE(pending->ended());
    ExpectFails(pending->status(), StatusCode::kAborted, {"barrier 'pending'", "shutdown"});
    EXPECT_EQ(badly.calls, 1);
    EXPECT_EQ(badly.status, static_cast<int>(StatusCode::kAborted));
    ExpectFails(engine.Enqueue(MakeBarrier("after")), StatusCode::kNotInitialized, {"init"});
  });
}

TEST(Shutdown, EndsTheWaitsOfOtherThreads) {
  constexpr int kWaiters = 4;
  for (int round = 0; round < (kSanitized ? 20 : 100); ++round) {
    Cluster cluster(Fabric::kShm, 2);
    cluster.Run([](int rank, Engine& engine) {
      std::vector<std::thread> waiters;
      for (int i = 0; i < kWaiters; ++i)
        waiters.emplace_back([&, i] {
          const OperationPtr pending = MakeBarrier(StrCat("pending", rank, i));
          // Refused, or ended by the shutdown of either rank.
          EXPECT_FALSE(RunOne(&engine, pending).ok());
        });
      engine.Shutdown();
      for (std::thread& waiter : waiters) waiter.join();
    });
  }
}

TEST(Shutdown, OfAllRanksAtOnceTakesNoTime) {
  for (const Fabric fabric : {Fabric::kLoopback, Fabric::kShm, Fabric::kTcp})
    for (int round = 0; round < 5; ++round) {
      Cluster cluster(fabric, 3);
      cluster.Run([&](int rank, Engine& engine) {
        ExpectOk(RunAllreduce(&engine, "w", 40000, round));
        const Deadline before = Clock::now();
        cluster.Destroy(rank);
        EXPECT_LT(Seconds(Clock::now() - before).count(), 0.9);
      });
    }
}

// An allreduce between separate arrays needs memory of the tensor's size.
TEST(Memory, ThatOneCollectiveCannotHaveFailsTheJobAndEndsTheOperation) {
  Cluster cluster(Fabric::kLoopback, 2);
  cluster.Run([](int, Engine& engine) {
    const OperationPtr huge = MakeOperation(Kind::kAllreduce, "huge");
    const Bytes in(8);
    Bytes out(8);
    AddTensor(huge.get(), MetaOf(DType::kFloat64, {int64_t{1} << 60}), in, &out);
    const Status status = RunOne(&engine, huge);
    ExpectFails(status, StatusCode::kInternal, {"allreduce 'huge'", "out of memory"});
    ExpectFails(RunOne(&engine, MakeBarrier("later")), StatusCode::kInternal, {"out of memory"});
  });
}

TEST(Names, InFlightAreRefusedAndFreeAgainAfterwards) {
  Cluster cluster(Fabric::kLoopback, 2);
  cluster.Run([](int rank, Engine& engine) {
    for (int round = 0; round < 2; ++round) {
      const OperationPtr first = MakeBarrier("twice");
      if (rank == 0) {
        ExpectOk(engine.Enqueue(first));
        ExpectFails(engine.Enqueue(MakeBarrier("twice")), StatusCode::kInvalidArgument,
                    {"barrier 'twice'", "in flight already", "another name"});
        ExpectOk(RunOne(&engine, MakeBarrier("seen")));
        ExpectOk(Await(&engine, first));
      } else {
        ExpectOk(RunOne(&engine, MakeBarrier("seen")));
        ExpectOk(RunOne(&engine, first));
      }
    }
  });
}

TEST(Start, FailsNamingARankThatDiedMeanwhile) {
  std::vector<Membership> memberships = MakeLocalMemberships(2);
  OnEachRank(2, [&](int rank) {
    Result<Wiring> wiring = ConnectWiring(rank, std::move(memberships[rank]), Patience());
    ExpectOk(wiring.status());
    if (rank == 1) return;
    ExpectFails(Engine::Start(std::move(wiring).value(), UnwatchedConfig(), Patience()).status(),
                StatusCode::kPeerLost, {"rank 1"});
  });
}

TEST(Start, FailsAtItsDeadlineNamingWhomItWaitedFor) {
  std::vector<Membership> memberships = MakeLocalMemberships(2);
  std::vector<std::unique_ptr<Wiring>> wirings(2);
  OnEachRank(2, [&](int rank) {
    Result<Wiring> wiring = ConnectWiring(rank, std::move(memberships[rank]), Patience());
    ExpectOk(wiring.status());
    wirings[rank] = std::make_unique<Wiring>(std::move(wiring).value());
  });
  const Deadline deadline = After(Seconds(0.05));
  ExpectFails(Engine::Start(std::move(*wirings[0]), UnwatchedConfig(), deadline).status(),
              StatusCode::kTimeout, {"rank 1"});
}

TEST(Start, FailsOnEveryRankWhenTheMemoriesAreOfDifferentSize) {
  const auto config_of = [](int rank) {
    Config config = UnwatchedConfig();
    if (rank == 2) config.shm_slot_bytes = 4096;
    return config;
  };
  Cluster cluster(Fabric::kShm, 3, config_of, {});
  for (int rank = 0; rank < 3; ++rank)
    ExpectFails(cluster.starts()[rank], StatusCode::kMismatch,
                {"rank 2", "4096", "16384", "BAGUA_SHM_SLOT_BYTES"});
}

}  // namespace
}  // namespace bagua
