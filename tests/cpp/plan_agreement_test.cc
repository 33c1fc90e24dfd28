// What ranks must agree on about a plan, and what each of them is told when they do not.
#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <string>
#include <vector>

#include "common/runtime/plan.h"
#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"
#include "tests/cpp/plan_steps.h"

namespace bagua {
namespace {

class PlanOfThreeTest : public testing::TestWithParam<Fabric> {};
INSTANTIATE_TEST_SUITE_P(Fabrics, PlanOfThreeTest, EveryFabric(), NameOfFabric);

TEST_P(PlanOfThreeTest, RefusesATensorThatIsReadyAlreadyOrIsNone) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int, Engine& engine) {
    const PlanPtr plan =
        MustRegister(&engine, OptionsOf("model", {{DType::kFloat32, 7}, {DType::kFloat32, 8}}));
    for (int step = 1; step <= 2; ++step) {
      Fill(&engine, plan.get(), 0, SeedOf(step, 0));
      ExpectFails(engine.MakeReady(plan.get(), 0), StatusCode::kInvalidArgument,
                  {"plan 'model'", "'p0'", "twice in one step"});
      ExpectFails(engine.MakeReady(plan.get(), 2), StatusCode::kInvalidArgument,
                  {"2 tensors", "no tensor 2"});
      Fill(&engine, plan.get(), 1, SeedOf(step, 1));
      ExpectOk(engine.FinishStep(plan.get(), Patience()));
      ExpectAll(*plan, ReduceOp::kAverage, {0, 1, 2}, step);
    }
  });
}

TEST_P(PlanOfThreeTest, FinishingGivesTimeBackAtItsDeadline) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    const PlanPtr plan = MustRegister(&engine, OptionsOf("model", {{DType::kFloat32, 70}}));
    for (int step = 1; step <= 2; ++step) {
      if (rank != 1) {
        Fill(&engine, plan.get(), 0, SeedOf(step, 0));
        EXPECT_EQ(engine.FinishStep(plan.get(), After(Seconds(0.005))).code(),
                  StatusCode::kInProgress);
        EXPECT_EQ(engine.FinishStep(plan.get(), Clock::now()).code(), StatusCode::kInProgress);
      }
      ExpectOk(RunOne(&engine, MakeBarrier("the deadlines passed")));
      if (rank == 1) Fill(&engine, plan.get(), 0, SeedOf(step, 0));
      ExpectOk(engine.FinishStep(plan.get(), Patience()));
      ExpectAll(*plan, ReduceOp::kAverage, {0, 1, 2}, step);
    }
  });
}

TEST_P(PlanOfThreeTest, TellsEveryRankWhatDiffersAndTakesTheNextPlan) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    const PlanOptions base = OptionsOf("model", {{DType::kFloat32, 7}, {DType::kFloat32, 8}});
    struct Change {
      void (*apply)(PlanOptions*);
      std::vector<std::string> parts;
    };
    const std::vector<Change> changes = {
        {[](PlanOptions* o) { o->tensors[1].meta = MetaOf(DType::kFloat32, {9}); },
         {"'p1' float32[9]", "'p1' float32[8]"}},
        {[](PlanOptions* o) { o->tensors[0].name = "q"; }, {"'q' float32[7]", "'p0' float32[7]"}},
        {[](PlanOptions* o) { o->tensors.pop_back(); }, {"(nothing)", "'p1' float32[8]"}},
        {[](PlanOptions* o) { o->codec = "fp16"; }, {"codec=fp16", "codec=none"}},
        {[](PlanOptions* o) { o->op = ReduceOp::kSum; }, {"op=Sum", "op=Average"}},
        {[](PlanOptions* o) { o->prescale = 2; }, {"prescale_factor=2", "prescale_factor=1"}},
        {[](PlanOptions* o) { o->bucket_bytes = 9; }, {"bucket_bytes=9", "bucket_bytes=4096"}},
    };
    for (const Change& change : changes) {
      PlanOptions options = base;
      if (rank == 1) change.apply(&options);
      PlanPtr plan;
      std::vector<std::string> parts = change.parts;
      parts.insert(parts.end(), {"plan 'model'", "rank 1 sent", "rank 0 sent"});
      ExpectFails(Register(&engine, options, &plan), StatusCode::kMismatch, parts);
    }
    const PlanPtr plan = MustRegister(&engine, base);
    FillAll(&engine, plan.get(), 1);
    ExpectOk(engine.FinishStep(plan.get(), Patience()));
    ExpectAll(*plan, ReduceOp::kAverage, {0, 1, 2}, 1);
  });
}

TEST_P(PlanOfThreeTest, MayBeMadeAnewByAllRanksInTheSameStep) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int, Engine& engine) {
    for (int generation = 1; generation <= 20; ++generation) {
      const PlanPtr plan = MustRegister(&engine, OptionsOf("model", {{DType::kFloat32, 5000}}));
      for (int step = 1; step <= 3; ++step) {
        FillAll(&engine, plan.get(), generation + step);
        ExpectOk(engine.FinishStep(plan.get(), Patience()));
        ExpectAll(*plan, ReduceOp::kAverage, {0, 1, 2}, generation + step);
      }
      engine.DropPlan(plan.get());
    }
  });
}

TEST_P(PlanOfThreeTest, MadeAnewByOneRankAloneIsAnErrorThatNamesBothOnEveryRank) {
  Cluster cluster(GetParam(), 3);
  std::barrier filled(3);
  cluster.Run([&filled](int rank, Engine& engine) {
    PlanOptions options = OptionsOf("model", {{DType::kFloat32, 5000}});
    const PlanPtr plan = MustRegister(&engine, options);
    FillAll(&engine, plan.get(), 1);
    ExpectOk(engine.FinishStep(plan.get(), Patience()));
    const std::vector<std::string> parts = {"rank 1 registers plan 'model' anew after step 1",
                                            "is in step 2 of the old one"};
    if (rank != 1) FillAll(&engine, plan.get(), 2);
    filled.arrive_and_wait();
    if (rank == 1) {
      engine.DropPlan(plan.get());
      options.tensors.pop_back();
      PlanPtr other;
      ExpectFails(Register(&engine, options, &other), StatusCode::kMismatch, parts);
    } else {
      ExpectFails(engine.FinishStep(plan.get(), Patience()), StatusCode::kMismatch, parts);
    }
  });
}

TEST_P(PlanOfThreeTest, OfAGroupAveragesOverTheGroup) {
  Cluster cluster(GetParam(), 3);
  cluster.Run([](int rank, Engine& engine) {
    const PlanPtr everyone = MustRegister(&engine, MixedOptions("everyone"));
    PlanPtr pair;
    PlanOptions options = MixedOptions("pair");
    options.group = MustAddGroup(&engine, {0, 2});
    if (rank == 1) {
      ExpectFails(Register(&engine, options, &pair), StatusCode::kInvalidArgument,
                  {"plan 'pair'", "rank 1 is not in process set 1 (ranks 0, 2)"});
      pair = nullptr;
    } else {
      pair = MustRegister(&engine, options);
    }
    for (int step = 1; step <= 3; ++step) {
      if (pair) FillAll(&engine, pair.get(), 30 + step);
      FillAll(&engine, everyone.get(), step);
      if (pair) ExpectOk(engine.FinishStep(pair.get(), Patience()));
      if (pair) ExpectAll(*pair, ReduceOp::kAverage, {0, 2}, 30 + step);
      ExpectOk(engine.FinishStep(everyone.get(), Patience()));
      ExpectAll(*everyone, ReduceOp::kAverage, {0, 1, 2}, step);
    }
  });
}

TEST(PlanWait, OfTheNextBucketDoesNotBeginWithTheLast) {
  const PlanPtr plan = Plan::Make(OptionsOf("model", {{DType::kFloat32, 3}}), 1).value();
  Scheduler scheduler;
  Counters counters;
  CopyCounter copies;
  Plan::Exchange exchange;
  exchange.backend = MakeMeshBackend(nullptr, {{0}, 0}, &copies);
  plan->BeginExchange(0, std::move(exchange), &scheduler, &counters,
                      {[] {}, [](const Plan&) {}});
  Task<Status> run = plan->Run();
  for (int step = 0; step < 2; ++step) {
    EXPECT_EQ(plan->waiting_since(), kForever);
    bool published = false;
    ExpectOk(plan->MakeReady(0, &published));
    EXPECT_TRUE(plan->exchanging());
    // Nobody has taken it up: it cannot have waited for anyone.
    EXPECT_EQ(plan->waiting_since(), kForever) << "step " << step;
    scheduler.Poll();
    EXPECT_TRUE(plan->BeginFinish().value());
    EXPECT_TRUE(plan->StepDone());
    ExpectOk(plan->EndFinish());
  }
  scheduler.Fail(Status(StatusCode::kAborted, "end of the test"));
}

TEST(PlanOptions, ThatNoRankCanUseAreRefusedAtOnce) {
  const auto refuse = [](auto change, const std::vector<std::string>& parts) {
    PlanOptions options = OptionsOf("model", {{DType::kFloat32, 7}});
    change(&options);
    ExpectFails(Plan::Make(options, 2).status(), StatusCode::kInvalidArgument, parts);
  };
  refuse([](PlanOptions* o) { o->op = ReduceOp::kMax; }, {"plan 'model'", "Max"});
  refuse([](PlanOptions* o) { o->codec = "zip"; }, {"plan 'model'", "zip", "fp16"});
  refuse([](PlanOptions* o) { o->prescale = NAN; }, {"prescale nan"});
  refuse([](PlanOptions* o) { o->postscale = INFINITY; }, {"postscale inf"});
  refuse([](PlanOptions* o) { o->postscale = 0; }, {"postscale 0", "not 0"});
  refuse([](PlanOptions* o) { o->tensors[0].meta.shape.dims[0] = int64_t{1} << 55; },
         {"'p0'", "larger than memory"});
  refuse([](PlanOptions* o) { o->bucket_of = {1, 2}; }, {"plan 'model'", "bucket_of"});
  refuse([](PlanOptions* o) { o->tensors[0].meta.dtype = DType::kBool; }, {"'p0'", "bool[7]"});
}

}  // namespace
}  // namespace bagua
