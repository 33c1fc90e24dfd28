// Plans for the tests, whose tensors each rank fills with values of its own.
#ifndef BAGUA_TESTS_CPP_PLAN_STEPS_H_
#define BAGUA_TESTS_CPP_PLAN_STEPS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/runtime/plan.h"
#include "tests/cpp/operations.h"

namespace bagua {

using PlanPtr = std::shared_ptr<Plan>;

inline PlanOptions OptionsOf(const std::string& name,
                             const std::vector<std::pair<DType, int64_t>>& tensors) {
  PlanOptions options;
  options.name = name;
  options.bucket_bytes = 4096;
  for (size_t i = 0; i < tensors.size(); ++i)
    options.tensors.push_back({StrCat("p", i), MetaOf(tensors[i].first, {tensors[i].second})});
  return options;
}

// Several buckets of each type; one tensor larger than a bucket, one empty.
inline PlanOptions MixedOptions(const std::string& name) {
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

inline Status Register(Engine* engine, PlanOptions options, PlanPtr* plan) {
  const uint32_t group = options.group;
  Result<PlanPtr> made = Plan::Make(std::move(options), engine->GroupSize(group));
  if (!made.ok()) return made.status();
  *plan = made.value();
  return RunOne(engine, engine->RegisterPlan(*plan, group));
}

inline PlanPtr MustRegister(Engine* engine, PlanOptions options) {
  PlanPtr plan;
  ExpectOk(Register(engine, std::move(options), &plan));
  return plan;
}

inline DType DTypeOf(const Plan& plan, size_t tensor) {
  return plan.buckets()[plan.places()[tensor].bucket].dtype;
}

inline std::byte* PlaceOf(const Plan& plan, size_t tensor) {
  const TensorPlace& place = plan.places()[tensor];
  return plan.bucket_data(place.bucket) + place.offset * SizeOf(DTypeOf(plan, tensor));
}

inline Bytes Held(const Plan& plan, size_t tensor) {
  const std::byte* const begin = PlaceOf(plan, tensor);
  return Bytes(begin, begin + plan.places()[tensor].count * SizeOf(DTypeOf(plan, tensor)));
}

inline void Fill(Engine* engine, Plan* plan, size_t tensor, int seed) {
  const Bytes values =
      ValuesOf(DTypeOf(*plan, tensor), plan->places()[tensor].count, engine->rank(), seed);
  if (!values.empty()) std::memcpy(PlaceOf(*plan, tensor), values.data(), values.size());
  ExpectOk(engine->MakeReady(plan, tensor));
}

inline int SeedOf(int step, size_t tensor) {
  return 20 * step + static_cast<int>(tensor);
}

// Fills every tensor, in an order of the rank's own.
inline void FillAll(Engine* engine, Plan* plan, int step) {
  std::vector<size_t> order(plan->tensor_count());
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937(100 * step + engine->rank()));
  for (const size_t tensor : order) Fill(engine, plan, tensor, SeedOf(step, tensor));
}

inline void ExpectAll(const Plan& plan, ReduceOp op, const std::vector<int>& ranks, int step) {
  for (size_t t = 0; t < plan.tensor_count(); ++t) {
    ExpectReduced(Held(plan, t), DTypeOf(plan, t), op, ranks, SeedOf(step, t));
    EXPECT_EQ(plan.used()[t], 1) << t;
  }
}

}  // namespace bagua

#endif  // BAGUA_TESTS_CPP_PLAN_STEPS_H_
