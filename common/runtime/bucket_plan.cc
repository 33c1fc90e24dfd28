#include "common/runtime/bucket_plan.h"

#include <algorithm>

namespace bagua {
namespace {

constexpr size_t kMostBytes = size_t{1} << 56;

Status Check(const std::vector<PlanTensor>& tensors, const std::vector<int32_t>& bucket_of) {
  if (!bucket_of.empty() && bucket_of.size() != tensors.size())
    return Status(
        StatusCode::kInvalidArgument,
        StrCat("bucket_of has ", bucket_of.size(), " entries for ", tensors.size(), " tensors"));
  if (!std::is_sorted(bucket_of.begin(), bucket_of.end()))
    return Status(StatusCode::kInvalidArgument,
                  "bucket_of decreases: give the tensors in the order of their buckets");
  for (const PlanTensor& tensor : tensors)
    if (!IsFloating(tensor.meta.dtype))
      return Status(StatusCode::kInvalidArgument,
                    StrCat("tensor '", tensor.name, "' of a plan is ", Describe(tensor.meta),
                           "; plans take float16, bfloat16, float32 and float64"));
  return {};
}

}  // namespace

Result<BucketPlan> PlanBuckets(const std::vector<PlanTensor>& tensors, size_t bucket_bytes,
                               const std::vector<int32_t>& bucket_of) {
  const Status fits = Check(tensors, bucket_of);
  if (!fits.ok()) return fits;
  BucketPlan plan;
  size_t total_bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorMeta& meta = tensors[i].meta;
    total_bytes += meta.bytes();
    if (meta.bytes() > kMostBytes || total_bytes > kMostBytes)
      return Status(StatusCode::kInvalidArgument,
                    StrCat("tensor '", tensors[i].name, "', ", Describe(meta),
                           ", makes the plan larger than memory can be"));
    bool closes = plan.buckets.empty() || plan.buckets.back().dtype != meta.dtype;
    if (!closes)
      closes = bucket_of.empty() ? plan.buckets.back().bytes() + meta.bytes() > bucket_bytes
                                 : bucket_of[i] != bucket_of[i - 1];
    if (closes) plan.buckets.push_back({meta.dtype, i, 0, 0});
    Bucket& bucket = plan.buckets.back();
    const auto count = static_cast<size_t>(meta.shape.count());
    plan.places.push_back({plan.buckets.size() - 1, bucket.value_count, count});
    bucket.value_count += count;
    ++bucket.tensor_count;
  }
  return plan;
}

}  // namespace bagua
