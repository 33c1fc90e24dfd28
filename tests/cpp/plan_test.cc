// Registered plans: steps of buckets that every rank fills in its own order.
#include "common/runtime/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"
#include "tests/cpp/plan_steps.h"

namespace bagua {
namespace {

class PlanTest : public testing::TestWithParam<FabricAndSize> {
 protected:
  PlanTest() : cluster_(std::get<0>(GetParam()), std::get<1>(GetParam())) {}
  std::vector<int> ranks() const { return RanksUpTo(cluster_.size()); }
  Cluster cluster_;
};

INSTANTIATE_TEST_SUITE_P(Ranks, PlanTest,
                         testing::Combine(EveryFabric(), testing::Values(1, 2, 3, 4)),
                         NameOfFabricAndSize);

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

}  // namespace
}  // namespace bagua
