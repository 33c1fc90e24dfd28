// Element types and reduction operators. Values equal those of c_api.h and travel on the wire.
#ifndef BAGUA_COMMON_BASE_TYPES_H_
#define BAGUA_COMMON_BASE_TYPES_H_

#include <cstddef>
#include <cstdint>

namespace bagua {

enum class DType : uint8_t {
  kUint8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kBfloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBool = 9,
};
constexpr int kDTypeCount = 10;

enum class ReduceOp : uint8_t {
  kAverage = 0,
  kSum = 1,
  kAdasum = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
};
constexpr int kReduceOpCount = 6;

// Octets of one element.
constexpr size_t SizeOf(DType dtype) {
  constexpr size_t kSizes[kDTypeCount] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};
  return kSizes[static_cast<int>(dtype)];
}

constexpr const char* Name(DType dtype) {
  constexpr const char* kNames[kDTypeCount] = {"uint8",   "int8",     "int16",   "int32",   "int64",
                                               "float16", "bfloat16", "float32", "float64", "bool"};
  return kNames[static_cast<int>(dtype)];
}

constexpr const char* Name(ReduceOp op) {
  constexpr const char* kNames[kReduceOpCount] = {"Average", "Sum", "Adasum",
                                                  "Min",     "Max", "Product"};
  return kNames[static_cast<int>(op)];
}

constexpr bool IsFloating(DType dtype) {
  return dtype >= DType::kFloat16 && dtype <= DType::kFloat64;
}

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_TYPES_H_
