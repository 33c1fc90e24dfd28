// broadcast of variables in place, any number in one node.

#include <absl/strings/str_cat.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "tensorflow/conversion.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/submission.h"

namespace bagua_tensorflow {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;
using VarPtr = tensorflow::core::RefCountPtr<Var>;

// Ends the kernel when the last of several submissions has ended.
class LastOf {
 public:
  LastOf(size_t count, std::function<void()> done) : left_(count), done_(std::move(done)) {}
  void OneEnded() {
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_();
  }

 private:
  std::atomic<size_t> left_;
  std::function<void()> done_;
};

class BroadcastVariables : public tensorflow::AsyncOpKernel {
 public:
  explicit BroadcastVariables(OpKernelConstruction* construction) : AsyncOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("root", &root_));
    OP_REQUIRES_OK(construction, construction->GetAttr("tensor_names", &names_));
    OP_REQUIRES_OK(construction, construction->GetAttr("wait", &wait_));
    OP_REQUIRES_OK(construction, construction->GetAttr("group", &group_));
    OP_REQUIRES(construction, names_.size() == static_cast<size_t>(construction->num_inputs()),
                absl::InvalidArgumentError("tensor_names: one for each variable is needed"));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::vector<VarPtr> variables(names_.size());
    for (size_t i = 0; i < variables.size(); ++i) {
      OP_REQUIRES_OK_ASYNC(
          context,
          LookupResource(context, HandleFromInput(context, static_cast<int>(i)), &variables[i]),
          done);
      OP_REQUIRES_ASYNC(context, variables[i]->is_initialized,
                        ToStatus(BAGUA_INVALID_ARGUMENT,
                                 absl::StrCat("variable '", names_[i], "' has no value yet")),
                        done);
    }
    if (variables.empty()) return done();
    const auto last = std::make_shared<LastOf>(variables.size(), std::move(done));
    for (size_t i = 0; i < variables.size(); ++i) {
      Broadcast(context, std::move(variables[i]), names_[i], last);
    }
  }

 private:
  // The value is received into memory of its own: readers of the variable see the old value or the
  // new one, never a mixture.
  void Broadcast(OpKernelContext* context, VarPtr variable, const std::string& name,
                 const std::shared_ptr<LastOf>& last) const {
    auto submission = std::make_shared<Submission>(BAGUA_BROADCAST, name);
    submission->request().root = root_;
    submission->request().group = group_;
    const bool is_root = bagua_rank() == root_;
    {
      const tensorflow::tf_shared_lock lock(*variable->mu());
      const Tensor& value = *variable->tensor();
      submission->AddInput(value);
      submission->AddOutput(
          is_root ? value : Tensor(context->get_allocator({}), value.dtype(), value.shape()));
    }
    const std::shared_ptr<Var> kept(variable.release(), [](Var* var) { var->Unref(); });
    submission->Start(
        context, wait_,
        [kept, is_root](Submission& ended) {
          if (is_root) return;
          const tensorflow::mutex_lock lock(*kept->mu());
          *kept->tensor() = ended.outputs()[0];
        },
        [last] { last->OneEnded(); });
  }

  int32_t root_ = 0;
  int32_t group_ = 0;
  bool wait_ = false;
  std::vector<std::string> names_;
};

REGISTER_OP("BaguaBroadcastVariables")
    .Input("variables: N * resource")
    .Attr("N: int >= 0")
    .Attr("root: int")
    .Attr("tensor_names: list(string) >= 0")
    .Attr("wait: bool = false")
    .Attr("group: int = 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_KERNEL_BUILDER(Name("BaguaBroadcastVariables").Device(DEVICE_CPU), BroadcastVariables);

}  // namespace
}  // namespace bagua_tensorflow
