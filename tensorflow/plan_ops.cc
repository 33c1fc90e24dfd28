// A training step's gradients through a registered plan.
//
// In a graph: PlanBegin gives a token, PlanPut takes each gradient as soon as it is computed, while
// the rest of backward runs, and PlanTake waits for all and returns the reduced ones. Put is not
// stateful, so that gradients go in as they come; the token keeps it from being folded, and Take
// uses what it returns, so that it is not pruned. Eagerly PlanStep does all of it.

#include <absl/strings/str_cat.h>

#include "tensorflow/conversion.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/plan_slot.h"
#include "tensorflow/waiting.h"

namespace bagua_tensorflow {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

class PlanKernel : public OpKernel {
 public:
  explicit PlanKernel(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("slot", &slot_));
  }

 protected:
  absl::StatusOr<std::shared_ptr<PlanSlot>> slot() const { return FindSlot(slot_); }

 private:
  int64_t slot_ = 0;
};

class PlanBegin : public PlanKernel {
 public:
  using PlanKernel::PlanKernel;

  void Compute(OpKernelContext* context) override {
    auto plan = slot();
    OP_REQUIRES_OK(context, plan.status());
    OP_REQUIRES_OK(context, plan.value()->Begin());
    Tensor* token = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &token));
    token->scalar<int32_t>()() = 0;
  }
};

class PlanPut : public PlanKernel {
 public:
  explicit PlanPut(OpKernelConstruction* construction) : PlanKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("index", &index_));
  }

  void Compute(OpKernelContext* context) override {
    auto plan = slot();
    OP_REQUIRES_OK(context, plan.status());
    OP_REQUIRES_OK(context, plan.value()->Put(static_cast<size_t>(index_), context->input(1)));
    // Take may reuse the gradient's memory for the result.
    context->set_output(0, context->input(1));
  }

 private:
  int64_t index_ = 0;
};

// PlanTake, whose inputs were put and are there for their memory, and PlanStep, which puts them.
template <bool kPuts>
class PlanTake : public PlanKernel {
 public:
  explicit PlanTake(OpKernelConstruction* construction) : PlanKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("indices", &indices_));
  }

  void Compute(OpKernelContext* context) override {
    auto found = slot();
    OP_REQUIRES_OK(context, found.status());
    PlanSlot& plan = *found.value();
    if constexpr (kPuts) {
      OP_REQUIRES_OK(context, plan.Begin());
      for (size_t i = 0; i < indices_.size(); ++i) {
        OP_REQUIRES_OK(context, plan.Put(static_cast<size_t>(indices_[i]),
                                         context->input(static_cast<int>(i))));
      }
    }
    OP_REQUIRES_OK(context, plan.Finish([context] { return Stop(context); }));
    OP_REQUIRES_OK(context, SetOutputs(context, plan));
  }

 private:
  static absl::Status Stop(OpKernelContext* context) {
    tensorflow::CancellationManager* const manager = context->cancellation_manager();
    if (manager != nullptr && manager->IsCancelled())
      return absl::CancelledError("the step was cancelled while gradients were reduced");
    if (kPuts && Interrupted()) return absl::CancelledError("interrupted");
    return absl::OkStatus();
  }

  absl::Status SetOutputs(OpKernelContext* context, const PlanSlot& plan) const {
    std::vector<int> input_of(plan.size(), -1);
    for (size_t i = 0; i < indices_.size(); ++i) {
      input_of[static_cast<size_t>(indices_[i])] = static_cast<int>(i);
    }
    for (size_t i = 0; i < plan.size(); ++i) {
      const int output = static_cast<int>(i);
      Tensor* result = nullptr;
      if (input_of[i] >= 0) {
        TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output(
            {input_of[i]}, output, plan.tensor(i).shape, &result));
      } else {
        TF_RETURN_IF_ERROR(context->allocate_output(output, plan.tensor(i).shape, &result));
      }
      plan.TakeInto(i, result);
    }
    Tensor* used = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(static_cast<int>(plan.size()),
                                                {static_cast<int64_t>(plan.size())}, &used));
    return plan.size() == 0 ? absl::OkStatus() : plan.Used(used->flat<uint8_t>().data());
  }

  std::vector<int64_t> indices_;
};

absl::Status SecondInput(InferenceContext* context) {
  context->set_output(0, context->input(1));
  return absl::OkStatus();
}

absl::Status GivenShapes(InferenceContext* context) {
  std::vector<tensorflow::PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes));
  for (size_t i = 0; i < shapes.size(); ++i) {
    ShapeHandle shape;
    TF_RETURN_IF_ERROR(context->MakeShapeFromPartialTensorShape(shapes[i], &shape));
    context->set_output(static_cast<int>(i), shape);
  }
  context->set_output(static_cast<int>(shapes.size()),
                      context->Vector(static_cast<int64_t>(shapes.size())));
  return absl::OkStatus();
}

REGISTER_OP("BaguaPlanBegin")
    .Output("token: int32")
    .Attr("slot: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("BaguaPlanPut")
    .Input("token: int32")
    .Input("gradient: T")
    .Output("same: T")
    .Attr("T: " BAGUA_TENSORFLOW_DTYPES)
    .Attr("slot: int")
    .Attr("index: int")
    .SetShapeFn(SecondInput);

#define BAGUA_PLAN_RESULTS_OP(NAME)                         \
  REGISTER_OP(NAME)                                         \
      .Input("gradients: Tin")                              \
      .Output("results: Tout")                              \
      .Output("used: uint8")                                \
      .Attr("Tin: list(" BAGUA_TENSORFLOW_DTYPES ") >= 0")  \
      .Attr("Tout: list(" BAGUA_TENSORFLOW_DTYPES ") >= 0") \
      .Attr("slot: int")                                    \
      .Attr("indices: list(int) >= 0")                      \
      .Attr("shapes: list(shape) >= 0")                     \
      .SetIsStateful()                                      \
      .SetShapeFn(GivenShapes)

BAGUA_PLAN_RESULTS_OP("BaguaPlanTake");
BAGUA_PLAN_RESULTS_OP("BaguaPlanStep");

REGISTER_KERNEL_BUILDER(Name("BaguaPlanBegin").Device(DEVICE_CPU), PlanBegin);
REGISTER_KERNEL_BUILDER(Name("BaguaPlanPut").Device(DEVICE_CPU), PlanPut);
REGISTER_KERNEL_BUILDER(Name("BaguaPlanTake").Device(DEVICE_CPU), PlanTake<false>);
REGISTER_KERNEL_BUILDER(Name("BaguaPlanStep").Device(DEVICE_CPU), PlanTake<true>);

}  // namespace
}  // namespace bagua_tensorflow
