// PyTorch's operations on the core, in torch's stable ABI: one binary serves several torch
// versions.
//
// Two families. Functional ones (allreduce, allgather, ...) wait inside and return new tensors,
// which is what torch.compile can put into a graph; a failure is a RuntimeError whose text begins
// with the name of the error's class. `start_*` serve the eager operations whose results have a
// shape that is known only when the ranks have agreed: they return the core's handle, or minus a
// bagua_status_t, and `take` gives up the results after a wait.
//
// std::string and std::vector arguments need 2.10.
#undef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION 0x020A000000000000

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/c_api.h"

namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int32_t DtypeOf(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Byte:
      return BAGUA_UINT8;
    case ScalarType::Char:
      return BAGUA_INT8;
    case ScalarType::Short:
      return BAGUA_INT16;
    case ScalarType::Int:
      return BAGUA_INT32;
    case ScalarType::Long:
      return BAGUA_INT64;
    case ScalarType::Half:
      return BAGUA_FLOAT16;
    case ScalarType::BFloat16:
      return BAGUA_BFLOAT16;
    case ScalarType::Float:
      return BAGUA_FLOAT32;
    case ScalarType::Double:
      return BAGUA_FLOAT64;
    case ScalarType::Bool:
      return BAGUA_BOOL;
    default:
      STD_TORCH_CHECK(false,
                      "ValueError: dtype not supported: use uint8, int8, int16, int32, int64, ",
                      "float16, bfloat16, float32, float64 or bool");
  }
  return -1;
}

bagua_tensor_t Describe(const Tensor& tensor) {
  return {.data = tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr(),
          .dtype = DtypeOf(tensor),
          .device = tensor.is_cpu() ? -1 : tensor.get_device_index(),
          .ndim = static_cast<int32_t>(tensor.dim()),
          .shape = tensor.sizes().data()};
}

const char* ErrorName(int status) {
  switch (status) {
    case BAGUA_NOT_INITIALIZED:
      return "NotInitializedError: ";
    case BAGUA_INVALID_ARGUMENT:
      return "ValueError: ";
    case BAGUA_MISMATCH:
      return "MismatchError: ";
    case BAGUA_PEER_LOST:
      return "PeerLostError: ";
    case BAGUA_TIMEOUT:
      return "CollectiveTimeoutError: ";
    case BAGUA_ABORTED:
      return "AbortedError: ";
    default:
      return "BaguaError: ";
  }
}

void Check(int status) {
  STD_TORCH_CHECK(status == BAGUA_OK, ErrorName(status), bagua_last_error());
}

// One operation: the request and everything it points to. Its address must not change while the
// operation runs.
struct Submission {
  std::string name;
  std::vector<Tensor> inputs;   // contiguous
  std::vector<Tensor> outputs;  // made here, or by Allocate on a thread of the core
  std::vector<bagua_tensor_t> input_descriptors;
  std::vector<bagua_tensor_t> output_descriptors;
  std::vector<int64_t> splits;
  bagua_request_t request{};

  Submission(bagua_kind_t kind, const std::vector<Tensor>& tensors, std::string operation_name,
             int64_t group)
      : name(std::move(operation_name)) {
    for (const Tensor& tensor : tensors) {
      inputs.push_back(tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor));
    }
    for (const Tensor& tensor : inputs) input_descriptors.push_back(Describe(tensor));
    request.kind = kind;
    request.group = static_cast<int32_t>(group);
    request.name = name.c_str();
    request.prescale = request.postscale = 1.0;
    request.tensor_count = static_cast<int32_t>(inputs.size());
    request.inputs = input_descriptors.data();
    request.context = this;
  }
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;

  // The result has the input's shape.
  void MakeOutputs() {
    std::vector<Tensor> results;
    for (const Tensor& tensor : inputs) results.push_back(torch::stable::empty_like(tensor));
    Into(std::move(results));
  }

  // The results go into contiguous tensors of the inputs' shapes.
  void Into(std::vector<Tensor> results) {
    outputs = std::move(results);
    for (const Tensor& tensor : outputs) output_descriptors.push_back(Describe(tensor));
    request.outputs = output_descriptors.data();
  }

  // The core asks for the result's memory once its shape is known.
  void AllocateOutputs() {
    outputs = inputs;
    request.allocate = &Submission::Allocate;
  }

  void Reduce(int64_t op, double prescale, double postscale) {
    request.reduce_op = static_cast<int32_t>(op);
    request.prescale = prescale;
    request.postscale = postscale;
  }

  void Split(const Tensor& rows) {
    if (rows.numel() == 0) return;
    const Tensor dense = torch::stable::contiguous(rows);
    const auto* first = static_cast<const int64_t*>(dense.const_data_ptr());
    splits.assign(first, first + dense.numel());
    request.splits = splits.data();
    request.split_count = static_cast<int32_t>(splits.size());
  }

 private:
  static void* Allocate(void* context, int32_t index, int32_t ndim, const int64_t* shape) {
    auto* self = static_cast<Submission*>(context);
    try {
      Tensor result = torch::stable::new_empty(
          self->inputs[index], IntHeaderOnlyArrayRef(shape, static_cast<size_t>(ndim)));
      void* const data = result.mutable_data_ptr();
      self->outputs[index] = std::move(result);
      return data;
    } catch (const std::exception&) {
      return nullptr;  // out of memory: the core fails the operation
    }
  }
};

// ---- Functional ---------------------------------------------------------------------------------

void Run(Submission& submission) {
  uint64_t handle = 0;
  Check(bagua_run(&submission.request, -1.0, &handle));
}

Tensor Allreduce(const Tensor& input, std::string name, int64_t op, double prescale,
                 double postscale, int64_t group) {
  Submission submission(BAGUA_ALLREDUCE, {input}, std::move(name), group);
  submission.MakeOutputs();
  submission.Reduce(op, prescale, postscale);
  Run(submission);
  return submission.outputs[0];
}

std::vector<Tensor> GroupedAllreduce(std::vector<Tensor> inputs, std::string name, int64_t op,
                                     double prescale, double postscale, int64_t group) {
  Submission submission(BAGUA_ALLREDUCE, inputs, std::move(name), group);
  submission.MakeOutputs();
  submission.Reduce(op, prescale, postscale);
  Run(submission);
  return submission.outputs;
}

Tensor Broadcast(const Tensor& input, std::string name, int64_t root, int64_t group) {
  Submission submission(BAGUA_BROADCAST, {input}, std::move(name), group);
  submission.MakeOutputs();
  submission.request.root = static_cast<int32_t>(root);
  Run(submission);
  return submission.outputs[0];
}

Tensor Allgather(const Tensor& input, std::string name, int64_t group) {
  Submission submission(BAGUA_ALLGATHER, {input}, std::move(name), group);
  submission.AllocateOutputs();
  Run(submission);
  return submission.outputs[0];
}

Tensor Reducescatter(const Tensor& input, std::string name, int64_t op, double prescale,
                     double postscale, int64_t group) {
  Submission submission(BAGUA_REDUCESCATTER, {input}, std::move(name), group);
  submission.AllocateOutputs();
  submission.Reduce(op, prescale, postscale);
  Run(submission);
  return submission.outputs[0];
}

std::tuple<Tensor, Tensor> Alltoall(const Tensor& input, const Tensor& splits, std::string name,
                                    int64_t group) {
  Submission submission(BAGUA_ALLTOALL, {input}, std::move(name), group);
  submission.AllocateOutputs();
  submission.Split(splits);
  std::vector<int64_t> received(
      static_cast<size_t>(std::max(bagua_group_size(submission.request.group), 0)));
  submission.request.received_splits = received.data();
  Run(submission);
  const std::vector<int64_t> shape{static_cast<int64_t>(received.size())};
  Tensor rows = torch::stable::new_empty(splits, IntHeaderOnlyArrayRef(shape.data(), 1));
  std::copy(received.begin(), received.end(), static_cast<int64_t*>(rows.mutable_data_ptr()));
  return {submission.outputs[0], rows};
}

// ---- Started, taken later -----------------------------------------------------------------------

// Submissions by handle until they are taken. A dropped one that still runs is kept until a later
// call finds that it ended: its memory must not go away under the core, and a tensor that belongs
// to Python must not be freed on the core's thread.
class Table {
 public:
  int64_t Start(std::unique_ptr<Submission> submission) {
    uint64_t handle = 0;
    const int status = bagua_enqueue(&submission->request, &handle);
    if (status != BAGUA_OK) return -status;
    const std::lock_guard lock(mutex_);
    running_.emplace(handle, std::move(submission));
    return static_cast<int64_t>(handle);
  }

  // Null if there is no such handle.
  std::unique_ptr<Submission> Take(uint64_t handle) {
    const std::lock_guard lock(mutex_);
    auto node = running_.extract(handle);
    return node.empty() ? nullptr : std::move(node.mapped());
  }

  void Drop(uint64_t handle) {
    std::vector<std::unique_ptr<Submission>> ended;
    const std::lock_guard lock(mutex_);
    dropped_.push_back(handle);
    std::erase_if(dropped_, [&](uint64_t old) {
      if (bagua_poll(old) == BAGUA_IN_PROGRESS) return false;
      auto node = running_.extract(old);
      if (!node.empty()) ended.push_back(std::move(node.mapped()));
      bagua_release(old);
      return true;
    });
  }

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::unique_ptr<Submission>> running_;
  std::vector<uint64_t> dropped_;
};

Table& Submissions() {
  static Table* const table = new Table;  // threads of the core may outlive static destruction
  return *table;
}

// `outputs` may be `inputs` (in place); all are contiguous.
int64_t StartAllreduce(std::vector<Tensor> inputs, std::vector<Tensor> outputs, std::string name,
                       int64_t op, double prescale, double postscale, int64_t group) {
  auto submission = std::make_unique<Submission>(BAGUA_ALLREDUCE, inputs, std::move(name), group);
  submission->Into(std::move(outputs));
  submission->Reduce(op, prescale, postscale);
  return Submissions().Start(std::move(submission));
}

int64_t StartAllgather(std::vector<Tensor> inputs, std::string name, int64_t group) {
  auto submission = std::make_unique<Submission>(BAGUA_ALLGATHER, inputs, std::move(name), group);
  submission->AllocateOutputs();
  return Submissions().Start(std::move(submission));
}

int64_t StartReducescatter(std::vector<Tensor> inputs, std::string name, int64_t op,
                           double prescale, double postscale, int64_t group) {
  auto submission =
      std::make_unique<Submission>(BAGUA_REDUCESCATTER, inputs, std::move(name), group);
  submission->AllocateOutputs();
  submission->Reduce(op, prescale, postscale);
  return Submissions().Start(std::move(submission));
}

int64_t StartAlltoall(const Tensor& input, const Tensor& splits, std::string name, int64_t group) {
  auto submission = std::make_unique<Submission>(BAGUA_ALLTOALL, std::vector<Tensor>{input},
                                                 std::move(name), group);
  submission->AllocateOutputs();
  submission->Split(splits);
  return Submissions().Start(std::move(submission));
}

std::vector<Tensor> Take(int64_t handle) {
  const auto submission = Submissions().Take(static_cast<uint64_t>(handle));
  STD_TORCH_CHECK(submission != nullptr, "BaguaError: no operation has the handle ", handle);
  return submission->outputs;
}

void Drop(int64_t handle) {
  Submissions().Drop(static_cast<uint64_t>(handle));
}

}  // namespace

STABLE_TORCH_LIBRARY(bagua_ext, m) {
  m.def(
      "allreduce(Tensor input, str name, int op, float prescale, float postscale, int group)"
      " -> Tensor");
  m.def(
      "grouped_allreduce(Tensor[] inputs, str name, int op, float prescale, float postscale,"
      " int group) -> Tensor[]");
  m.def("broadcast(Tensor input, str name, int root, int group) -> Tensor");
  m.def("allgather(Tensor input, str name, int group) -> Tensor");
  m.def(
      "reducescatter(Tensor input, str name, int op, float prescale, float postscale, int group)"
      " -> Tensor");
  m.def("alltoall(Tensor input, Tensor splits, str name, int group) -> (Tensor, Tensor)");
  m.def(
      "start_allreduce(Tensor[] inputs, Tensor(a!)[] outputs, str name, int op, float prescale,"
      " float postscale, int group) -> int");
  m.def("start_allgather(Tensor[] inputs, str name, int group) -> int");
  m.def(
      "start_reducescatter(Tensor[] inputs, str name, int op, float prescale, float postscale,"
      " int group) -> int");
  m.def("start_alltoall(Tensor input, Tensor splits, str name, int group) -> int");
  m.def("take(int handle) -> Tensor[]");
  m.def("drop(int handle) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(bagua_ext, CompositeExplicitAutograd, m) {
  m.impl("allreduce", TORCH_BOX(&Allreduce));
  m.impl("grouped_allreduce", TORCH_BOX(&GroupedAllreduce));
  m.impl("broadcast", TORCH_BOX(&Broadcast));
  m.impl("allgather", TORCH_BOX(&Allgather));
  m.impl("reducescatter", TORCH_BOX(&Reducescatter));
  m.impl("alltoall", TORCH_BOX(&Alltoall));
  m.impl("start_allreduce", TORCH_BOX(&StartAllreduce));
  m.impl("start_allgather", TORCH_BOX(&StartAllgather));
  m.impl("start_reducescatter", TORCH_BOX(&StartReducescatter));
  m.impl("start_alltoall", TORCH_BOX(&StartAlltoall));
  m.impl("take", TORCH_BOX(&Take));
  m.impl("drop", TORCH_BOX(&Drop));
}
