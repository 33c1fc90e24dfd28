// A registered plan: buckets that are exchanged step after step without negotiation, each when its
// last tensor is ready here and on the other ranks.
//
// Life: made by the registering thread; BeginExchange by the driving thread once all ranks agreed;
// then steps of MakeReady for every tensor and Finish until it says so.
#ifndef BAGUA_COMMON_RUNTIME_PLAN_H_
#define BAGUA_COMMON_RUNTIME_PLAN_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/base/task.h"
#include "common/codec/codec.h"
#include "common/collective/backend.h"
#include "common/collective/shared_buckets.h"
#include "common/runtime/bucket_plan.h"
#include "common/runtime/counters.h"
#include "common/transport/mesh.h"
#include "common/transport/segment.h"

namespace bagua {

struct PlanOptions {
  std::string name;
  uint32_t group = 0;
  std::vector<PlanTensor> tensors;
  size_t bucket_bytes = 0;
  ReduceOp op = ReduceOp::kAverage;
  double prescale = 1.0;
  double postscale = 1.0;
  std::string codec = "none";
  std::string agreed;  // settings of the caller that must be equal on all ranks
  std::vector<int32_t> bucket_of;
};

class Plan {
 public:
  // kInvalidArgument for options that no rank can use; kInternal if memory is short.
  static Result<std::shared_ptr<Plan>> Make(PlanOptions options, int group_size);

  // What the ranks compare: one line per option and tensor.
  std::vector<std::string> Details() const;

  // How the ranks of the group exchange buckets. Exactly one of them is set.
  struct Exchange {
    std::unique_ptr<SharedBuckets> shared;
    std::unique_ptr<CollectiveBackend> backend;
  };
  // What the exchange tells, on the driving thread.
  struct Observer {
    std::function<void()> progressed;        // a bucket ended
    std::function<void(const Plan&)> began;  // the first bucket of step steps_begun() starts
  };
  // With the number that is the same on all ranks.
  void BeginExchange(uint32_t number, Exchange exchange, Scheduler* scheduler, Counters* counters,
                     Observer observer);
  // Exchanges buckets for ever; ends with the scheduler's failure.
  Task<Status> Run();
  // Sticky; on the driving thread, after which no peer touches the buckets any more.
  void Fail(const Status& reason);

  // Any thread: the values of `tensor` stand in their place. True in `*published` if a bucket
  // became complete. kInvalidArgument if it was ready already; the plan's failure if it has one.
  Status MakeReady(size_t tensor, bool* published);
  // One thread at a time. The first call of a step writes zeros for what is not ready and publishes
  // every bucket; true if it did so now.
  Result<bool> BeginFinish();
  // Whether every bucket of the step was exchanged, or the plan failed.
  bool StepDone() const;
  // After StepDone: closes the step.
  Status EndFinish();

  // Driving thread, while this rank has joined and its users leave the plan alone: makes a step
  // that others began, all zeros; EndService closes it once it is done, and tells whether it was.
  void BeginService();
  bool EndService();
  // Any thread: between the two.
  bool serving() const { return serving_.load(std::memory_order_acquire); }
  // Whether tensors of the step under way were made ready, by the thread that does so.
  bool step_begun() const;

  size_t tensor_count() const { return places().size(); }
  const std::vector<TensorPlace>& places() const { return plan_.places; }
  const std::vector<Bucket>& buckets() const { return plan_.buckets; }
  const std::string& name() const { return options_.name; }
  uint32_t group() const { return options_.group; }
  // From registration on.
  uint32_t number() const { return number_; }
  bool registered() const { return registered_.load(std::memory_order_acquire); }
  uint64_t steps_finished() const { return step_.load(std::memory_order_acquire) - 1; }
  // Driving thread: the steps whose first bucket was started.
  uint64_t steps_begun() const { return steps_begun_; }
  std::byte* bucket_data(size_t bucket) const { return segment_->data() + layout_.begin[bucket]; }
  const std::shared_ptr<Segment>& segment() const { return segment_; }
  const BucketLayout& layout() const { return layout_; }
  bool uses_codec() const { return codec_ != nullptr; }
  // used[i]: at least one rank had tensor i ready in the step that ended last.
  const std::vector<uint8_t>& used() const { return used_; }
  int64_t overlapped_bytes() const { return overlapped_bytes_; }
  int64_t total_bytes() const { return total_bytes_; }

  // Driving thread: whether a bucket is published here and not exchanged.
  bool exchanging() const;
  // Any thread: nothing of the step under way is missing.
  bool all_published() const { return missing_buckets_.load(std::memory_order_acquire) == 0; }
  // Since when it waits for others to make a bucket ready; kForever if it does not.
  Deadline waiting_since() const { return exchanging() ? exchange_since_ : kForever; }
  std::string DescribeExchange() const;
  void Drop() { dropped_.store(true, std::memory_order_release); }
  bool dropped() const { return dropped_.load(std::memory_order_acquire); }
  bool failed() const { return failed_.load(std::memory_order_acquire); }

 private:
  Plan(PlanOptions options, BucketPlan plan, const Codec* codec, BucketLayout layout,
       std::shared_ptr<Segment> segment, int group_size);
  void CountDown(size_t bucket, bool* published);
  std::byte* flag(size_t tensor) const;
  DType dtype_of(size_t tensor) const;
  Task<Status> ExchangeBucket(size_t bucket);
  Task<Status> ExchangeEncoded(size_t bucket, Tag tag);
  Reduction HowTo(DType dtype) const;
  Status failure() const;

  const PlanOptions options_;
  const BucketPlan plan_;
  const Codec* const codec_;  // null: none
  const BucketLayout layout_;
  const std::shared_ptr<Segment> segment_;
  Scaling scaling_;
  double used_flag_ = 1.0;
  ReduceOp reduce_op_;

  uint32_t number_ = 0;
  Exchange exchange_;
  Scheduler* scheduler_ = nullptr;
  Counters* counters_ = nullptr;
  Observer observer_;
  uint64_t steps_begun_ = 0;
  Bytes encoded_;

  // Of the step under way.
  std::unique_ptr<std::atomic<uint8_t>[]> ready_;       // by tensor
  std::unique_ptr<std::atomic<uint32_t>[]> remaining_;  // by bucket: tensors not ready
  std::unique_ptr<std::atomic<uint64_t>[]> published_;  // by bucket: the last step published
  std::atomic<size_t> missing_buckets_{0};              // not published
  std::atomic<uint64_t> exchanged_{0};                  // buckets, over all steps
  std::atomic<uint64_t> step_{1};
  bool finishing_ = false;
  Deadline exchange_since_ = kForever;

  std::vector<uint8_t> used_;
  int64_t overlapped_bytes_ = 0;
  int64_t total_bytes_ = 0;
  std::atomic<bool> registered_{false};
  std::atomic<bool> serving_{false};
  std::atomic<bool> dropped_{false};
  std::atomic<bool> failed_{false};
  mutable std::mutex failure_mutex_;
  Status failure_;  // guarded by failure_mutex_
};

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_PLAN_H_
