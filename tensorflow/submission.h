// One operation that a kernel hands to the core: the request and all that it points to.
#ifndef BAGUA_TENSORFLOW_SUBMISSION_H_
#define BAGUA_TENSORFLOW_SUBMISSION_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/c_api.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace bagua_tensorflow {

// Lives until the core has ended the operation, which may be later than the kernel: a kernel that
// is cancelled or interrupted ends at once, while the core goes on with memory that is held here.
//
// Thread-safety: prepared and started by the kernel's thread. The end comes on any thread.
class Submission : public std::enable_shared_from_this<Submission> {
 public:
  using Done = std::function<void()>;

  Submission(bagua_kind_t kind, std::string name);
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;

  bagua_request_t& request() { return request_; }
  const std::vector<tensorflow::Tensor>& outputs() const { return outputs_; }

  void AddInput(const tensorflow::Tensor& tensor);
  // Where the result of the input of the same number goes.
  void AddOutput(tensorflow::Tensor tensor);
  // The core tells the results' shapes later; memory comes from `allocator`, which outlives the
  // step.
  void AllocateOutputs(tensorflow::Allocator* allocator);
  void Split(const tensorflow::Tensor& rows);
  // alltoall: int64 of one entry for each rank; filled by the end.
  void ReceiveSplits(tensorflow::Tensor counts);

  // Starts the operation. `context` gets an error if it fails, `set_outputs` is called if it does
  // not, and then `done`, once. `wait`: the kernel's thread stays until the end, answering signals;
  // otherwise it helps for a moment only, and the step's cancellation ends the kernel early.
  void Start(tensorflow::OpKernelContext* context, bool wait,
             std::function<void(Submission&)> set_outputs, Done done);

 private:
  struct Described {
    bagua_tensor_t descriptor;
    std::vector<int64_t> dims;
  };

  void FillRequest();
  bool WatchCancellation();
  // The first caller ends the kernel with `status`; others do nothing.
  void End(const absl::Status& status);
  void Wait(int status, uint64_t handle);
  static void OnDone(void* context, int status, const char* message);
  static void* Allocate(void* context, int32_t index, int32_t ndim, const int64_t* shape);

  const std::string name_;
  bagua_request_t request_{};
  std::vector<tensorflow::Tensor> inputs_;
  std::vector<tensorflow::Tensor> outputs_;
  std::vector<Described> described_;
  std::vector<bagua_tensor_t> descriptors_;  // inputs, then outputs
  std::vector<int64_t> splits_;
  tensorflow::Tensor received_;
  tensorflow::Allocator* allocator_ = nullptr;

  tensorflow::OpKernelContext* context_ = nullptr;  // until ended_
  std::function<void(Submission&)> set_outputs_;
  Done done_;
  tensorflow::CancellationToken token_ = 0;
  std::atomic<bool> ended_{false};       // the kernel
  std::atomic<bool> core_ended_{false};  // the operation
  std::shared_ptr<Submission> self_;     // until the operation ended
};

}  // namespace bagua_tensorflow

#endif  // BAGUA_TENSORFLOW_SUBMISSION_H_
