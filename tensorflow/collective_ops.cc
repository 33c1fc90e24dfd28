// allreduce, allgather, broadcast, reducescatter, alltoall, barrier, join.

#include <absl/strings/str_cat.h>

#include "tensorflow/collective_kernel.h"
#include "tensorflow/conversion.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace bagua_tensorflow {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// The device's own: a context's may track what its step allocates, and ends with it.
tensorflow::Allocator* OutputAllocator(OpKernelContext* context, int output) {
  return context->device()->GetAllocator(context->output_alloc_attr(output));
}

absl::Status AddInputs(OpKernelContext* context, Submission* submission) {
  tensorflow::OpInputList tensors;
  TF_RETURN_IF_ERROR(context->input_list("tensors", &tensors));
  for (const Tensor& tensor : tensors) submission->AddInput(tensor);
  submission->AllocateOutputs(OutputAllocator(context, 0));
  return absl::OkStatus();
}

// A tensor for a result of input `index`'s shape: that of the input where nobody else uses it.
absl::Status ResultLike(OpKernelContext* context, int index, Tensor* result) {
  const TensorShape shape = context->input(index).shape();
  const tensorflow::DataType dtype = context->input_dtype(index);
  const auto forwarded =
      context->forward_input(index, index, dtype, shape, context->output_memory_type(index),
                             context->output_alloc_attr(index));
  if (forwarded != nullptr) {
    *result = *forwarded;
    return absl::OkStatus();
  }
  *result = Tensor(OutputAllocator(context, index), dtype, shape);
  if (result->IsInitialized()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("no memory for ", shape.DebugString()));
}

struct Allreduce {
  static constexpr bagua_kind_t kKind = BAGUA_ALLREDUCE;
  Common common;
  Scaling scaling;

  explicit Allreduce(OpKernelConstruction* construction)
      : common(construction), scaling(construction) {}

  absl::Status Prepare(OpKernelContext* context, Submission* submission) const {
    scaling.Apply(&submission->request());
    for (int i = 0; i < context->num_outputs(); ++i) {
      Tensor result;
      TF_RETURN_IF_ERROR(ResultLike(context, i, &result));
      submission->AddInput(context->input(i));
      submission->AddOutput(std::move(result));
    }
    return absl::OkStatus();
  }
};

struct Broadcast {
  static constexpr bagua_kind_t kKind = BAGUA_BROADCAST;
  Common common;
  int32_t root = 0;

  explicit Broadcast(OpKernelConstruction* construction) : common(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("root", &root));
  }

  absl::Status Prepare(OpKernelContext* context, Submission* submission) const {
    submission->request().root = root;
    Tensor result;
    TF_RETURN_IF_ERROR(ResultLike(context, 0, &result));
    submission->AddInput(context->input(0));
    submission->AddOutput(std::move(result));
    return absl::OkStatus();
  }
};

struct Allgather {
  static constexpr bagua_kind_t kKind = BAGUA_ALLGATHER;
  Common common;

  explicit Allgather(OpKernelConstruction* construction) : common(construction) {}

  absl::Status Prepare(OpKernelContext* context, Submission* submission) const {
    return AddInputs(context, submission);
  }
};

struct Reducescatter {
  static constexpr bagua_kind_t kKind = BAGUA_REDUCESCATTER;
  Common common;
  Scaling scaling;

  explicit Reducescatter(OpKernelConstruction* construction)
      : common(construction), scaling(construction) {}

  absl::Status Prepare(OpKernelContext* context, Submission* submission) const {
    scaling.Apply(&submission->request());
    return AddInputs(context, submission);
  }
};

struct Alltoall {
  static constexpr bagua_kind_t kKind = BAGUA_ALLTOALL;
  Common common;

  explicit Alltoall(OpKernelConstruction* construction) : common(construction) {}

  absl::Status Prepare(OpKernelContext* context, Submission* submission) const {
    const int size = bagua_group_size(common.group);
    if (size < 0) return LastStatus(BAGUA_NOT_INITIALIZED);
    const Tensor& splits = context->input(1);
    if (splits.dims() != 1 || (splits.NumElements() != 0 && splits.NumElements() != size)) {
      return ToStatus(BAGUA_INVALID_ARGUMENT,
                      absl::StrCat("alltoall '", common.name, "': splits have shape ",
                                   splits.shape().DebugString(),
                                   ", expected one entry for each of ", size, " ranks"));
    }
    submission->AddInput(context->input(0));
    submission->AllocateOutputs(OutputAllocator(context, 0));
    submission->Split(splits);
    Tensor* received = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(1, {size}, &received));
    submission->ReceiveSplits(*received);
    return absl::OkStatus();
  }
};

struct Barrier {
  static constexpr bagua_kind_t kKind = BAGUA_BARRIER;
  Common common;

  explicit Barrier(OpKernelConstruction* construction) : common(construction) {}

  absl::Status Prepare(OpKernelContext*, Submission*) const { return absl::OkStatus(); }
};

struct Join {
  static constexpr bagua_kind_t kKind = BAGUA_JOIN;
  Common common;

  explicit Join(OpKernelConstruction* construction) : common(construction) {}

  absl::Status Prepare(OpKernelContext* context, Submission* submission) const {
    submission->AddOutput(Tensor(OutputAllocator(context, 0), tensorflow::DT_INT32, {}));
    return absl::OkStatus();
  }
};

// ---- Shapes -------------------------------------------------------------------------------------

absl::Status SameShapes(InferenceContext* context) {
  for (int i = 0; i < context->num_outputs(); ++i) context->set_output(i, context->input(i));
  return absl::OkStatus();
}

// The first dimension of each result depends on the other ranks; a scalar counts as one row.
absl::Status OtherRows(InferenceContext* context) {
  for (int i = 0; i < context->num_outputs(); ++i) {
    const ShapeHandle input = context->input(i);
    if (!context->RankKnown(input)) {
      context->set_output(i, context->UnknownShape());
    } else if (context->Rank(input) == 0) {
      context->set_output(i, context->Vector(InferenceContext::kUnknownDim));
    } else {
      ShapeHandle result;
      TF_RETURN_IF_ERROR(context->ReplaceDim(input, 0, context->UnknownDim(), &result));
      context->set_output(i, result);
    }
  }
  return absl::OkStatus();
}

absl::Status AlltoallShapes(InferenceContext* context) {
  ShapeHandle rows;
  TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(0), 1, &rows));
  TF_RETURN_IF_ERROR(context->ReplaceDim(rows, 0, context->UnknownDim(), &rows));
  context->set_output(0, rows);
  context->set_output(1, context->Vector(InferenceContext::kUnknownDim));
  return absl::OkStatus();
}

// Stateful: an operation that only some ranks prune, fold or merge leaves the others waiting.
#define BAGUA_COMMON_ATTRS          \
  .Attr("tensor_name: string = ''") \
      .Attr("wait: bool = false")   \
      .Attr("group: int = 0")       \
      .SetIsStateful()
#define BAGUA_SCALING_ATTRS \
  .Attr("reduce_op: int").Attr("prescale_bits: int").Attr("postscale_bits: int")

REGISTER_OP("BaguaAllreduce")
    .Input("tensors: T")
    .BAGUA_ORDER_INPUT.Output("results: T")
    .Attr("T: list(" BAGUA_TENSORFLOW_DTYPES
          ") >= 1") BAGUA_SCALING_ATTRS BAGUA_COMMON_ATTRS.SetShapeFn(SameShapes);

REGISTER_OP("BaguaBroadcast")
    .Input("tensor: T")
    .BAGUA_ORDER_INPUT.Output("result: T")
    .Attr("T: " BAGUA_TENSORFLOW_DTYPES)
    .Attr("root: int") BAGUA_COMMON_ATTRS.SetShapeFn(SameShapes);

REGISTER_OP("BaguaAllgather")
    .Input("tensors: T")
    .BAGUA_ORDER_INPUT.Output("results: T")
    .Attr("T: list(" BAGUA_TENSORFLOW_DTYPES ") >= 1") BAGUA_COMMON_ATTRS.SetShapeFn(OtherRows);

REGISTER_OP("BaguaReducescatter")
    .Input("tensors: T")
    .BAGUA_ORDER_INPUT.Output("results: T")
    .Attr("T: list(" BAGUA_TENSORFLOW_DTYPES
          ") >= 1") BAGUA_SCALING_ATTRS BAGUA_COMMON_ATTRS.SetShapeFn(OtherRows);

REGISTER_OP("BaguaAlltoall")
    .Input("tensor: T")
    .Input("splits: int64")
    .BAGUA_ORDER_INPUT.Output("result: T")
    .Output("received_splits: int64")
    .Attr("T: " BAGUA_TENSORFLOW_DTYPES) BAGUA_COMMON_ATTRS.SetShapeFn(AlltoallShapes);

REGISTER_OP("BaguaBarrier")
    .BAGUA_ORDER_INPUT BAGUA_COMMON_ATTRS.SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("BaguaJoin")
    .BAGUA_ORDER_INPUT.Output("last_rank: int32")
        BAGUA_COMMON_ATTRS.SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_KERNEL_BUILDER(Name("BaguaAllreduce").Device(DEVICE_CPU), CollectiveKernel<Allreduce>);
REGISTER_KERNEL_BUILDER(Name("BaguaBroadcast").Device(DEVICE_CPU), CollectiveKernel<Broadcast>);
REGISTER_KERNEL_BUILDER(Name("BaguaAllgather").Device(DEVICE_CPU), CollectiveKernel<Allgather>);
REGISTER_KERNEL_BUILDER(Name("BaguaReducescatter").Device(DEVICE_CPU),
                        CollectiveKernel<Reducescatter>);
REGISTER_KERNEL_BUILDER(Name("BaguaAlltoall").Device(DEVICE_CPU), CollectiveKernel<Alltoall>);
REGISTER_KERNEL_BUILDER(Name("BaguaBarrier").Device(DEVICE_CPU), CollectiveKernel<Barrier>);
REGISTER_KERNEL_BUILDER(Name("BaguaJoin").Device(DEVICE_CPU), CollectiveKernel<Join>);

}  // namespace
}  // namespace bagua_tensorflow
