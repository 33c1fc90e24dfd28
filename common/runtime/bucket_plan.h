// Cuts a plan's tensors into buckets. Pure: equal input gives equal buckets on every rank.
#ifndef BAGUA_COMMON_RUNTIME_BUCKET_PLAN_H_
#define BAGUA_COMMON_RUNTIME_BUCKET_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/base/types.h"
#include "common/runtime/request.h"

namespace bagua {

struct PlanTensor {
  std::string name;
  TensorMeta meta;
};

// A bucket holds the elements of its tensors, one tensor after another, and behind them one element
// per tensor that tells whether any rank had it ready.
struct Bucket {
  DType dtype = DType::kFloat32;
  size_t first_tensor = 0;
  size_t tensor_count = 0;
  size_t value_count = 0;
  size_t count() const { return value_count + tensor_count; }
  size_t bytes() const { return value_count * SizeOf(dtype); }
};

struct TensorPlace {
  size_t bucket = 0;
  size_t offset = 0;  // elements from the bucket's start
  size_t count = 0;
};

struct BucketPlan {
  std::vector<Bucket> buckets;
  std::vector<TensorPlace> places;  // by tensor
};

// One dtype a bucket; a bucket closes when the next tensor would make it larger than
// `bucket_bytes`, so that one larger tensor has a bucket of its own. With `bucket_of` (per tensor,
// not decreasing; may be empty) buckets follow it instead, and split where the dtype changes.
// kInvalidArgument if bucket_of decreases or has another length, or a dtype is not floating.
Result<BucketPlan> PlanBuckets(const std::vector<PlanTensor>& tensors, size_t bucket_bytes,
                               const std::vector<int32_t>& bucket_of);

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_BUCKET_PLAN_H_
