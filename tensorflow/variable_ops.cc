// broadcast of variables in place, any number in one node.

#include <absl/strings/str_cat.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/collective_kernel.h"
#include "tensorflow/conversion.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/submission.h"
#include "tensorflow/waiting.h"

namespace bagua_tensorflow {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;
using VarPtr = std::shared_ptr<Var>;

// Ends the kernel when the last of several submissions has ended, with the first failure.
class LastOf {
 public:
  LastOf(size_t count, OpKernelContext* context, std::function<void()> done)
      : left_(count), context_(context), done_(std::move(done)) {}

  void OneEnded(const absl::Status& status) {
    {
      const std::lock_guard lock(mutex_);
      status_.Update(status);
      if (--left_ > 0) return;
    }
    if (!status_.ok()) context_->SetStatus(status_);
    done_();
  }

  bool failed() {
    const std::lock_guard lock(mutex_);
    return !status_.ok();
  }

 private:
  std::mutex mutex_;
  size_t left_;
  absl::Status status_;
  OpKernelContext* const context_;
  const std::function<void()> done_;
};

class BroadcastVariables : public tensorflow::AsyncOpKernel {
 public:
  explicit BroadcastVariables(OpKernelConstruction* construction)
      : AsyncOpKernel(construction), common_(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("root", &root_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::vector<VarPtr> variables;
    OP_REQUIRES_OK_ASYNC(context, Find(context, &variables), done);
    if (variables.empty()) return done();
    const auto last = std::make_shared<LastOf>(variables.size(), context, std::move(done));
    tensorflow::Allocator* const allocator = context->device()->GetAllocator({});
    tensorflow::CancellationManager* const manager =
        common_.wait ? nullptr : context->cancellation_manager();
    std::vector<std::shared_ptr<Submission>> started;
    for (size_t i = 0; i < variables.size(); ++i) {
      auto submission = Make(variables[i], i, allocator);
      const auto ended = [variable = variables[i], last, root = root_](const absl::Status& status,
                                                                       const Submission& own) {
        if (status.ok() && bagua_rank() != root) Assign(*variable, own.outputs()[0]);
        last->OneEnded(status);
      };
      if (last->failed()) {
        last->OneEnded(absl::CancelledError("an earlier variable failed"));
        continue;
      }
      submission->Start(manager, 0.0, ended);
      started.push_back(std::move(submission));
    }
    // From here on the context may be gone.
    if (common_.wait) StayUntilAllEnded(started);
  }

 private:
  static void StayUntilAllEnded(const std::vector<std::shared_ptr<Submission>>& started) {
    bool interrupted = false;
    for (const std::shared_ptr<Submission>& submission : started) {
      if (interrupted)
        submission->Cancel("interrupted");
      else
        interrupted = !submission->Stay();
    }
  }

  absl::Status Find(OpKernelContext* context, std::vector<VarPtr>* variables) const {
    tensorflow::OpInputList handles;
    TF_RETURN_IF_ERROR(context->input_list("variables", &handles));
    for (int i = 0; i < handles.size(); ++i) {
      tensorflow::core::RefCountPtr<Var> found;
      TF_RETURN_IF_ERROR(LookupResource(context, HandleFromInput(context, i), &found));
      variables->emplace_back(found.release(), [](Var* variable) { variable->Unref(); });
      if (!variables->back()->is_initialized)
        return ToStatus(BAGUA_INVALID_ARGUMENT,
                        absl::StrCat("variable ", i, " of '", common_.name, "' has no value yet"));
    }
    return absl::OkStatus();
  }

  // The value is received into memory of its own: readers of the variable see the old value or the
  // new one, never a mixture.
  std::shared_ptr<Submission> Make(const VarPtr& variable, size_t index,
                                   tensorflow::Allocator* allocator) const {
    auto submission =
        std::make_shared<Submission>(BAGUA_BROADCAST, absl::StrCat(common_.name, ".", index));
    submission->request().root = root_;
    submission->request().group = common_.group;
    const tensorflow::tf_shared_lock lock(*variable->mu());
    const Tensor& value = *variable->tensor();
    submission->AddInput(value);
    submission->AddOutput(bagua_rank() == root_ ? value
                                                : Tensor(allocator, value.dtype(), value.shape()));
    return submission;
  }

  static void Assign(Var& variable, const Tensor& value) {
    const tensorflow::mutex_lock lock(*variable.mu());
    *variable.tensor() = value;
  }

  const Common common_;
  int32_t root_ = 0;
};

REGISTER_OP("BaguaBroadcastVariables")
    .Input("variables: V * resource")
    .BAGUA_ORDER_INPUT.Attr("V: int >= 0")
    .Attr("root: int")
    .Attr("tensor_name: string = ''")
    .Attr("wait: bool = false")
    .Attr("group: int = 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_KERNEL_BUILDER(Name("BaguaBroadcastVariables").Device(DEVICE_CPU), BroadcastVariables);

}  // namespace
}  // namespace bagua_tensorflow
