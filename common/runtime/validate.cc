#include "common/runtime/validate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace bagua {
namespace {

Status Invalid(const Operation& operation, const std::string& what) {
  return Status(StatusCode::kInvalidArgument, StrCat(operation.Describe(), ": ", what));
}

Status CheckTensors(const Operation& operation) {
  const Request& request = operation.request;
  const bool alone = request.kind == Kind::kBroadcast || request.kind == Kind::kAlltoall;
  if (TakesTensors(request.kind) == request.tensors.empty())
    return Invalid(operation, StrCat("got ", request.tensors.size(), " tensors"));
  if (alone && request.tensors.size() != 1)
    return Invalid(operation, StrCat("takes one tensor, got ", request.tensors.size()));
  const bool by_rows = request.kind == Kind::kReduceScatter || request.kind == Kind::kAlltoall;
  for (const TensorMeta& tensor : request.tensors) {
    const Result<const Device*> device = FindDevice(tensor.device);
    if (!device.ok()) return device.status().WithContext(operation.Describe());
    if (by_rows && tensor.shape.ndim == 0)
      return Invalid(operation, "needs at least one dimension, got a scalar");
  }
  return {};
}

Status CheckReduction(const Operation& operation) {
  const Request& request = operation.request;
  if (request.op == ReduceOp::kAdasum)
    return Invalid(operation, "op Adasum is not supported yet; use Average or Sum");
  if (!std::isfinite(request.prescale) || !std::isfinite(request.postscale))
    return Invalid(operation, StrCat("prescale_factor ", request.prescale, " and postscale_factor ",
                                     request.postscale, " must be finite"));
  const bool scales =
      request.op == ReduceOp::kAverage || request.prescale != 1.0 || request.postscale != 1.0;
  for (const TensorMeta& tensor : request.tensors)
    if (tensor.dtype == DType::kBool && scales)
      return Invalid(operation,
                     "a bool tensor has no average and cannot be scaled; use Sum, Min, "
                     "Max or Product without factors");
  return {};
}

Status CheckSplits(const Operation& operation, size_t size) {
  const std::vector<int64_t>& splits = operation.request.splits;
  if (splits.size() != size)
    return Invalid(operation,
                   StrCat("splits has ", splits.size(), " entries for ", size, " ranks"));
  if (std::any_of(splits.begin(), splits.end(), [](int64_t rows) { return rows < 0; }))
    return Invalid(operation, "splits has a negative entry");
  const int64_t rows = operation.request.tensors[0].shape.rows();
  // No larger entry is added: the sum does not overflow.
  const auto larger =
      std::find_if(splits.begin(), splits.end(), [rows](int64_t split) { return split > rows; });
  if (larger != splits.end())
    return Invalid(operation,
                   StrCat("splits has an entry ", *larger, ", the first dimension is ", rows));
  const int64_t sum = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  if (sum != rows)
    return Invalid(operation, StrCat("splits sum to ", sum, ", the first dimension is ", rows));
  return {};
}

}  // namespace

Status Validate(const Operation& operation, const std::vector<int>& ranks, int rank) {
  const Request& request = operation.request;
  if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end())
    return Invalid(operation, StrCat("rank ", rank, " is not in process set ", request.group, " (",
                                     JoinRanks(ranks), ")"));
  BAGUA_RETURN_IF_ERROR(CheckTensors(operation));
  if (request.kind == Kind::kAllreduce || request.kind == Kind::kReduceScatter)
    return CheckReduction(operation);
  if (request.kind == Kind::kBroadcast &&
      std::find(ranks.begin(), ranks.end(), request.root) == ranks.end())
    return Invalid(operation, request.group == 0
                                  ? StrCat("root_rank ", request.root, " is none of the ",
                                           ranks.size(), " ranks (0 to ", ranks.back(), ")")
                                  : StrCat("root_rank ", request.root, " is not in process set ",
                                           request.group, " (", JoinRanks(ranks),
                                           "); roots are global ranks"));
  if (request.kind == Kind::kAlltoall) return CheckSplits(operation, ranks.size());
  return {};
}

Result<std::vector<int64_t>> EvenSplits(const Operation& operation, int size) {
  const int64_t rows = operation.request.tensors[0].shape.rows();
  if (rows % size != 0)
    return Invalid(operation, StrCat("the first dimension ", rows, " does not divide by ", size,
                                     " ranks; pass splits"));
  return std::vector<int64_t>(static_cast<size_t>(size), rows / size);
}

}  // namespace bagua
