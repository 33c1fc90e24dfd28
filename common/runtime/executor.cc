#include "common/runtime/executor.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/base/check.h"
#include "common/collective/chunk.h"

namespace bagua {
namespace {

Reduction HowTo(const Request& request, DType dtype, int size) {
  Reduction how{dtype, request.op, {request.prescale, request.postscale, 1}};
  if (request.op == ReduceOp::kAverage) {
    how.op = ReduceOp::kSum;
    how.scaling.divisor = size;
  }
  return how;
}

// Of a tensor that was admitted.
const Device& DeviceOf(const TensorMeta& meta) {
  Result<const Device*> device = FindDevice(meta.device);
  BAGUA_CHECK(device.ok()) << device.status().message();
  return *device.value();
}

// Memory for the results of one operation. Where the user gives none, the collective still runs,
// since the other ranks count on it, and the operation fails afterwards.
class ResultMemory {
 public:
  explicit ResultMemory(Operation* operation) : operation_(operation) {}

  Result<std::span<std::byte>> Make(int32_t index, const TensorMeta& meta) {
    OperationResult result;
    result.shape = meta.shape;
    const size_t bytes = meta.bytes();
    if (operation_->allocate != nullptr) {
      result.data = static_cast<std::byte*>(operation_->allocate(
          operation_->context, index, meta.shape.ndim, meta.shape.dims.data()));
      if (result.data == nullptr && bytes > 0 && failure_.ok())
        failure_ = Status(
            StatusCode::kInternal,
            StrCat(operation_->Describe(), ": no memory for the result ", bagua::Describe(meta)));
    }
    if (result.data == nullptr) {
      Result<DeviceMemory> memory = DeviceOf(meta).Allocate(bytes);
      if (!memory.ok()) return memory.status();
      result.owned = std::move(memory).value();
      result.data = result.owned.get();
    }
    operation_->results.push_back(std::move(result));
    return std::span<std::byte>(operation_->results.back().data, bytes);
  }
  const Status& failure() const { return failure_; }

 private:
  Operation* const operation_;
  Status failure_;
};

// An allreduce of others takes zeros from here and leaves its result there.
Status GiveZeros(Operation* operation) {
  for (const TensorMeta& tensor : operation->request.tensors) {
    OperationResult zeros;
    Result<DeviceMemory> memory = DeviceOf(tensor).Allocate(tensor.bytes());
    if (!memory.ok()) return memory.status();
    DeviceOf(tensor).Clear(memory.value().get(), tensor.bytes());
    zeros.owned = std::move(memory).value();
    operation->inputs.push_back(zeros.owned.get());
    operation->outputs.push_back(zeros.owned.get());
    operation->results.push_back(std::move(zeros));
  }
  return {};
}

}  // namespace

std::vector<size_t> ScatteredRows(size_t rows, int size) {
  std::vector<size_t> counts;
  for (int r = 0; r < size; ++r) counts.push_back(EvenChunkOf(rows, size, r).count);
  return counts;
}

Executor::Executor(GroupRanks group, uint32_t channel, CollectiveBackend* backend,
                   Counters* counters)
    : group_(std::move(group)), channel_(channel), backend_(backend), counters_(counters) {}

Task<Status> Executor::Run(const AgreedUnit& unit, uint64_t number) {
  const Tag tag{channel_, 0, number};
  Counters::Add(counters_->units);
  for (const AgreedOperation& agreed : unit)
    if (agreed.stands_in) BAGUA_CO_RETURN_IF_ERROR(GiveZeros(agreed.operation.get()));
  const AgreedOperation& first = unit.front();
  switch (first.operation->request.kind) {
    case Kind::kAllreduce:
      co_return co_await Allreduce(unit, tag);
    case Kind::kAllgather:
      co_return co_await Allgather(first, tag);
    case Kind::kBroadcast:
      co_return co_await Broadcast(first, tag);
    case Kind::kReduceScatter:
      co_return co_await ReduceScatter(first, tag);
    case Kind::kAlltoall:
      co_return co_await Alltoall(first, tag);
    case Kind::kBarrier:
      // That all ranks agreed on it says that all have come.
      first.operation->End({});
      co_return Status();
    case Kind::kJoin:
    case Kind::kRegisterPlan:
    case Kind::kAddGroup:
    case Kind::kRemoveGroup:
      break;
  }
  BAGUA_CHECK(false) << Name(first.operation->request.kind) << " is for the group";
  co_return Status();
}

// Tensors of one type travel together; a unit of several types, which is one grouped operation,
// takes one collective for each.
Task<Status> Executor::Allreduce(const AgreedUnit& unit, Tag tag) {
  bool present[kDTypeCount] = {};
  size_t tensors = 0;
  for (const AgreedOperation& agreed : unit) {
    for (const TensorMeta& tensor : agreed.operation->request.tensors)
      present[static_cast<int>(tensor.dtype)] = true;
    tensors += agreed.operation->request.tensors.size();
  }
  if (tensors > 1) Counters::Add(counters_->fused_tensors, static_cast<int64_t>(tensors));
  std::vector<Piece> list;
  list.reserve(tensors);
  for (int d = 0; d < kDTypeCount; ++d) {
    if (!present[d]) continue;
    const auto dtype = static_cast<DType>(d);
    list.clear();
    for (const AgreedOperation& agreed : unit) {
      const Operation& operation = *agreed.operation;
      for (size_t i = 0; i < operation.request.tensors.size(); ++i)
        if (operation.request.tensors[i].dtype == dtype)
          list.push_back({operation.inputs[i], operation.outputs[i],
                          static_cast<size_t>(operation.request.tensors[i].shape.count())});
    }
    const Pieces pieces(list, SizeOf(dtype));
    Counters::Add(counters_->reduced_bytes, static_cast<int64_t>(pieces.bytes()));
    tag.bucket = static_cast<uint32_t>(d);
    if (pieces.count() > 0)
      BAGUA_CO_RETURN_IF_ERROR(co_await backend_->Allreduce(
          tag, pieces, HowTo(unit.front().operation->request, dtype, size())));
  }
  for (const AgreedOperation& agreed : unit) agreed.operation->End({});
  co_return Status();
}

Task<Status> Executor::Allgather(const AgreedOperation& agreed, Tag tag) {
  Operation& operation = *agreed.operation;
  ResultMemory memory(&operation);
  for (size_t i = 0; i < operation.request.tensors.size(); ++i) {
    const TensorMeta& tensor = operation.request.tensors[i];
    const size_t row_bytes = static_cast<size_t>(tensor.shape.row_count()) * SizeOf(tensor.dtype);
    std::vector<size_t> bytes;
    int64_t rows = 0;
    for (int r = 0; r < size(); ++r) {
      const int64_t theirs = (*agreed.sizes)[i * size() + r];
      bytes.push_back(static_cast<size_t>(theirs) * row_bytes);
      rows += theirs;
    }
    TensorMeta whole = tensor;
    whole.shape = tensor.shape.WithRows(rows);
    Result<std::span<std::byte>> made = memory.Make(static_cast<int32_t>(i), whole);
    BAGUA_CO_RETURN_IF_ERROR(made.status());
    const std::span<std::byte> out = made.value();
    Counters::Add(counters_->gathered_bytes, static_cast<int64_t>(out.size()));
    tag.bucket = static_cast<uint32_t>(i);
    BAGUA_CO_RETURN_IF_ERROR(
        co_await backend_->Allgather(tag, {operation.inputs[i], tensor.bytes()}, out, bytes));
  }
  operation.End(memory.failure());
  co_return Status();
}

Task<Status> Executor::Broadcast(const AgreedOperation& agreed, Tag tag) {
  Operation& operation = *agreed.operation;
  const auto place = std::find(group_.ranks.begin(), group_.ranks.end(), operation.request.root);
  const int root = static_cast<int>(place - group_.ranks.begin());
  for (size_t i = 0; i < operation.request.tensors.size(); ++i) {
    const size_t bytes = operation.request.tensors[i].bytes();
    std::byte* const out = operation.outputs[i];
    if (rank() == root && out != operation.inputs[i])
      DeviceOf(operation.request.tensors[i]).Copy(out, operation.inputs[i], bytes);
    Counters::Add(counters_->gathered_bytes, static_cast<int64_t>(bytes));
    tag.bucket = static_cast<uint32_t>(i);
    if (bytes > 0) BAGUA_CO_RETURN_IF_ERROR(co_await backend_->Broadcast(tag, {out, bytes}, root));
  }
  operation.End({});
  co_return Status();
}

Task<Status> Executor::ReduceScatter(const AgreedOperation& agreed, Tag tag) {
  Operation& operation = *agreed.operation;
  ResultMemory memory(&operation);
  for (size_t i = 0; i < operation.request.tensors.size(); ++i) {
    const TensorMeta& tensor = operation.request.tensors[i];
    std::vector<size_t> counts = ScatteredRows(static_cast<size_t>(tensor.shape.rows()), size());
    TensorMeta part = tensor;
    part.shape = tensor.shape.WithRows(static_cast<int64_t>(counts[rank()]));
    for (size_t& count : counts) count *= static_cast<size_t>(tensor.shape.row_count());
    Result<std::span<std::byte>> made = memory.Make(static_cast<int32_t>(i), part);
    BAGUA_CO_RETURN_IF_ERROR(made.status());
    const std::span<std::byte> out = made.value();
    Counters::Add(counters_->reduced_bytes, static_cast<int64_t>(tensor.bytes()));
    tag.bucket = static_cast<uint32_t>(i);
    BAGUA_CO_RETURN_IF_ERROR(
        co_await backend_->ReduceScatter(tag, operation.inputs[i], out.data(), counts,
                                         HowTo(operation.request, tensor.dtype, size())));
  }
  operation.End(memory.failure());
  co_return Status();
}

Task<Status> Executor::Alltoall(const AgreedOperation& agreed, Tag tag) {
  Operation& operation = *agreed.operation;
  ResultMemory memory(&operation);
  const TensorMeta& tensor = operation.request.tensors[0];
  const size_t row_bytes = static_cast<size_t>(tensor.shape.row_count()) * SizeOf(tensor.dtype);
  const auto rows = [&](int from, int to) { return (*agreed.sizes)[from * size() + to]; };
  std::vector<size_t> send_bytes, recv_bytes;
  for (int r = 0; r < size(); ++r) {
    send_bytes.push_back(static_cast<size_t>(rows(rank(), r)) * row_bytes);
    recv_bytes.push_back(static_cast<size_t>(rows(r, rank())) * row_bytes);
    operation.received_splits.push_back(rows(r, rank()));
  }
  const auto largest =
      static_cast<size_t>(*std::max_element(agreed.sizes->begin(), agreed.sizes->end()));
  TensorMeta received = tensor;
  received.shape = tensor.shape.WithRows(std::accumulate(
      operation.received_splits.begin(), operation.received_splits.end(), int64_t{0}));
  Result<std::span<std::byte>> made = memory.Make(0, received);
  BAGUA_CO_RETURN_IF_ERROR(made.status());
  const std::span<std::byte> out = made.value();
  Counters::Add(counters_->gathered_bytes, static_cast<int64_t>(out.size()));
  BAGUA_CO_RETURN_IF_ERROR(co_await backend_->Alltoall(tag, {operation.inputs[0], tensor.bytes()},
                                                       send_bytes, out, recv_bytes,
                                                       largest * row_bytes));
  operation.End(memory.failure());
  co_return Status();
}

}  // namespace bagua
