// How tensors become buckets.
#include "common/runtime/bucket_plan.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/cpp/operations.h"

namespace bagua {
namespace {

constexpr DType kFloating[] = {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64};

std::vector<PlanTensor> TensorsOf(const std::vector<int64_t>& counts,
                                  DType dtype = DType::kFloat32) {
  std::vector<PlanTensor> tensors;
  for (size_t i = 0; i < counts.size(); ++i)
    tensors.push_back({StrCat("t", i), MetaOf(dtype, {counts[i]})});
  return tensors;
}

BucketPlan PlanOf(const std::vector<PlanTensor>& tensors, size_t bytes,
                  const std::vector<int32_t>& bucket_of = {}) {
  Result<BucketPlan> plan = PlanBuckets(tensors, bytes, bucket_of);
  ExpectOk(plan.status());
  return plan.ok() ? std::move(plan).value() : BucketPlan{};
}

std::vector<size_t> TensorCounts(const BucketPlan& plan) {
  std::vector<size_t> counts;
  for (const Bucket& bucket : plan.buckets) counts.push_back(bucket.tensor_count);
  return counts;
}

// What holds for every plan: tensors in order, without gap, of the bucket's type.
void ExpectSound(const BucketPlan& plan, const std::vector<PlanTensor>& tensors) {
  ASSERT_EQ(plan.places.size(), tensors.size());
  size_t next = 0;
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    const Bucket& bucket = plan.buckets[b];
    EXPECT_EQ(bucket.first_tensor, next);
    EXPECT_GT(bucket.tensor_count, 0u);
    size_t offset = 0;
    for (size_t t = next; t < next + bucket.tensor_count; ++t) {
      EXPECT_EQ(plan.places[t].bucket, b);
      EXPECT_EQ(plan.places[t].offset, offset);
      EXPECT_EQ(plan.places[t].count, static_cast<size_t>(tensors[t].meta.shape.count()));
      EXPECT_EQ(tensors[t].meta.dtype, bucket.dtype);
      offset += plan.places[t].count;
    }
    EXPECT_EQ(bucket.value_count, offset);
    EXPECT_EQ(bucket.count(), offset + bucket.tensor_count);
    next += bucket.tensor_count;
  }
  EXPECT_EQ(next, tensors.size());
}

TEST(BucketPlan, OfNoTensorsHasNoBuckets) {
  EXPECT_TRUE(PlanOf({}, 100).buckets.empty());
}

TEST(BucketPlan, FillsBucketsUpToTheLimit) {
  // 40 bytes each.
  const auto tensors = TensorsOf({10, 10, 10, 10, 10});
  EXPECT_EQ(TensorCounts(PlanOf(tensors, 80)), (std::vector<size_t>{2, 2, 1}));
  EXPECT_EQ(TensorCounts(PlanOf(tensors, 79)), (std::vector<size_t>{1, 1, 1, 1, 1}));
  EXPECT_EQ(TensorCounts(PlanOf(tensors, 200)), (std::vector<size_t>{5}));
}

TEST(BucketPlan, GivesATensorAboveTheLimitABucketOfItsOwn) {
  EXPECT_EQ(TensorCounts(PlanOf(TensorsOf({10, 1000, 10, 10}), 100)),
            (std::vector<size_t>{1, 1, 2}));
  EXPECT_EQ(TensorCounts(PlanOf(TensorsOf({1000, 2000}), 0)), (std::vector<size_t>{1, 1}));
}

TEST(BucketPlan, EmptyTensorsTakePlacesToo) {
  const auto tensors = TensorsOf({0, 0, 5, 0});
  const BucketPlan plan = PlanOf(tensors, 100);
  ExpectSound(plan, tensors);
  EXPECT_EQ(TensorCounts(plan), (std::vector<size_t>{4}));
}

TEST(BucketPlan, SplitsWhereTheTypeChanges) {
  std::vector<PlanTensor> tensors = TensorsOf({4, 4, 4, 4});
  tensors[1].meta.dtype = tensors[2].meta.dtype = DType::kFloat64;
  EXPECT_EQ(TensorCounts(PlanOf(tensors, 1000)), (std::vector<size_t>{1, 2, 1}));
  EXPECT_EQ(TensorCounts(PlanOf(tensors, 1000, {0, 0, 0, 0})), (std::vector<size_t>{1, 2, 1}));
}

TEST(BucketPlan, FollowsTheUsersBucketsWhateverTheirSize) {
  const auto tensors = TensorsOf({1000, 1000, 1, 1, 1});
  EXPECT_EQ(TensorCounts(PlanOf(tensors, 10, {0, 0, 0, 3, 9})), (std::vector<size_t>{3, 1, 1}));
  EXPECT_EQ(TensorCounts(PlanOf(tensors, 10, {-5, 2, 2, 2, 2})), (std::vector<size_t>{1, 4}));
}

TEST(BucketPlan, RefusesBucketsOfTheUserThatDoNotFit) {
  const auto tensors = TensorsOf({1, 2, 3});
  ExpectFails(PlanBuckets(tensors, 10, {0, 1}).status(), StatusCode::kInvalidArgument,
              {"2 entries", "3 tensors"});
  ExpectFails(PlanBuckets(tensors, 10, {0, 2, 1}).status(), StatusCode::kInvalidArgument,
              {"decreases"});
}

TEST(BucketPlan, RefusesTypesThatHaveNoAverage) {
  std::vector<PlanTensor> tensors = TensorsOf({1, 2});
  tensors[1].meta.dtype = DType::kInt32;
  ExpectFails(PlanBuckets(tensors, 10, {}).status(), StatusCode::kInvalidArgument,
              {"'t1'", "int32[2]", "float16, bfloat16, float32 and float64"});
}

TEST(BucketPlan, KeepsOrderTypeAndLimitForAnyTensors) {
  std::mt19937 random(20240229);
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<PlanTensor> tensors;
    const int count = static_cast<int>(random() % 40);
    DType dtype = DType::kFloat32;
    for (int i = 0; i < count; ++i) {
      if (random() % 5 == 0) dtype = kFloating[random() % 4];
      const auto rows = static_cast<int64_t>(random() % (trial % 3 == 0 ? 3000 : 30));
      const auto row = static_cast<int64_t>(1 + random() % 3);
      tensors.push_back({StrCat("t", i), MetaOf(dtype, {rows, row})});
    }
    const size_t limit = random() % 4000;
    const BucketPlan plan = PlanOf(tensors, limit);
    ExpectSound(plan, tensors);
    for (size_t b = 0; b < plan.buckets.size(); ++b) {
      const Bucket& bucket = plan.buckets[b];
      EXPECT_TRUE(bucket.bytes() <= limit || bucket.tensor_count == 1);
      // No bucket ends without need.
      if (b + 1 == plan.buckets.size() || plan.buckets[b + 1].dtype != bucket.dtype) continue;
      const size_t next = plan.buckets[b + 1].first_tensor;
      EXPECT_GT(bucket.bytes() + tensors[next].meta.bytes(), limit);
    }
  }
}

TEST(BucketPlan, IsIdenticalForEqualInput) {
  const auto tensors = TensorsOf({3, 100, 0, 7, 7, 7, 300, 1});
  const BucketPlan first = PlanOf(tensors, 128);
  const BucketPlan second = PlanOf(TensorsOf({3, 100, 0, 7, 7, 7, 300, 1}), 128);
  EXPECT_EQ(TensorCounts(first), TensorCounts(second));
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(first.places[i].bucket, second.places[i].bucket);
    EXPECT_EQ(first.places[i].offset, second.places[i].offset);
  }
}

}  // namespace
}  // namespace bagua
