// Reductions one value at a time in wide types, and the values to reduce.
#ifndef BAGUA_TESTS_CPP_REDUCE_REFERENCE_H_
#define BAGUA_TESTS_CPP_REDUCE_REFERENCE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/base/types.h"
#include "tests/cpp/half_reference.h"

namespace bagua::reference {

// A value of any type, exactly: integers and booleans in `integer`, the others in `real`.
struct Value {
  int64_t integer = 0;
  double real = 0;
};

template <class T>
T Cut(int64_t value) {
  return static_cast<T>(static_cast<uint64_t>(value));
}

inline int64_t CutTo(DType dtype, int64_t value) {
  switch (dtype) {
    case DType::kUint8:
      return Cut<uint8_t>(value);
    case DType::kInt8:
      return Cut<int8_t>(value);
    case DType::kInt16:
      return Cut<int16_t>(value);
    case DType::kInt32:
      return Cut<int32_t>(value);
    case DType::kBool:
      return value != 0;
    default:
      return value;
  }
}

template <class T>
void Put(T value, std::byte* to) {
  std::memcpy(to, &value, sizeof(T));
}

// Real values are rounded to `dtype`, here or by the caller, to nearest even.
inline void Write(DType dtype, Value value, std::byte* to) {
  switch (dtype) {
    case DType::kFloat16:
      return Put(ReferenceEncode(kHalfFormat, static_cast<float>(value.real)), to);
    case DType::kBfloat16:
      return Put(ReferenceEncode(kBfloat16Format, static_cast<float>(value.real)), to);
    case DType::kFloat32:
      return Put(static_cast<float>(value.real), to);
    case DType::kFloat64:
      return Put(value.real, to);
    default:
      // Little-endian: the low octets come first.
      std::memcpy(to, &value.integer, SizeOf(dtype));
  }
}

inline uint64_t Hash(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Integers take all of their range. Real values are such that a double holds every sum and product
// exactly.
inline Value Generate(DType dtype, ReduceOp op, size_t rank, size_t index) {
  const uint64_t random = Hash(rank * 1000003 + index);
  if (dtype == DType::kBool) return {static_cast<int64_t>(random % 3 == 0), 0};
  if (!IsFloating(dtype)) return {CutTo(dtype, static_cast<int64_t>(random)), 0};
  if (op == ReduceOp::kProduct) {
    constexpr double kFactors[] = {0.5, 1, -1, 1.5, -2, 2, 0.75, -0.5};
    return {0, kFactors[random % 8]};
  }
  return {0, (static_cast<double>(random % 203) - 101.0) / 4.0};
}

inline Value Combined(DType dtype, ReduceOp op, Value a, Value b) {
  const bool sum = op == ReduceOp::kSum;
  if (IsFloating(dtype)) {
    if (op == ReduceOp::kMin) return {0, std::min(a.real, b.real)};
    if (op == ReduceOp::kMax) return {0, std::max(a.real, b.real)};
    return {0, sum ? a.real + b.real : a.real * b.real};
  }
  if (dtype == DType::kBool) {
    const bool either = sum || op == ReduceOp::kMax;
    return {either ? a.integer | b.integer : a.integer & b.integer, 0};
  }
  if (op == ReduceOp::kMin) return {std::min(a.integer, b.integer), 0};
  if (op == ReduceOp::kMax) return {std::max(a.integer, b.integer), 0};
  const uint64_t x = static_cast<uint64_t>(a.integer);
  const uint64_t y = static_cast<uint64_t>(b.integer);
  return {CutTo(dtype, static_cast<int64_t>(sum ? x + y : x * y)), 0};
}

}  // namespace bagua::reference

#endif  // BAGUA_TESTS_CPP_REDUCE_REFERENCE_H_
