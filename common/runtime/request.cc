#include "common/runtime/request.h"

#include <algorithm>

namespace bagua {
namespace {

constexpr uint32_t kMostTensors = 1u << 22;
constexpr int64_t kMostElements = int64_t{1} << 60;

bool ChangesGroups(Kind kind) {
  return kind == Kind::kAddGroup || kind == Kind::kRemoveGroup;
}

// The first field in which two requests differ, as seen by a user.
struct Difference {
  std::string theirs;
  std::string first;
  const char* advice = nullptr;
};

bool ShapesFit(Kind kind, const Shape& a, const Shape& b) {
  if (kind != Kind::kAllgather && kind != Kind::kAlltoall) return a == b;
  return a.ndim == b.ndim && a.WithRows(0) == b.WithRows(0);
}

const char* ShapeAdvice(Kind kind) {
  return kind == Kind::kAllgather || kind == Kind::kAlltoall
             ? "All dimensions but the first, and the type, must be the same on all ranks."
             : "All ranks must build the same model.";
}

// The first tensor that differs, or a differing number of tensors.
Difference CompareTensors(const Request& theirs, const Request& first) {
  if (theirs.tensors.size() != first.tensors.size())
    return {StrCat(theirs.tensors.size(), " tensors"), StrCat(first.tensors.size(), " tensors"),
            "All ranks must submit the same tensors."};
  for (size_t i = 0; i < first.tensors.size(); ++i) {
    const TensorMeta& a = theirs.tensors[i];
    const TensorMeta& b = first.tensors[i];
    if ((a.device == kCpu) != (b.device == kCpu))
      return {a.device == kCpu ? "a CPU tensor" : "a GPU tensor",
              b.device == kCpu ? "a CPU tensor" : "a GPU tensor",
              "All ranks must use the same kind of device."};
    if (a.dtype != b.dtype || !ShapesFit(first.kind, a.shape, b.shape)) {
      const std::string where =
          first.tensors.size() > 1 ? StrCat("tensor ", i, " of the group as ") : "";
      return {where + Describe(a), where + Describe(b), ShapeAdvice(first.kind)};
    }
  }
  return {};
}

Difference ComparePlans(const Request& theirs, const Request& first) {
  constexpr size_t kShown = 10;
  Difference difference;
  difference.advice = "All ranks must wrap the same parameters in the same way.";
  const size_t lines = std::max(theirs.details.size(), first.details.size());
  size_t different = 0;
  for (size_t i = 0; i < lines; ++i) {
    const std::string a = i < theirs.details.size() ? theirs.details[i] : "(nothing)";
    const std::string b = i < first.details.size() ? first.details[i] : "(nothing)";
    if (a == b || ++different > kShown) continue;
    difference.theirs += "\n    " + a;
    difference.first += "\n    " + b;
  }
  if (different > kShown) difference.theirs += StrCat("\n    ... ", different, " differences");
  return difference;
}

Difference CompareGroupChanges(const Request& theirs, const Request& first) {
  if (theirs.details.empty() || first.details.empty() || theirs.details[0] == first.details[0])
    return {};
  return {theirs.details[0], first.details[0],
          "All ranks, members or not, must add and remove the same sets in the same order."};
}

// What ranks still have in flight in a group that they want to remove.
std::string DescribeBusy(const std::vector<Request>& requests, const std::vector<int>& ranks) {
  std::string text;
  for (size_t r = 0; r < requests.size(); ++r)
    for (size_t i = 1; i < requests[r].details.size(); ++i)
      text += StrCat(text.empty() ? "" : ", ", requests[r].details[i], " on rank ", ranks[r]);
  return text;
}

Difference Compare(const Request& theirs, const Request& first) {
  if (theirs.kind != first.kind)
    return {Name(theirs.kind), Name(first.kind), "All ranks must call the same operations."};
  if (first.kind == Kind::kRegisterPlan) return ComparePlans(theirs, first);
  if (ChangesGroups(first.kind)) return CompareGroupChanges(theirs, first);
  Difference tensors = CompareTensors(theirs, first);
  if (tensors.advice != nullptr) return tensors;
  const char* same = "All ranks must pass the same arguments.";
  const bool reduces = first.kind == Kind::kAllreduce || first.kind == Kind::kReduceScatter;
  if (reduces && theirs.op != first.op)
    return {StrCat("op=", Name(theirs.op)), StrCat("op=", Name(first.op)), same};
  if (reduces && theirs.prescale != first.prescale)
    return {StrCat("prescale_factor=", ExactText(theirs.prescale)),
            StrCat("prescale_factor=", ExactText(first.prescale)), same};
  if (reduces && theirs.postscale != first.postscale)
    return {StrCat("postscale_factor=", ExactText(theirs.postscale)),
            StrCat("postscale_factor=", ExactText(first.postscale)), same};
  if (first.kind == Kind::kBroadcast && theirs.root != first.root)
    return {StrCat("root_rank=", theirs.root), StrCat("root_rank=", first.root), same};
  return {};
}

Sizes CollectSizes(const std::vector<Request>& requests) {
  Sizes sizes;
  if (requests[0].kind == Kind::kAllgather) {
    for (size_t t = 0; t < requests[0].tensors.size(); ++t)
      for (const Request& request : requests) sizes.push_back(request.tensors[t].shape.rows());
  } else if (requests[0].kind == Kind::kAlltoall) {
    for (const Request& request : requests)
      sizes.insert(sizes.end(), request.splits.begin(), request.splits.end());
  }
  return sizes;
}

}  // namespace

const char* Name(Kind kind) {
  constexpr const char* kNames[kKindCount] = {
      "allreduce", "allgather", "broadcast", "reducescatter",   "alltoall",
      "barrier",   "join",      "plan",      "add_process_set", "remove_process_set"};
  return kNames[static_cast<int>(kind)];
}

bool Shape::operator==(const Shape& other) const {
  return ndim == other.ndim && std::equal(dims.begin(), dims.begin() + ndim, other.dims.begin());
}

int64_t Shape::count() const {
  int64_t product = 1;
  for (int i = 0; i < ndim; ++i) product *= dims[i];
  return product;
}

int64_t Shape::row_count() const {
  int64_t product = 1;
  for (int i = 1; i < ndim; ++i) product *= dims[i];
  return product;
}

Shape Shape::WithRows(int64_t rows) const {
  Shape shape = *this;
  shape.ndim = std::max(shape.ndim, 1);
  shape.dims[0] = rows;
  return shape;
}

std::string Describe(const TensorMeta& tensor) {
  std::string text = StrCat(Name(tensor.dtype), "[");
  for (int i = 0; i < tensor.shape.ndim; ++i)
    text += StrCat(i > 0 ? ", " : "", tensor.shape.dims[i]);
  return text + "]";
}

void Encode(const Request& request, Writer* writer) {
  writer->Put(request.kind);
  writer->Put(request.group);
  writer->Put(request.op);
  writer->Put(static_cast<int32_t>(request.root));
  writer->Put(request.prescale);
  writer->Put(request.postscale);
  writer->Put(static_cast<uint32_t>(request.tensors.size()));
  for (const TensorMeta& tensor : request.tensors) {
    writer->Put(tensor.dtype);
    writer->Put(static_cast<int32_t>(tensor.device));
    writer->Put(static_cast<uint8_t>(tensor.shape.ndim));
    for (int i = 0; i < tensor.shape.ndim; ++i) writer->Put(tensor.shape.dims[i]);
  }
  writer->PutList(request.splits);
  writer->Put(static_cast<uint32_t>(request.details.size()));
  for (const std::string& line : request.details) writer->PutString(line);
  writer->PutList(request.position);
}

Result<Request> DecodeRequest(Reader* reader) {
  const auto malformed = [] { return Status(StatusCode::kInternal, "malformed request"); };
  Request request;
  request.kind = reader->Get<Kind>();
  request.group = reader->Get<uint32_t>();
  request.op = reader->Get<ReduceOp>();
  request.root = reader->Get<int32_t>();
  request.prescale = reader->Get<double>();
  request.postscale = reader->Get<double>();
  const uint32_t tensors = reader->GetCount(6);
  if (static_cast<int>(request.kind) >= kKindCount ||
      static_cast<int>(request.op) >= kReduceOpCount || tensors > kMostTensors)
    return malformed();
  request.tensors.resize(tensors);
  for (TensorMeta& tensor : request.tensors) {
    tensor.dtype = reader->Get<DType>();
    tensor.device = reader->Get<int32_t>();
    tensor.shape.ndim = reader->Get<uint8_t>();
    if (!reader->ok() || static_cast<int>(tensor.dtype) >= kDTypeCount ||
        tensor.shape.ndim > kMaxDims)
      return malformed();
    int64_t count = 1;
    for (int i = 0; i < tensor.shape.ndim; ++i) {
      const auto dim = reader->Get<int64_t>();
      tensor.shape.dims[i] = dim;
      if (dim < 0 || __builtin_mul_overflow(count, dim, &count) || count > kMostElements)
        return malformed();
    }
  }
  request.splits = reader->GetList<int64_t>();
  request.details.resize(reader->GetCount(4));
  for (std::string& line : request.details) line = reader->GetString();
  request.position = reader->GetList<int64_t>();
  if (!reader->ok()) return malformed();
  return request;
}

std::string Signature(const Request& request) {
  Writer writer;
  Encode(request, &writer);
  const Bytes bytes = writer.Take();
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::string JoinRanks(const std::vector<int>& ranks) {
  if (ranks.empty()) return "other ranks";
  std::string text;
  for (const int rank : ranks) text += StrCat(text.empty() ? "" : ", ", rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

std::string DescribeOperation(Kind kind, const std::string& name, uint64_t sequence) {
  if (ChangesGroups(kind) || kind == Kind::kJoin) return Name(kind);
  if (name.empty()) return StrCat(Name(kind), " (unnamed, number ", sequence, ")");
  return StrCat(Name(kind), " '", name, "'");
}

Result<Sizes> Reconcile(const std::string& what, const std::vector<Request>& requests,
                        const std::vector<int>& ranks) {
  for (size_t r = 1; r < requests.size(); ++r) {
    const Difference difference = Compare(requests[r], requests[0]);
    if (difference.theirs.empty() && difference.first.empty()) continue;
    const bool lines = difference.theirs.starts_with('\n');
    return Status(StatusCode::kMismatch,
                  StrCat(what, ": rank ", ranks[r], " sent", lines ? "" : " ", difference.theirs,
                         lines ? "\n  rank " : ", rank ", ranks[0], " sent", lines ? "" : " ",
                         difference.first, lines ? "\n" : ". ", difference.advice));
  }
  if (requests[0].kind == Kind::kRemoveGroup)
    if (const std::string busy = DescribeBusy(requests, ranks); !busy.empty())
      return Status(StatusCode::kMismatch,
                    StrCat(what, ": ", requests[0].details[0], " has operations in flight: ", busy,
                           ". Wait for them on all ranks first."));
  return CollectSizes(requests);
}

}  // namespace bagua
