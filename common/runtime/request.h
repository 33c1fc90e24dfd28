// What a rank asks for: the part of an operation that ranks compare and that travels.
#ifndef BAGUA_COMMON_RUNTIME_REQUEST_H_
#define BAGUA_COMMON_RUNTIME_REQUEST_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/base/types.h"
#include "common/base/wire.h"
#include "common/device/device.h"

namespace bagua {

// The first seven equal bagua_kind_t.
enum class Kind : uint8_t {
  kAllreduce = 0,
  kAllgather = 1,
  kBroadcast = 2,
  kReduceScatter = 3,
  kAlltoall = 4,
  kBarrier = 5,
  kJoin = 6,
  kRegisterPlan = 7,
  kAddGroup = 8,
  kRemoveGroup = 9,
};
constexpr int kKindCount = 10;
const char* Name(Kind kind);
constexpr bool TakesTensors(Kind kind) {
  return kind != Kind::kBarrier && kind != Kind::kJoin && kind < Kind::kRegisterPlan;
}

constexpr int kMaxDims = 16;

struct Shape {
  int ndim = 0;
  std::array<int64_t, kMaxDims> dims{};
  bool operator==(const Shape& other) const;
  int64_t count() const;
  // Elements of one row: count over the dimensions after the first.
  int64_t row_count() const;
  // Rows: the first dimension; 1 for a scalar.
  int64_t rows() const { return ndim == 0 ? 1 : dims[0]; }
  Shape WithRows(int64_t rows) const;
};

struct TensorMeta {
  DType dtype = DType::kFloat32;
  int device = kCpu;
  Shape shape;
  bool operator==(const TensorMeta&) const = default;
  size_t bytes() const { return static_cast<size_t>(shape.count()) * SizeOf(dtype); }
};

// "float32[2, 3]".
std::string Describe(const TensorMeta& tensor);

struct Request {
  Kind kind = Kind::kAllreduce;
  uint32_t group = 0;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;  // global rank
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<TensorMeta> tensors;
  std::vector<int64_t> splits;  // alltoall: rows for each rank
  // Lines that must be equal. kRegisterPlan: "key=value". kAddGroup and kRemoveGroup: one that says
  // which group; what follows it, on removal, are the operations that the rank has in flight there.
  std::vector<std::string> details;
  // kRegisterPlan: number of the plan of this name that the rank had before, and the steps that it
  // finished with it; empty if there was none. Not compared.
  std::vector<int64_t> position;
  bool operator==(const Request&) const = default;
};

void Encode(const Request& request, Writer* writer);
// kInternal if the bytes make no valid request.
Result<Request> DecodeRequest(Reader* reader);
// The encoded bytes, for comparison with an earlier request.
std::string Signature(const Request& request);

// "rank 3" or "ranks 3, 7".
std::string JoinRanks(const std::vector<int>& ranks);

// Under these names a rank asks for its changes of groups, one at a time, and joins.
inline constexpr const char* kGroupChangeName = "bagua.process_sets";
inline constexpr const char* kJoinName = "bagua.join";

// "allreduce 'layer3.bias'" or "allreduce (unnamed, number 7)"; what is never named by users goes
// by its kind alone.
std::string DescribeOperation(Kind kind, const std::string& name, uint64_t sequence);

// What tells apart a group's operations in flight: the name, or the number of an unnamed one.
struct OperationKey {
  std::string name;
  uint64_t sequence = 0;
  bool operator==(const OperationKey&) const = default;
};
struct OperationKeyHash {
  size_t operator()(const OperationKey& key) const {
    return std::hash<std::string>()(key.name) ^ (key.sequence * 0x9e3779b97f4a7c15u);
  }
};

// Rows that each rank gives (allgather: per tensor and rank; alltoall: from and to), row-major;
// empty for the other kinds.
using Sizes = std::vector<int64_t>;

// Whether the requests of all ranks of a group fit together. `ranks` are the global ranks, for the
// text. kMismatch naming operation, both ranks and both values otherwise.
Result<Sizes> Reconcile(const std::string& what, const std::vector<Request>& requests,
                        const std::vector<int>& ranks);

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_REQUEST_H_
