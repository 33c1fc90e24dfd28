// The kernel of every operation: prepares a submission, starts it, and lets the core end it.
#ifndef BAGUA_TENSORFLOW_COLLECTIVE_KERNEL_H_
#define BAGUA_TENSORFLOW_COLLECTIVE_KERNEL_H_

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/submission.h"
#include "tensorflow/waiting.h"

namespace bagua_tensorflow {

// Input `order` of every operation: in a function the process's resource of that name, so that
// TensorFlow runs the function's operations, and functions with such operations, one after another
// in the order of the program; empty elsewhere. Last among the inputs.
#define BAGUA_ORDER_INPUT Input("order: N * resource").Attr("N: int >= 0")

// What every operation's node says. Without a name an operation of a graph is called as its node,
// which is the same on all ranks that build the same graph; an eager one is matched by the order in
// which the ranks submit such operations.
struct Common {
  std::string name;
  bool wait = false;  // eager
  int32_t group = 0;

  explicit Common(tensorflow::OpKernelConstruction* construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("tensor_name", &name));
    OP_REQUIRES_OK(construction, construction->GetAttr("wait", &wait));
    OP_REQUIRES_OK(construction, construction->GetAttr("group", &group));
    if (name.empty() && !wait) name = construction->def().name();
  }
};

// A reduction's arguments. Factors travel as the bits of a double: an attribute of type float would
// round them, and ranks of another framework would not agree.
struct Scaling {
  int32_t op = 0;
  double prescale = 1.0;
  double postscale = 1.0;

  explicit Scaling(tensorflow::OpKernelConstruction* construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("reduce_op", &op));
    prescale = Factor(construction, "prescale_bits");
    postscale = Factor(construction, "postscale_bits");
  }

  void Apply(bagua_request_t* request) const {
    request->reduce_op = op;
    request->prescale = prescale;
    request->postscale = postscale;
  }

 private:
  static double Factor(tensorflow::OpKernelConstruction* construction, const char* attribute) {
    int64_t bits = 0;
    construction->GetAttr(attribute, &bits).IgnoreError();
    double value = 0.0;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

// `Operation` is made from the node's attributes, has a Common `common`, a constant `kKind`, and
//   absl::Status Prepare(OpKernelContext*, Submission*) const
// which gives the submission its inputs and outputs.
template <class Operation>
class CollectiveKernel : public tensorflow::AsyncOpKernel {
 public:
  explicit CollectiveKernel(tensorflow::OpKernelConstruction* construction)
      : AsyncOpKernel(construction), operation_(construction) {}

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override {
    const Common& common = operation_.common;
    auto submission = std::make_shared<Submission>(Operation::kKind, common.name);
    submission->request().group = common.group;
    OP_REQUIRES_OK_ASYNC(context, operation_.Prepare(context, submission.get()), done);
    const auto ended = [context, done](const absl::Status& status, const Submission& own) {
      if (!status.ok()) context->SetStatus(status);
      for (size_t i = 0; status.ok() && i < own.outputs().size(); ++i) {
        context->set_output(static_cast<int>(i), own.outputs()[i]);
      }
      done();
    };
    if (common.wait) {
      submission->Start(nullptr, kSliceSeconds, ended);
      submission->Stay();
    } else {
      submission->Start(context->cancellation_manager(), kHelpSeconds, ended);
    }
  }

 private:
  const Operation operation_;
};

}  // namespace bagua_tensorflow

#endif  // BAGUA_TENSORFLOW_COLLECTIVE_KERNEL_H_
