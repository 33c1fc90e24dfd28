#include "tensorflow/submission.h"

#include <utility>

#include "tensorflow/conversion.h"
#include "tensorflow/waiting.h"

namespace bagua_tensorflow {
Submission::Submission(bagua_kind_t kind, std::string name) : name_(std::move(name)) {
  request_.kind = kind;
  request_.name = name_.c_str();
  request_.prescale = request_.postscale = 1.0;
  request_.done = &Submission::OnDone;
  request_.context = this;
}

Submission::~Submission() {
  if (handle_ != 0) bagua_release(handle_);
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
  std::vector<tensorflow::Tensor> described = inputs_;
  if (request_.allocate == nullptr)
    described.insert(described.end(), outputs_.begin(), outputs_.end());
  dims_.resize(described.size());
  for (size_t i = 0; i < described.size(); ++i) {
    descriptors_.push_back(Describe(described[i], &dims_[i]));
  }
  request_.tensor_count = static_cast<int32_t>(inputs_.size());
  request_.inputs = descriptors_.data();
  if (described.size() > inputs_.size()) request_.outputs = descriptors_.data() + inputs_.size();
}

void Submission::Start(tensorflow::CancellationManager* manager, double help_seconds, Ended ended) {
  ended_callback_ = std::move(ended);
  FillRequest();
  if (manager != nullptr && !Watch(manager)) return;
  const std::shared_ptr<Submission> keep = shared_from_this();
  self_ = keep;
  const int status = bagua_run(&request_, help_seconds, &handle_);
  if (status != BAGUA_IN_PROGRESS && !core_ended_.load(std::memory_order_acquire)) {
    // Refused at the call: the core does not know the operation.
    self_.reset();
    End(LastStatus(status));
  }
}

bool Submission::Stay() {
  bool interrupted = false;
  int status = handle_ == 0 ? BAGUA_OK : BAGUA_IN_PROGRESS;
  while (status == BAGUA_IN_PROGRESS && !interrupted) {
    status = bagua_wait(handle_, kSliceSeconds);
    interrupted = status == BAGUA_IN_PROGRESS && Interrupted();
  }
  if (interrupted) Cancel("interrupted");
  return !interrupted;
}

void Submission::Cancel(const char* why) {
  End(absl::CancelledError(why));
}

bool Submission::Watch(tensorflow::CancellationManager* manager) {
  manager_ = manager;
  token_ = manager->get_cancellation_token();
  const std::shared_ptr<Submission> keep = shared_from_this();
  if (manager->RegisterCallback(token_, [keep] {
        keep->Cancel("the step was cancelled while an operation was in flight");
      }))
    return true;
  Cancel("the step was cancelled before an operation began");
  return false;
}

void Submission::End(const absl::Status& status) {
  if (ended_.exchange(true, std::memory_order_acq_rel)) return;
  // Where the step is being cancelled its callbacks are gone already.
  if (manager_ != nullptr && !absl::IsCancelled(status)) manager_->TryDeregisterCallback(token_);
  manager_ = nullptr;
  const Ended ended = std::exchange(ended_callback_, nullptr);
  ended(status, *this);
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
