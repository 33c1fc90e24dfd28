#include "tensorflow/python_border.h"

#include <string>
#include <utility>
#include <vector>

#include "tensorflow/conversion.h"
#include "tensorflow/plan_slot.h"
#include "tensorflow/waiting.h"

namespace bagua_tensorflow {
namespace {

thread_local std::string t_last_error;

PlanTensor ToPlanTensor(const bagua_tensorflow_tensor_t& given) {
  return {given.name, ToDtype(given.dtype), ToShape(given.ndim, given.shape)};
}

}  // namespace
}  // namespace bagua_tensorflow

int bagua_tensorflow_fill_slot(int64_t slot, uint64_t plan, int32_t count,
                               const bagua_tensorflow_tensor_t* tensors) {
  using bagua_tensorflow::PlanSlot;
  std::vector<bagua_tensorflow::PlanTensor> own;
  for (int32_t i = 0; i < count; ++i) own.push_back(bagua_tensorflow::ToPlanTensor(tensors[i]));
  auto made = PlanSlot::Make(plan, std::move(own));
  if (!made.ok()) {
    bagua_tensorflow::t_last_error = std::string(made.status().message());
    return -1;
  }
  bagua_tensorflow::FillSlot(slot, std::move(made).value());
  return 0;
}

void bagua_tensorflow_empty_slot(int64_t slot) {
  bagua_tensorflow::EmptySlot(slot);
}

const char* bagua_tensorflow_last_error(void) {
  return bagua_tensorflow::t_last_error.c_str();
}

void bagua_tensorflow_watch_interrupts(int (*interrupted)(void)) {
  bagua_tensorflow::WatchInterrupts(interrupted);
}
