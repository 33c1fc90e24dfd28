#include "common/c_api/convert.h"

#include <unistd.h>

#include <span>

#include "common/runtime/validate.h"

namespace bagua {
namespace {

constexpr int32_t kLeastSecretBytes = 16;

Status Invalid(const std::string& what) {
  return Status(StatusCode::kInvalidArgument, what);
}

std::string TextOf(const char* text) {
  return text == nullptr ? std::string() : text;
}

Status ToMeta(int32_t dtype, int32_t device, int32_t ndim, const int64_t* dims, TensorMeta* meta) {
  if (dtype < 0 || dtype >= kDTypeCount) return Invalid(StrCat("unknown dtype ", dtype));
  if (ndim < 0 || ndim > kMaxDims)
    return Invalid(StrCat("a tensor of ", ndim, " dimensions; at most ", kMaxDims, " are allowed"));
  if (device < kCpu) return Invalid(StrCat("unknown device ", device));
  meta->dtype = static_cast<DType>(dtype);
  meta->device = device;
  meta->shape.ndim = ndim;
  int64_t count = 1;
  for (int i = 0; i < ndim; ++i) {
    if (dims[i] < 0) return Invalid(StrCat("a dimension of ", dims[i]));
    meta->shape.dims[i] = dims[i];
    if (__builtin_mul_overflow(count, dims[i], &count) || count > (int64_t{1} << 60))
      return Invalid("a tensor of more elements than memory can hold");
  }
  return {};
}

bool NeedsOutput(Kind kind) {
  return kind == Kind::kAllreduce || kind == Kind::kBroadcast;
}

Status AddTensor(const bagua_tensor_t& input, const bagua_tensor_t* output, Operation* operation) {
  TensorMeta meta;
  BAGUA_RETURN_IF_ERROR(ToMeta(input.dtype, input.device, input.ndim, input.shape, &meta));
  if (input.data == nullptr && meta.bytes() > 0) return Invalid("an input without memory");
  operation->inputs.push_back(static_cast<const std::byte*>(input.data));
  operation->request.tensors.push_back(meta);
  if (!NeedsOutput(operation->request.kind)) return {};
  void* const data = output != nullptr ? output->data : input.data;
  if (data == nullptr && meta.bytes() > 0) return Invalid("an output without memory");
  operation->outputs.push_back(static_cast<std::byte*>(data));
  if (output == nullptr) return {};
  TensorMeta to;
  BAGUA_RETURN_IF_ERROR(ToMeta(output->dtype, output->device, output->ndim, output->shape, &to));
  if (to.dtype != meta.dtype || to.shape.count() != meta.shape.count())
    return Invalid(StrCat("input ", Describe(meta), " and output ", Describe(to), " differ"));
  return {};
}

Status CheckEnumerations(const bagua_request_t& request) {
  if (request.kind < 0 || request.kind > BAGUA_JOIN)
    return Invalid(StrCat("unknown kind of operation ", request.kind));
  if (request.reduce_op < 0 || request.reduce_op >= kReduceOpCount)
    return Invalid(StrCat("unknown reduce op ", request.reduce_op));
  if (request.group < 0) return Invalid(StrCat("unknown group ", request.group));
  if (request.tensor_count < 0 || (request.tensor_count > 0 && request.inputs == nullptr))
    return Invalid(StrCat(request.tensor_count, " tensors without inputs"));
  if (request.split_count < 0 || (request.split_count > 0 && request.splits == nullptr))
    return Invalid(StrCat(request.split_count, " splits without values"));
  return {};
}

// Where the last rank to join is written.
Status AddJoinOutput(const bagua_tensor_t& output, Operation* operation) {
  TensorMeta to;
  BAGUA_RETURN_IF_ERROR(ToMeta(output.dtype, output.device, output.ndim, output.shape, &to));
  if (to.dtype != DType::kInt32 || to.shape.count() != 1 || to.device != kCpu ||
      output.data == nullptr)
    return Invalid(StrCat("join: the output is one int32 on the CPU, got ", Describe(to)));
  operation->outputs.push_back(static_cast<std::byte*>(output.data));
  return {};
}

}  // namespace

Result<OperationPtr> ToOperation(const bagua_request_t* request, int group_size) {
  if (request == nullptr) return Invalid("no request");
  const Status known = CheckEnumerations(*request);
  if (!known.ok()) return known;
  auto operation = std::make_shared<Operation>();
  Request& own = operation->request;
  operation->name = TextOf(request->name);
  own.kind = static_cast<Kind>(request->kind);
  own.group = static_cast<uint32_t>(request->group);
  own.op = static_cast<ReduceOp>(request->reduce_op);
  own.root = request->root;
  own.prescale = request->prescale;
  own.postscale = request->postscale;
  operation->allocate = request->allocate;
  operation->done = request->done;
  operation->context = request->context;
  operation->received_splits_out = request->received_splits;
  if (own.kind == Kind::kJoin) {
    operation->name = kJoinName;
    if (request->outputs != nullptr) {
      const Status added = AddJoinOutput(request->outputs[0], operation.get());
      if (!added.ok()) return added;
    }
  }
  for (int32_t i = 0; i < request->tensor_count; ++i) {
    const bagua_tensor_t* output = request->outputs != nullptr ? &request->outputs[i] : nullptr;
    const Status added = AddTensor(request->inputs[i], output, operation.get());
    if (!added.ok()) return added.WithContext(operation->Describe());
  }
  if (own.kind == Kind::kAlltoall && own.tensors.size() == 1 && own.tensors[0].shape.ndim > 0) {
    if (request->splits != nullptr) {
      own.splits.assign(request->splits, request->splits + request->split_count);
    } else if (group_size > 0) {
      Result<std::vector<int64_t>> even = EvenSplits(*operation, group_size);
      if (!even.ok()) return even.status();
      own.splits = std::move(even).value();
    }
  }
  return operation;
}

Result<std::vector<int>> ToRanks(const int32_t* ranks, int32_t count) {
  if (count < 0 || (count > 0 && ranks == nullptr))
    return Invalid(StrCat("a process set of ", count, " ranks without a list"));
  return std::vector<int>(ranks, ranks + count);
}

Result<PlanOptions> ToPlanOptions(const bagua_plan_options_t* options) {
  if (options == nullptr) return Invalid("no plan options");
  PlanOptions own;
  own.name = TextOf(options->name);
  if (own.name.empty()) return Invalid("a plan needs a name");
  if (options->group < 0) return Invalid(StrCat("unknown group ", options->group));
  if (options->bucket_bytes < 0) return Invalid(StrCat("bucket_bytes is ", options->bucket_bytes));
  if (options->reduce_op < 0 || options->reduce_op >= kReduceOpCount)
    return Invalid(StrCat("unknown reduce op ", options->reduce_op));
  if (options->tensor_count < 0 || (options->tensor_count > 0 && options->tensors == nullptr))
    return Invalid(StrCat(options->tensor_count, " tensors without descriptions"));
  own.group = static_cast<uint32_t>(options->group);
  own.bucket_bytes = static_cast<size_t>(options->bucket_bytes);
  own.op = static_cast<ReduceOp>(options->reduce_op);
  own.prescale = options->prescale;
  own.postscale = options->postscale;
  if (options->codec != nullptr) own.codec = options->codec;
  own.agreed = TextOf(options->agreed);
  for (int32_t i = 0; i < options->tensor_count; ++i) {
    const bagua_plan_tensor_t& tensor = options->tensors[i];
    PlanTensor entry;
    entry.name = TextOf(tensor.name);
    const Status fits = ToMeta(tensor.dtype, kCpu, tensor.ndim, tensor.shape, &entry.meta);
    if (!fits.ok())
      return fits.WithContext(StrCat("plan '", own.name, "', tensor '", entry.name, "'"));
    own.tensors.push_back(std::move(entry));
    if (options->bucket_of != nullptr) own.bucket_of.push_back(options->bucket_of[i]);
  }
  return own;
}

Result<BootstrapOptions> ToBootstrapOptions(const bagua_init_options_t* options) {
  if (options == nullptr) return Invalid("no init options");
  if (options->size < 1 || options->rank < 0 || options->rank >= options->size)
    return Invalid(StrCat("rank ", options->rank, " of ", options->size, " ranks"));
  BootstrapOptions own;
  own.rank = options->rank;
  own.size = options->size;
  own.rendezvous = TextOf(options->rendezvous);
  if (options->secret_bytes > 0 && options->secret != nullptr) {
    const auto secret =
        std::as_bytes(std::span(options->secret, static_cast<size_t>(options->secret_bytes)));
    own.secret.assign(secret.begin(), secret.end());
  }
  if (own.size > 1 && own.rendezvous.empty())
    return Invalid(StrCat("a job of ", own.size, " ranks needs the address of its rendezvous"));
  if (own.size > 1 && own.secret.size() < kLeastSecretBytes)
    return Invalid(StrCat("the job's secret has ", own.secret.size(), " bytes; at least ",
                          kLeastSecretBytes, " are needed"));
  own.self.rank = own.rank;
  own.self.pid = ::getpid();
  own.self.host_id = TextOf(options->host_id);
  if (own.self.host_id.empty()) own.self.host_id = DefaultHostId();
  own.self.framework = TextOf(options->framework);
  return own;
}

}  // namespace bagua
