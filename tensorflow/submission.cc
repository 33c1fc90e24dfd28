#include "tensorflow/submission.h"

#include <utility>

#include "tensorflow/conversion.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/waiting.h"

namespace bagua_tensorflow {
Submission::Submission(bagua_kind_t kind, std::string name) : name_(std::move(name)) {
  request_.kind = kind;
  request_.name = name_.c_str();
  request_.prescale = request_.postscale = 1.0;
  request_.done = &Submission::OnDone;
  request_.context = this;
}

void Submission::AddInput(const tensorflow::Tensor& tensor) {
  inputs_.push_back(tensor);
}

void Submission::AddOutput(tensorflow::Tensor tensor) {
  outputs_.push_back(std::move(tensor));
}

void Submission::AllocateOutputs(tensorflow::Allocator* allocator) {
  allocator_ = allocator;
  outputs_.resize(inputs_.size());
  request_.allocate = &Submission::Allocate;
}

void Submission::Split(const tensorflow::Tensor& rows) {
  const auto values = rows.flat<int64_t>();
  splits_.assign(values.data(), values.data() + values.size());
  if (splits_.empty()) return;
  request_.splits = splits_.data();
  request_.split_count = static_cast<int32_t>(splits_.size());
}

void Submission::ReceiveSplits(tensorflow::Tensor counts) {
  received_ = std::move(counts);
  request_.received_splits = received_.flat<int64_t>().data();
}

void Submission::FillRequest() {
  const size_t given = request_.allocate == nullptr ? outputs_.size() : 0;
  described_.resize(inputs_.size() + given);
  descriptors_.reserve(described_.size());
  for (size_t i = 0; i < described_.size(); ++i) {
    const tensorflow::Tensor& tensor =
        i < inputs_.size() ? inputs_[i] : outputs_[i - inputs_.size()];
    descriptors_.push_back(Describe(tensor, &described_[i].dims));
  }
  request_.tensor_count = static_cast<int32_t>(inputs_.size());
  request_.inputs = descriptors_.data();
  if (given > 0) request_.outputs = descriptors_.data() + inputs_.size();
}

void Submission::Start(tensorflow::OpKernelContext* context, bool wait,
                       std::function<void(Submission&)> set_outputs, Done done) {
  context_ = context;
  set_outputs_ = std::move(set_outputs);
  done_ = std::move(done);
  FillRequest();
  if (!wait && !WatchCancellation()) return;
  const std::shared_ptr<Submission> keep = shared_from_this();
  self_ = keep;
  uint64_t handle = 0;
  const int status = bagua_run(&request_, wait ? kSliceSeconds : kHelpSeconds, &handle);
  if (status != BAGUA_IN_PROGRESS && !core_ended_.load(std::memory_order_acquire)) {
    // Refused at the call: the core does not know the operation.
    self_.reset();
    End(LastStatus(status));
    return;
  }
  if (wait) Wait(status, handle);
  if (handle != 0) bagua_release(handle);
}

void Submission::Wait(int status, uint64_t handle) {
  while (status == BAGUA_IN_PROGRESS) {
    if (Interrupted()) {
      End(absl::CancelledError("interrupted"));
      return;
    }
    status = bagua_wait(handle, kSliceSeconds);
  }
}

bool Submission::WatchCancellation() {
  tensorflow::CancellationManager* const manager = context_->cancellation_manager();
  if (manager == nullptr) return true;
  token_ = manager->get_cancellation_token();
  const std::shared_ptr<Submission> keep = shared_from_this();
  if (manager->RegisterCallback(token_, [keep] {
        keep->End(absl::CancelledError("the step was cancelled while an operation was in flight"));
      }))
    return true;
  End(absl::CancelledError("the step was cancelled before an operation began"));
  return false;
}

void Submission::End(const absl::Status& status) {
  if (ended_.exchange(true, std::memory_order_acq_rel)) return;
  if (status.ok())
    set_outputs_(*this);
  else
    context_->SetStatus(status);
  tensorflow::CancellationManager* const manager = context_->cancellation_manager();
  if (token_ != 0 && manager != nullptr && !absl::IsCancelled(status))
    manager->TryDeregisterCallback(token_);
  const Done done = std::exchange(done_, nullptr);
  set_outputs_ = nullptr;
  context_ = nullptr;
  done();
}

void Submission::OnDone(void* context, int status, const char* message) {
  auto* const own = static_cast<Submission*>(context);
  const std::shared_ptr<Submission> keep = std::move(own->self_);
  own->core_ended_.store(true, std::memory_order_release);
  own->End(ToStatus(status, message));
}

void* Submission::Allocate(void* context, int32_t index, int32_t ndim, const int64_t* shape) {
  auto* const own = static_cast<Submission*>(context);
  tensorflow::Tensor result(own->allocator_, own->inputs_[index].dtype(), ToShape(ndim, shape));
  if (!result.IsInitialized()) return nullptr;  // out of memory: the core fails the operation
  void* const data = result.data();
  own->outputs_[index] = std::move(result);
  return data;
}

}  // namespace bagua_tensorflow
