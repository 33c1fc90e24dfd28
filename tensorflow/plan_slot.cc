#include "tensorflow/plan_slot.h"

#include <absl/strings/str_cat.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "tensorflow/conversion.h"

namespace bagua_tensorflow {
namespace {

struct Slots {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<PlanSlot>> by_number;
};

Slots& AllSlots() {
  static Slots* const slots = new Slots;  // graphs may run while static objects are destroyed
  return *slots;
}

}  // namespace

absl::StatusOr<std::shared_ptr<PlanSlot>> PlanSlot::Make(uint64_t plan,
                                                         std::vector<PlanTensor> tensors) {
  std::shared_ptr<PlanSlot> slot(new PlanSlot(plan));
  const absl::Status found = slot->FindPlaces(std::move(tensors));
  if (!found.ok()) return found;
  return slot;
}

PlanSlot::~PlanSlot() {
  for (void* memory : memories_) bagua_memory_release(memory);
}

absl::Status PlanSlot::FindBuckets(std::vector<std::byte*>* buckets) {
  int32_t count = 0;
  TF_RETURN_IF_ERROR(LastStatus(bagua_plan_bucket_count(plan_, &count)));
  for (int32_t bucket = 0; bucket < count; ++bucket) {
    void* data = nullptr;
    int64_t bytes = 0;
    int32_t dtype = 0;
    TF_RETURN_IF_ERROR(LastStatus(bagua_plan_bucket(plan_, bucket, &data, &bytes, &dtype)));
    memories_.push_back(data);
    buckets->push_back(static_cast<std::byte*>(data));
  }
  return absl::OkStatus();
}

absl::Status PlanSlot::FindPlaces(std::vector<PlanTensor> tensors) {
  std::vector<std::byte*> buckets;
  TF_RETURN_IF_ERROR(FindBuckets(&buckets));
  for (PlanTensor& tensor : tensors) {
    const auto index = static_cast<int32_t>(places_.size());
    int32_t bucket = 0;
    int64_t offset = 0;
    TF_RETURN_IF_ERROR(LastStatus(bagua_plan_tensor_place(plan_, index, &bucket, &offset)));
    const int64_t width = tensorflow::DataTypeSize(tensor.dtype);
    put_.push_back(false);
    places_.push_back({std::move(tensor), buckets[static_cast<size_t>(bucket)] + offset * width});
  }
  return absl::OkStatus();
}

absl::Status PlanSlot::Begin() {
  int32_t buckets = 0;
  if (bagua_plan_bucket_count(plan_, &buckets) != BAGUA_OK) return Gone();
  const std::lock_guard lock(mutex_);
  const auto put = std::count(put_.begin(), put_.end(), true);
  if (begun_ && put > 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "BaguaError: an earlier step ended in an error after ", put, " of ", size(),
        " gradients had been handed over, or it still runs. This rank is out of step with the "
        "others: restart all ranks from their last checkpoint"));
  }
  begun_ = true;
  return absl::OkStatus();
}

absl::Status PlanSlot::Gone() const {
  if (bagua_is_initialized() == 0)
    return ToStatus(BAGUA_NOT_INITIALIZED, "gradients were to be reduced before init()");
  return absl::FailedPreconditionError(
      "BaguaError: this graph was built before shutdown() and init(). Build it anew: make another "
      "tf.function, or call Model.compile again");
}

absl::Status PlanSlot::Check(size_t index, const tensorflow::Tensor& gradient) const {
  if (index >= size()) return absl::InternalError(absl::StrCat("the plan has no tensor ", index));
  const PlanTensor& own = places_[index].tensor;
  if (gradient.dtype() == own.dtype && gradient.shape() == own.shape) return absl::OkStatus();
  return ToStatus(
      BAGUA_INVALID_ARGUMENT,
      absl::StrCat("the gradient of '", own.name, "' is ", DataTypeString(gradient.dtype()),
                   gradient.shape().DebugString(), ", the variable ", DataTypeString(own.dtype),
                   own.shape.DebugString()));
}

absl::Status PlanSlot::Put(size_t index, const tensorflow::Tensor& gradient) {
  {
    const std::lock_guard lock(mutex_);
    if (put_[index])
      return absl::FailedPreconditionError(
          absl::StrCat("BaguaError: the gradient of '", places_[index].tensor.name,
                       "' was handed over already: two steps of one plan run at once"));
    put_[index] = true;
  }
  if (gradient.TotalBytes() != 0)
    std::memcpy(places_[index].data, gradient.data(), gradient.TotalBytes());
  return LastStatus(bagua_plan_ready(plan_, static_cast<int32_t>(index)));
}

absl::StatusOr<bool> PlanSlot::Finish(double seconds) {
  const int status = bagua_plan_finish(plan_, seconds);
  if (status == BAGUA_IN_PROGRESS) return false;
  if (status != BAGUA_OK) return LastStatus(status);
  const std::lock_guard lock(mutex_);
  begun_ = false;
  put_.assign(size(), false);
  return true;
}

absl::Status PlanSlot::Used(uint8_t* used) const {
  return LastStatus(bagua_plan_used(plan_, used));
}

void PlanSlot::TakeInto(size_t index, tensorflow::Tensor* result) const {
  const Place& place = places_[index];
  if (result->TotalBytes() != 0) std::memcpy(result->data(), place.data, result->TotalBytes());
}

void FillSlot(int64_t slot, std::shared_ptr<PlanSlot> plan) {
  Slots& slots = AllSlots();
  const std::lock_guard lock(slots.mutex);
  slots.by_number[slot] = std::move(plan);
}

void EmptySlot(int64_t slot) {
  Slots& slots = AllSlots();
  const std::lock_guard lock(slots.mutex);
  slots.by_number.erase(slot);
}

absl::StatusOr<std::shared_ptr<PlanSlot>> FindSlot(int64_t slot) {
  Slots& slots = AllSlots();
  const std::lock_guard lock(slots.mutex);
  const auto found = slots.by_number.find(slot);
  if (found != slots.by_number.end()) return found->second;
  return absl::FailedPreconditionError(
      "BaguaError: this graph belongs to another process or an earlier job: it was not built here "
      "by a DistributedOptimizer or DistributedGradientTape");
}

}  // namespace bagua_tensorflow
