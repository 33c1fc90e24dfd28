// Registered plans as graphs know them: by a slot, which outlives the plan that fills it.
#ifndef BAGUA_TENSORFLOW_PLAN_SLOT_H_
#define BAGUA_TENSORFLOW_PLAN_SLOT_H_

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tensorflow/core/framework/tensor.h"

namespace bagua_tensorflow {

// What a tensor of a plan is, in the plan's order.
struct PlanTensor {
  std::string name;
  tensorflow::DataType dtype;
  tensorflow::TensorShape shape;
};

// A plan of the core with the places of its tensors. Holds the buckets' memory, not the plan.
//
// A step: Put for each gradient at hand, Finish, TakeInto for each tensor. Thread-safety: Put from
// any thread, each tensor once a step; Finish by one thread after them.
class PlanSlot {
 public:
  static absl::StatusOr<std::shared_ptr<PlanSlot>> Make(uint64_t plan,
                                                        std::vector<PlanTensor> tensors);
  ~PlanSlot();

  size_t size() const { return places_.size(); }
  const PlanTensor& tensor(size_t index) const { return places_[index].tensor; }

  // Begins a step. An error if the plan belongs to an engine that was shut down, or if an earlier
  // step did not end: a graph failed after some of its gradients had been handed over, so that this
  // rank is out of step with the others.
  absl::Status Begin();
  // Whether `gradient` is one of tensor `index`.
  absl::Status Check(size_t index, const tensorflow::Tensor& gradient) const;
  // Copies a gradient that was checked to its place and hands it over.
  absl::Status Put(size_t index, const tensorflow::Tensor& gradient);
  // Helps for at most `seconds` to reduce everything; tensors that were not put count as zeros.
  // True once all is reduced; call again until then.
  absl::StatusOr<bool> Finish(double seconds);
  // Which tensors at least one rank had put in the step that ended: one byte each.
  absl::Status Used(uint8_t* used) const;
  void TakeInto(size_t index, tensorflow::Tensor* result) const;

 private:
  struct Place {
    PlanTensor tensor;
    std::byte* data;
  };

  explicit PlanSlot(uint64_t plan) : plan_(plan) {}
  absl::Status Gone() const;
  absl::Status FindBuckets(std::vector<std::byte*>* buckets);
  absl::Status FindPlaces(std::vector<PlanTensor> tensors);

  const uint64_t plan_;
  std::vector<void*> memories_;  // references to release
  std::vector<Place> places_;
  std::mutex mutex_;
  bool begun_ = false;     // guarded by mutex_
  std::vector<bool> put_;  // guarded by mutex_: in the step that runs
};

// The process's slots. Thread-safety: any thread.
void FillSlot(int64_t slot, std::shared_ptr<PlanSlot> plan);
void EmptySlot(int64_t slot);
absl::StatusOr<std::shared_ptr<PlanSlot>> FindSlot(int64_t slot);

}  // namespace bagua_tensorflow

#endif  // BAGUA_TENSORFLOW_PLAN_SLOT_H_
