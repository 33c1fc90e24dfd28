// Registered plans: steps of buckets that every rank fills in its own order.
#include "common/runtime/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"

namespace bagua {
namespace {

using PlanPtr = std::shared_ptr<Plan>;

PlanOptions OptionsOf(const std::string& name,
                      const std::vector<std::pair<DType, int64_t>>& tensors) {
  PlanOptions options;
  options.name = name;
  options.bucket_bytes = 4096;
  for (size_t i = 0; i < tensors.size(); ++i)
    options.tensors.push_back({StrCat("p", i), MetaOf(tensors[i].first, {tensors[i].second})});
  return options;
}

// Several buckets of each type; one tensor larger than a bucket, one empty.
PlanOptions MixedOptions(const std::string& name) {
  return OptionsOf(name, {{DType::kFloat32, 3},
                          {DType::kFloat32, 900},
                          {DType::kFloat32, 0},
                          {DType::kFloat32, 40007},
                          {DType::kFloat64, 1},
                          {DType::kFloat64, 333},
                          {DType::kFloat16, 1025},
                          {DType::kFloat16, 5},
                          {DType::kBfloat16, 77},
                          {DType::kFloat32, 1}});
}

Status Register(Engine* engine, PlanOptions options, PlanPtr* plan) {
  const uint32_t group = options.group;
  Result<PlanPtr> made = Plan::Make(std::move(options), engine->GroupSize(group));
  if (!made.ok()) return made.status();
  *plan = made.value();
  return RunOne(engine, engine->RegisterPlan(*plan, group));
}

PlanPtr MustRegister(Engine* engine, PlanOptions options) {
  PlanPtr plan;
  ExpectOk(Register(engine, std::move(options), &plan));
  return plan;
}

DType DTypeOf(const Plan& plan, size_t tensor) {
  return plan.buckets()[plan.places()[tensor].bucket].dtype;
}

std::byte* PlaceOf(const Plan& plan, size_t tensor) {
  const TensorPlace& place = plan.places()[tensor];
  return plan.bucket_data(place.bucket) + place.offset * SizeOf(DTypeOf(plan, tensor));
}

Bytes Held(const Plan& plan, size_t tensor) {
  const std::byte* const begin = PlaceOf(plan, tensor);
  return Bytes(begin, begin + plan.places()[tensor].count * SizeOf(DTypeOf(plan, tensor)));
}

void Fill(Engine* engine, Plan* plan, size_t tensor, int seed) {
  const Bytes values =
      ValuesOf(DTypeOf(*plan, tensor), plan->places()[tensor].count, engine->rank(), seed);
  if (!values.empty()) std::memcpy(PlaceOf(*plan, tensor), values.data(), values.size());
  ExpectOk(engine->MakeReady(plan, tensor));
}

int SeedOf(int step, size_t tensor) {
  return 20 * step + static_cast<int>(tensor);
}

// Fills every tensor, in an order of the rank's own.
void FillAll(Engine* engine, Plan* plan, int step) {
  std::vector<size_t> order(plan->tensor_count());
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937(100 * step + engine->rank()));
  for (const size_t tensor : order) Fill(engine, plan, tensor, SeedOf(step, tensor));
}

void ExpectAll(const Plan& plan, ReduceOp op, const std::vector<int>& ranks, int step) {
  for (size_t t = 0; t < plan.tensor_count(); ++t) {
    ExpectReduced(Held(plan, t), DTypeOf(plan, t), op, ranks, SeedOf(step, t));
    EXPECT_EQ(plan.used()[t], 1) << t;
  }
}

using Param = std::tuple<Fabric, int>;
class PlanTest : public testing::TestWithParam<Param> {
 protected:
  PlanTest() : cluster_(std::get<0>(GetParam()), std::get<1>(GetParam())) {}
  std::vector<int> ranks() const { return RanksUpTo(cluster_.size()); }
  Cluster cluster_;
};

INSTANTIATE_TEST_SUITE_P(Ranks, PlanTest,
                         testing::Combine(testing::Values(Fabric::kLoopback, Fabric::kShm,
                                                          Fabric::kTcp),
                                          testing::Values(1, 2, 3, 4)),
                         [](const testing::TestParamInfo<Param>& info) {
                           return StrCat(Name(std::get<0>(info.param)), "_",
                                         std::get<1>(info.param));
                         });

TEST_P(PlanTest, AveragesEveryTensorInEveryStep) {
  cluster_.Run([this](int, Engine& engine) {
    const PlanPtr plan = MustRegister(&engine, MixedOptions("model"));
    static constexpr int kSteps = 8;
    for (int step = 1; step <= kSteps; ++step) {
      FillAll(&engine, plan.get(), step);
      ExpectOk(engine.FinishStep(plan.get(), Patience()));
      ExpectAll(*plan, ReduceOp::kAverage, ranks(), step);
    }
    EXPECT_EQ(engine.counters().plan_buckets,
              kSteps * static_cast<int64_t>(plan->buckets().size()));
    int64_t bytes = 0;
    for (const Bucket& bucket : plan->buckets()) bytes += static_cast<int64_t>(bucket.bytes());
    EXPECT_EQ(plan->total_bytes(), kSteps * bytes);
    EXPECT_LE(plan->overlapped_bytes(), plan->total_bytes());
    // Only the registration was negotiated.
    EXPECT_EQ(engine.counters().negotiated_full, 1);
  });
}

TEST_P(PlanTest, MissingTensorsCountAsZerosAndAreToldApart) {
  cluster_.Run([this](int rank, Engine& engine) {
    PlanOptions options = MixedOptions("model");
    options.op = ReduceOp::kSum;
    const PlanPtr plan = MustRegister(&engine, options);
    for (int step = 1; step <= 6; ++step) {
      // Tensor t is with the ranks r for which this holds; some are with none.
      const auto has = [step](int r, size_t t) { return (t * 3 + r + step) % 4 == 1; };
      for (size_t t = 0; t < plan->tensor_count(); ++t)
        if (has(rank, t)) Fill(&engine, plan.get(), t, SeedOf(step, t));
      ExpectOk(engine.FinishStep(plan.get(), Patience()));
      for (size_t t = 0; t < plan->tensor_count(); ++t) {
        std::vector<int> holders;
        for (const int r : ranks())
          if (has(r, t)) holders.push_back(r);
        EXPECT_EQ(plan->used()[t], holders.empty() ? 0 : 1) << "step " << step << " tensor " << t;
        if (!holders.empty()) {
          ExpectReduced(Held(*plan, t), DTypeOf(*plan, t), ReduceOp::kSum, holders,
                        SeedOf(step, t));
          continue;
        }
        const Bytes held = Held(*plan, t);
        EXPECT_EQ(std::count(held.begin(), held.end(), std::byte{0}),
                  static_cast<std::ptrdiff_t>(held.size()));
      }
    }
  });
}

TEST_P(PlanTest, FlagsSurviveFactorsOfAnySize) {
  cluster_.Run([](int rank, Engine& engine) {
    int number = 0;
    for (const double factor : {1e-30, 1e-6, -3.0, 1e6, 1e30})
      for (const bool before : {true, false}) {
        PlanOptions options = OptionsOf(StrCat("plan ", number++), {{DType::kFloat16, 4},
                                                                    {DType::kFloat16, 4},
                                                                    {DType::kBfloat16, 4},
                                                                    {DType::kBfloat16, 4},
                                                                    {DType::kFloat32, 4},
                                                                    {DType::kFloat32, 4},
                                                                    {DType::kFloat64, 4},
                                                                    {DType::kFloat64, 4}});
        (before ? options.prescale : options.postscale) = factor;
        const PlanPtr plan = MustRegister(&engine, options);
        for (int step = 1; step <= 3; ++step) {
          // Even tensors are with rank 0 alone, odd ones with nobody.
          if (rank == 0)
            for (size_t t = 0; t < 8; t += 2) Fill(&engine, plan.get(), t, SeedOf(step, t));
          ExpectOk(engine.FinishStep(plan.get(), Patience()));
          for (size_t t = 0; t < 8; ++t)
            EXPECT_EQ(plan->used()[t], t % 2 == 0) << "factor " << factor << " tensor " << t;
        }
        engine.DropPlan(plan.get());
      }
  });
}

TEST_P(PlanTest, AppliesTheFactors) {
  cluster_.Run([this](int, Engine& engine) {
    PlanOptions options = MixedOptions("model");
    options.prescale = 0.25;
    options.postscale = 2;
    const PlanPtr plan = MustRegister(&engine, options);
    for (int step = 1; step <= 2; ++step) {
      FillAll(&engine, plan.get(), step);
      ExpectOk(engine.FinishStep(plan.get(), Patience()));
      for (size_t t = 0; t < plan->tensor_count(); ++t)
        ExpectReduced(Held(*plan, t), DTypeOf(*plan, t), ReduceOp::kAverage, ranks(),
                      SeedOf(step, t), 0, 0.5);
    }
  });
}

TEST_P(PlanTest, CodecsRoundEachValueOnceAndTheResultOnce) {
  std::mutex mutex;
  std::vector<Bytes> results(2 * 3);  // of rank 0
  std::atomic<bool> filled{false};
  cluster_.Run([&](int rank, Engine& engine) {
    for (const bool half : {true, false}) {
      PlanOptions options =
          OptionsOf(half ? "fp16" : "bf16",
                    {{DType::kFloat32, 4001}, {DType::kFloat64, 1003}, {DType::kFloat32, 17}});
      options.codec = options.name;
      const double rounding = half ? 0x1p-11 : 0x1p-8;
      const PlanPtr plan = MustRegister(&engine, options);
      const auto value = [](int r, size_t t, size_t i) {
        return std::sin(1.0 + static_cast<double>(i) * 0.37 + r * 1.9 + static_cast<double>(t)) *
               (1.0 + static_cast<double>(i % 13));
      };
      for (int step = 0; step < 2; ++step) {
        for (size_t t = 0; t < 3; ++t) {
          for (size_t i = 0; i < plan->places()[t].count; ++i) {
            const double v = value(rank, t, i);
            if (DTypeOf(*plan, t) == DType::kFloat64)
              reference::Put(v, PlaceOf(*plan, t) + i * 8);
            else
              reference::Put(static_cast<float>(v), PlaceOf(*plan, t) + i * 4);
          }
          ExpectOk(engine.MakeReady(plan.get(), t));
        }
        ExpectOk(engine.FinishStep(plan.get(), Patience()));
        for (size_t t = 0; t < 3; ++t) {
          const DType dtype = DTypeOf(*plan, t);
          const Bytes held = Held(*plan, t);
          EXPECT_EQ(plan->used()[t], 1);
          const size_t at = (half ? 0 : 3) + t;
          {
            std::lock_guard lock(mutex);
            if (results[at].empty()) results[at] = held;
            EXPECT_EQ(held, results[at]) << "the ranks hold different bits";
          }
          for (size_t i = 0; i < plan->places()[t].count; ++i) {
            double sum = 0, magnitude = 0;
            for (const int r : ranks()) {
              sum += value(r, t, i);
              magnitude += std::abs(value(r, t, i));
            }
            const double n = cluster_.size();
            const double bound = 1.01 * rounding * (magnitude + std::abs(sum)) / n + 1e-6;
            ASSERT_NEAR(ReadFloating(dtype, held.data() + i * SizeOf(dtype)), sum / n, bound);
          }
        }
      }
    }
  });
}

TEST_P(PlanTest, TwoPlansStepAtTheirOwnPace) {
  cluster_.Run([this](int rank, Engine& engine) {
    const PlanPtr a = MustRegister(&engine, MixedOptions("a"));
    const PlanPtr b = MustRegister(&engine, MixedOptions("b"));
    for (int round = 1; round <= 4; ++round) {
      // Both are under way at once; b is finished first, and a steps twice as often.
      for (size_t t = 0; t < a->tensor_count(); ++t) {
        const size_t other = (t + rank) % b->tensor_count();
        Fill(&engine, a.get(), t, SeedOf(2 * round, t));
        Fill(&engine, b.get(), other, SeedOf(50 + round, other));
      }
      ExpectOk(engine.FinishStep(b.get(), Patience()));
      ExpectOk(engine.FinishStep(a.get(), Patience()));
      ExpectAll(*b, ReduceOp::kAverage, ranks(), 50 + round);
      ExpectAll(*a, ReduceOp::kAverage, ranks(), 2 * round);
      FillAll(&engine, a.get(), 2 * round + 1);
      ExpectOk(engine.FinishStep(a.get(), Patience()));
      ExpectAll(*a, ReduceOp::kAverage, ranks(), 2 * round + 1);
    }
  });
}

TEST_P(PlanTest, DoesNotBlockNegotiatedOperationsNorTheyIt) {
  cluster_.Run([this](int rank, Engine& engine) {
    const PlanPtr plan = MustRegister(&engine, MixedOptions("model"));
    for (int step = 1; step <= 4; ++step) {
      // Even ranks have filled all while odd ones have filled nothing.
      if (rank % 2 == 0) FillAll(&engine, plan.get(), step);
      ExpectOk(RunAllreduce(&engine, "between", 20000, step));
      if (rank % 2 == 1) FillAll(&engine, plan.get(), step);
      Bytes data = ValuesOf(DType::kFloat32, 999, rank, step);
      const OperationPtr beside = MakeAllreduce("beside", DType::kFloat32, &data);
      ExpectOk(engine.Enqueue(beside));
      ExpectOk(engine.FinishStep(plan.get(), Patience()));
      ExpectOk(Await(&engine, beside));
      ExpectReduced(data, DType::kFloat32, ReduceOp::kSum, ranks(), step);
      ExpectAll(*plan, ReduceOp::kAverage, ranks(), step);
    }
  });
}

TEST_P(PlanTest, TensorsMayBeMadeReadyByManyThreads) {
  cluster_.Run([this](int rank, Engine& engine) {
    std::vector<std::pair<DType, int64_t>> tensors;
    for (int i = 0; i < 60; ++i) tensors.push_back({DType::kFloat32, 1 + 50 * (i % 7)});
    const PlanPtr plan = MustRegister(&engine, OptionsOf("many", tensors));
    for (int step = 1; step <= 10; ++step) {
      std::atomic<size_t> next{0};
      OnEachRank(3, [&](int) {
        for (size_t i = next++; i < tensors.size(); i = next++) {
          const size_t t = (i * 7 + rank) % tensors.size();
          Fill(&engine, plan.get(), t, SeedOf(step, t));
        }
      });
      ExpectOk(engine.FinishStep(plan.get(), Patience()));
      ExpectAll(*plan, ReduceOp::kAverage, ranks(), step);
    }
  });
}

TEST_P(PlanTest, OfNoTensorsStepsAtOnce) {
  cluster_.Run([](int, Engine& engine) {
    const PlanPtr plan = MustRegister(&engine, OptionsOf("empty", {}));
    for (int step = 0; step < 3; ++step) ExpectOk(engine.FinishStep(plan.get(), Patience()));
    engine.DropPlan(plan.get());
    ExpectOk(RunAllreduce(&engine, "afterwards", 10, 1));
  });
}

TEST_P(PlanTest, DroppedPlansGiveBackWhatTheyHold) {
  cluster_.Run([this](int, Engine& engine) {
    for (int i = 1; i <= 20; ++i) {
      // The same name again and again, now with a codec and now without.
      PlanOptions options =
          OptionsOf("model", {{DType::kFloat32, 700}, {DType::kFloat32, 600 + i}});
      if (i % 3 == 0) options.codec = "bf16";
      PlanPtr plan = MustRegister(&engine, options);
      const std::weak_ptr<Plan> watched = plan;
      FillAll(&engine, plan.get(), i);
      ExpectOk(engine.FinishStep(plan.get(), Patience()));
      if (i % 3 != 0) ExpectAll(*plan, ReduceOp::kAverage, ranks(), i);
      engine.DropPlan(plan.get());
      plan.reset();
      // Whoever waits takes passes of the loop, which let go of dropped plans.
      const OperationPtr never = MakeBarrier("never submitted");
      const Deadline end = Patience();
      while (!watched.expired() && Clock::now() < end) engine.Wait(*never, After(Seconds(0.001)));
      EXPECT_TRUE(watched.expired());
    }
    ExpectOk(RunAllreduce(&engine, "afterwards", 10, 1));
  });
}

class PlanOfThreeTest : public testing::TestWithParam<Fabric> {};
INSTANTIATE_TEST_SUITE_P(Fabrics, PlanOfThreeTest,
                         testing::Values(Fabric::kLoopback, Fabric::kShm, Fabric::kTcp),
                         [](const auto& info) { return Name(info.param); });

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
    if (rank != 1) {
      PlanOptions options = MixedOptions("pair");
      Result<uint32_t> group = engine.AddGroup({0, 2}, Patience());
      ExpectOk(group.status());
      options.group = group.value();
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
  plan->BeginExchange(0, std::move(exchange), &scheduler, &counters, [] {});
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
  refuse([](PlanOptions* o) { o->bucket_of = {1, 2}; }, {"plan 'model'", "bucket_of"});
  refuse([](PlanOptions* o) { o->tensors[0].meta.dtype = DType::kBool; }, {"'p0'", "bool[7]"});
}

}  // namespace
}  // namespace bagua
