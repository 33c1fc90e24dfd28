// This process's place in the job, as nodes of a graph: a graph that was saved on one job asks the
// job that runs it.

#include <absl/strings/str_cat.h>

#include "tensorflow/conversion.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace bagua_tensorflow {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <int (*kAsk)(int32_t group)>
class PlaceKernel : public tensorflow::OpKernel {
 public:
  explicit PlaceKernel(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("group", &group_));
  }

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES(context, bagua_is_initialized() != 0,
                ToStatus(BAGUA_NOT_INITIALIZED,
                         absl::StrCat(name(), " ran before init(): call init() first")));
    const int answer = kAsk(group_);
    OP_REQUIRES(context, answer >= 0,
                ToStatus(BAGUA_INVALID_ARGUMENT,
                         absl::StrCat(name(), ": this rank is not in process set ", group_,
                                      ", or there is none of that number")));
    Tensor* result = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &result));
    result->scalar<int32_t>()() = answer;
  }

 private:
  int32_t group_ = 0;
};

int LocalRank(int32_t) {
  return bagua_local_rank();
}

int LocalSize(int32_t) {
  return bagua_local_size();
}

int Included(int32_t group) {
  return bagua_group_size(group) < 0 ? -1 : bagua_group_rank(group) >= 0 ? 1 : 0;
}

#define BAGUA_PLACE_OP(NAME, FUNCTION)                       \
  REGISTER_OP(NAME)                                          \
      .Output("value: int32")                                \
      .Attr("group: int = 0")                                \
      .SetIsStateful()                                       \
      .SetShapeFn(tensorflow::shape_inference::ScalarShape); \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device(DEVICE_CPU), PlaceKernel<FUNCTION>)

BAGUA_PLACE_OP("BaguaSize", bagua_group_size);
BAGUA_PLACE_OP("BaguaRank", bagua_group_rank);
BAGUA_PLACE_OP("BaguaLocalSize", LocalSize);
BAGUA_PLACE_OP("BaguaLocalRank", LocalRank);
BAGUA_PLACE_OP("BaguaProcessSetIncluded", Included);

}  // namespace
}  // namespace bagua_tensorflow
