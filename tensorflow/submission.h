// One operation that a kernel hands to the core: the request and all that it points to.
#ifndef BAGUA_TENSORFLOW_SUBMISSION_H_
#define BAGUA_TENSORFLOW_SUBMISSION_H_

#include <absl/status/status.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/c_api.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/tensor.h"

namespace bagua_tensorflow {

// Lives until the core has ended the operation, which may be later than the kernel: a kernel that
// is cancelled or interrupted ends at once, while the core goes on with memory that is held here.
//
// Thread-safety: prepared and started by the kernel's thread. The end comes on any thread.
class Submission : public std::enable_shared_from_this<Submission> {
 public:
  // Told once how the operation ended.
  using Ended = std::function<void(const absl::Status& status, const Submission& submission)>;

  Submission(bagua_kind_t kind, std::string name);
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;
  ~Submission();

  bagua_request_t& request() { return request_; }
  const std::vector<tensorflow::Tensor>& outputs() const { return outputs_; }

  void AddInput(const tensorflow::Tensor& tensor);
  // Where the result of the input of the same number goes.
  void AddOutput(tensorflow::Tensor tensor);
  // The core tells the results' shapes later; memory comes from `allocator`, which outlives the
  // operation: a device's own.
  void AllocateOutputs(tensorflow::Allocator* allocator);
  void Split(const tensorflow::Tensor& rows);
  // alltoall: int64 of one entry for each rank; filled by the end.
  void ReceiveSplits(tensorflow::Tensor counts);

  // Starts the operation and helps with it for at most `help_seconds`. `manager`, which may be
  // null, cancels it: it ends for the kernel then.
  void Start(tensorflow::CancellationManager* manager, double help_seconds, Ended ended);
  // After Start: the calling thread stays until the operation ended, answering signals; false if a
  // signal handler raised, when the operation was ended by Cancel.
  bool Stay();
  // Ends the operation for the kernel, if it has not ended; the core goes on with it.
  void Cancel(const char* why);

 private:
  void FillRequest();
  bool Watch(tensorflow::CancellationManager* manager);
  // The first caller ends the kernel with `status`; others do nothing.
  void End(const absl::Status& status);
  static void OnDone(void* context, int status, const char* message);
  static void* Allocate(void* context, int32_t index, int32_t ndim, const int64_t* shape);

  const std::string name_;
  bagua_request_t request_{};
  std::vector<tensorflow::Tensor> inputs_;
  std::vector<tensorflow::Tensor> outputs_;
  std::vector<std::vector<int64_t>> dims_;   // of the descriptors
  std::vector<bagua_tensor_t> descriptors_;  // inputs, then outputs
  std::vector<int64_t> splits_;
  tensorflow::Tensor received_;
  tensorflow::Allocator* allocator_ = nullptr;

  Ended ended_callback_;
  tensorflow::CancellationManager* manager_ = nullptr;  // until ended_
  tensorflow::CancellationToken token_ = 0;
  uint64_t handle_ = 0;                  // of the kernel's thread: while the operation runs
  std::atomic<bool> ended_{false};       // for the kernel
  std::atomic<bool> core_ended_{false};  // in the core
  std::shared_ptr<Submission> self_;     // until the core ended it
};

}  // namespace bagua_tensorflow

#endif  // BAGUA_TENSORFLOW_SUBMISSION_H_
