// A training step's gradients through a registered plan.
//
// In a graph: PlanBegin gives a token, PlanPut takes each gradient as soon as it is computed, while
// the rest of backward runs, and PlanTake waits for all and returns the reduced ones. Put is not
// stateful, so that gradients go in as they come; the token keeps it from being folded, and Take
// uses what it returns, so that it is not pruned. Eagerly PlanStep does all of it.

#include <absl/strings/str_cat.h>

#include "tensorflow/collective_kernel.h"
#include "tensorflow/conversion.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/env.h"
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

// The plan of a node's slot.
class PlanOf {
 public:
  explicit PlanOf(OpKernelConstruction* construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("slot", &slot_));
  }
  absl::StatusOr<std::shared_ptr<PlanSlot>> operator()() const { return FindSlot(slot_); }

 private:
  int64_t slot_ = 0;
};

class PlanBegin : public OpKernel {
 public:
  explicit PlanBegin(OpKernelConstruction* construction)
      : OpKernel(construction), plan_(construction) {}

  void Compute(OpKernelContext* context) override {
    auto plan = plan_();
    OP_REQUIRES_OK(context, plan.status());
    OP_REQUIRES_OK(context, plan.value()->Begin());
    Tensor* token = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &token));
    token->scalar<int32_t>()() = 0;
  }

 private:
  const PlanOf plan_;
};

class PlanPut : public OpKernel {
 public:
  explicit PlanPut(OpKernelConstruction* construction)
      : OpKernel(construction), plan_(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("index", &index_));
  }

  void Compute(OpKernelContext* context) override {
    auto plan = plan_();
    OP_REQUIRES_OK(context, plan.status());
    const auto index = static_cast<size_t>(index_);
    const Tensor& gradient = context->input(1);
    OP_REQUIRES_OK(context, plan.value()->Check(index, gradient));
    OP_REQUIRES_OK(context, plan.value()->Put(index, gradient));
    // Take may reuse the gradient's memory for the result.
    context->set_output(0, gradient);
  }

 private:
  const PlanOf plan_;
  int64_t index_ = 0;
};

// PlanTake, whose inputs were put and are there for their memory, and PlanStep, which puts them.
template <bool kSteps>
class PlanTake : public tensorflow::AsyncOpKernel {
 public:
  explicit PlanTake(OpKernelConstruction* construction)
      : AsyncOpKernel(construction), plan_(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("indices", &indices_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto found = plan_();
    OP_REQUIRES_OK_ASYNC(context, found.status(), done);
    const std::shared_ptr<PlanSlot> plan = std::move(found).value();
    OP_REQUIRES_ASYNC(context, plan->size() + 1 == static_cast<size_t>(context->num_outputs()),
                      absl::InternalError("the graph does not fit the plan of its slot"), done);
    if constexpr (kSteps) {
      OP_REQUIRES_OK_ASYNC(context, PutAll(context, *plan), done);
      OP_REQUIRES_OK_ASYNC(context, Wait(context, *plan), done);
      OP_REQUIRES_OK_ASYNC(context, SetOutputs(context, *plan), done);
      done();
      return;
    }
    const absl::StatusOr<bool> finished = plan->Finish(kHelpWithPlanSeconds);
    OP_REQUIRES_OK_ASYNC(context, finished.status(), done);
    const auto complete = [this, context, plan, done, wait = !finished.value()] {
      if (wait) OP_REQUIRES_OK_ASYNC(context, Wait(context, *plan), done);
      OP_REQUIRES_OK_ASYNC(context, SetOutputs(context, *plan), done);
      done();
    };
    // Nodes that a peer waits for may be queued behind this one on its thread.
    if (finished.value())
      complete();
    else
      tensorflow::Env::Default()->SchedClosure(complete);
  }

 private:
  absl::Status PutAll(OpKernelContext* context, PlanSlot& plan) const {
    for (size_t i = 0; i < indices_.size(); ++i) {
      TF_RETURN_IF_ERROR(
          plan.Check(static_cast<size_t>(indices_[i]), context->input(static_cast<int>(i))));
    }
    TF_RETURN_IF_ERROR(plan.Begin());
    for (size_t i = 0; i < indices_.size(); ++i) {
      TF_RETURN_IF_ERROR(
          plan.Put(static_cast<size_t>(indices_[i]), context->input(static_cast<int>(i))));
    }
    return absl::OkStatus();
  }

  static absl::Status Wait(OpKernelContext* context, PlanSlot& plan) {
    tensorflow::CancellationManager* const manager = context->cancellation_manager();
    while (true) {
      const absl::StatusOr<bool> finished = plan.Finish(kSliceSeconds);
      if (!finished.ok() || finished.value()) return finished.status();
      if (manager != nullptr && manager->IsCancelled())
        return absl::CancelledError("the step was cancelled while gradients were reduced");
      if (kSteps && Interrupted()) return absl::CancelledError("interrupted");
    }
  }

  absl::Status SetOutputs(OpKernelContext* context, const PlanSlot& plan) const {
    std::vector<int> input_of(plan.size(), -1);
    for (size_t i = 0; i < indices_.size(); ++i) {
      TF_RETURN_IF_ERROR(
          plan.Check(static_cast<size_t>(indices_[i]), context->input(static_cast<int>(i))));
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

  const PlanOf plan_;
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
    .BAGUA_ORDER_INPUT.Output("token: int32")
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
      .BAGUA_ORDER_INPUT.Output("results: Tout")            \
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
