// Operations for the tests of the engine, and what they must give, computed value by value.
#ifndef BAGUA_TESTS_CPP_OPERATIONS_H_
#define BAGUA_TESTS_CPP_OPERATIONS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/base/wire.h"
#include "common/runtime/engine.h"
#include "common/runtime/operation.h"
#include "tests/cpp/cluster.h"
#include "tests/cpp/reduce_reference.h"

namespace bagua {

inline TensorMeta MetaOf(DType dtype, const std::vector<int64_t>& dims) {
  TensorMeta meta;
  meta.dtype = dtype;
  meta.shape.ndim = static_cast<int>(dims.size());
  std::copy(dims.begin(), dims.end(), meta.shape.dims.begin());
  return meta;
}

// Values that differ with `rank`, `seed` and index, and fit `op`.
inline Bytes ValuesOf(DType dtype, size_t count, int rank, int seed = 0,
                      ReduceOp op = ReduceOp::kSum) {
  Bytes bytes(count * SizeOf(dtype));
  for (size_t i = 0; i < count; ++i)
    reference::Write(dtype,
                     reference::Generate(dtype, op, 64 * static_cast<size_t>(seed) + rank, i),
                     bytes.data() + i * SizeOf(dtype));
  return bytes;
}

template <class T>
T ReadAs(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

inline double ReadFloating(DType dtype, const std::byte* from) {
  if (dtype == DType::kFloat64) return ReadAs<double>(from);
  if (dtype == DType::kFloat32) return ReadAs<float>(from);
  return ReferenceDecode(dtype == DType::kFloat16 ? kHalfFormat : kBfloat16Format,
                         ReadAs<uint16_t>(from));
}

// Largest relative error of a value that was rounded once in `dtype`; a float32 or float64 quotient
// may have been multiplied by a rounded reciprocal.
inline double RoundingOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return 0x1.01p-11;
    case DType::kBfloat16:
      return 0x1.01p-8;
    case DType::kFloat32:
      return 0x1p-23;
    default:
      return 0x1p-52;
  }
}

// What every rank must hold after an allreduce of ValuesOf(dtype, count, rank, seed, op) of
// `ranks`.
inline void ExpectReduced(const Bytes& actual, DType dtype, ReduceOp op,
                          const std::vector<int>& ranks, int seed, size_t begin = 0,
                          double factor = 1) {
  const size_t each = SizeOf(dtype);
  const bool average = op == ReduceOp::kAverage;
  const ReduceOp combine = average ? ReduceOp::kSum : op;
  const auto size = static_cast<int64_t>(ranks.size());
  for (size_t i = 0; i < actual.size() / each; ++i) {
    const auto value = [&](int rank) {
      return reference::Generate(dtype, op, 64 * static_cast<size_t>(seed) + rank, begin + i);
    };
    reference::Value total = value(ranks[0]);
    for (size_t r = 1; r < ranks.size(); ++r)
      total = reference::Combined(dtype, combine, total, value(ranks[r]));
    const std::byte* const at = actual.data() + i * each;
    if (average && IsFloating(dtype)) {
      const double exact = total.real * factor / static_cast<double>(size);
      const double got = ReadFloating(dtype, at);
      if (std::abs(got - exact) > std::abs(exact) * RoundingOf(dtype)) {
        ADD_FAILURE() << Name(dtype) << " " << Name(op) << " element " << i << " of "
                      << actual.size() / each << ": " << got << " instead of " << exact;
        return;
      }
      continue;
    }
    total.real *= factor;
    if (average) total.integer /= size;
    std::byte expected[8];
    reference::Write(dtype, total, expected);
    if (std::memcmp(at, expected, each) != 0) {
      ADD_FAILURE() << Name(dtype) << " " << Name(op) << " element " << i << " of "
                    << actual.size() / each << " over " << size << " ranks is wrong";
      return;
    }
  }
}

inline std::vector<int> RanksUpTo(int size) {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(r);
  return ranks;
}

inline OperationPtr MakeOperation(Kind kind, const std::string& name, uint32_t group = 0) {
  auto operation = std::make_shared<Operation>();
  operation->request.kind = kind;
  operation->request.group = group;
  operation->name = name;
  return operation;
}

inline void AddTensor(Operation* operation, const TensorMeta& meta, const Bytes& in,
                      Bytes* out = nullptr) {
  operation->request.tensors.push_back(meta);
  operation->inputs.push_back(in.data());
  operation->outputs.push_back(out != nullptr ? out->data() : nullptr);
}

// In place on `data`.
inline OperationPtr MakeAllreduce(const std::string& name, DType dtype, Bytes* data,
                                  ReduceOp op = ReduceOp::kSum, uint32_t group = 0) {
  OperationPtr operation = MakeOperation(Kind::kAllreduce, name, group);
  operation->request.op = op;
  AddTensor(operation.get(), MetaOf(dtype, {static_cast<int64_t>(data->size() / SizeOf(dtype))}),
            *data, data);
  return operation;
}

inline OperationPtr MakeBarrier(const std::string& name, uint32_t group = 0) {
  return MakeOperation(Kind::kBarrier, name, group);
}

inline void ExpectOk(const Status& status) {
  EXPECT_TRUE(status.ok()) << status.message();
}

inline Status Await(Engine* engine, const OperationPtr& operation) {
  if (!engine->Wait(*operation, Patience()))
    return Status(StatusCode::kInProgress, operation->Describe() + " does not end");
  return operation->status();
}

inline Status RunOne(Engine* engine, const OperationPtr& operation) {
  BAGUA_RETURN_IF_ERROR(engine->Enqueue(operation, /*caller_drives=*/true));
  return Await(engine, operation);
}

inline void ExpectFails(const Status& status, StatusCode code,
                        const std::vector<std::string>& parts) {
  EXPECT_EQ(status.code(), code) << StatusCodeName(status.code()) << ": " << status.message();
  for (const std::string& part : parts)
    EXPECT_NE(status.message().find(part), std::string::npos)
        << "'" << part << "' is not in: " << status.message();
}

// Every rank adds the group; its number.
inline uint32_t MustAddGroup(Engine* engine, const std::vector<int>& ranks) {
  Result<OperationPtr> operation = engine->AddGroup(ranks);
  ExpectOk(operation.status());
  if (!operation.ok()) return 0;
  ExpectOk(RunOne(engine, operation.value()));
  return operation.value()->added;
}

// An allreduce whose result is checked.
inline Status RunAllreduce(Engine* engine, const std::string& name, size_t count, int seed,
                           DType dtype = DType::kFloat32) {
  Bytes data = ValuesOf(dtype, count, engine->rank(), seed);
  const Status status = RunOne(engine, MakeAllreduce(name, dtype, &data));
  if (status.ok()) ExpectReduced(data, dtype, ReduceOp::kSum, RanksUpTo(engine->size()), seed);
  return status;
}

inline Bytes ResultBytes(const Operation& operation, size_t index = 0) {
  const OperationResult& result = operation.results.at(index);
  const size_t bytes =
      static_cast<size_t>(result.shape.count()) * SizeOf(operation.request.tensors.at(index).dtype);
  return Bytes(result.data, result.data + bytes);
}

}  // namespace bagua

#endif  // BAGUA_TESTS_CPP_OPERATIONS_H_
