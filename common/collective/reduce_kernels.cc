#include "common/collective/reduce_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/base/check.h"
#include "common/collective/reduce_kernels_table.h"

namespace bagua {
namespace {

Combine CombineOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return Combine::kSum;
    case ReduceOp::kMin:
      return Combine::kMin;
    case ReduceOp::kMax:
      return Combine::kMax;
    case ReduceOp::kProduct:
      return Combine::kProduct;
    case ReduceOp::kAverage:
    case ReduceOp::kAdasum:
      break;
  }
  BAGUA_CHECK(false) << Name(op) << " has no kernel";
  return Combine::kSum;
}

// A power of two is divided by through its reciprocal: the same bits, sooner.
KernelScaling KernelScalingOf(Combine op, const Scaling& scaling) {
  if (scaling.identity()) return KernelScaling::kNone;
  const bool reciprocal = std::has_single_bit(static_cast<uint64_t>(scaling.divisor));
  return op == Combine::kSum && reciprocal ? KernelScaling::kMultiply : KernelScaling::kDivide;
}

KernelFactors KernelFactorsOf(KernelScaling how, const Scaling& scaling) {
  const double divisor = static_cast<double>(scaling.divisor);
  return {scaling.pre, scaling.post, how == KernelScaling::kMultiply ? 1.0 / divisor : divisor};
}

Kernel KernelOf(DType dtype, Combine op, KernelScaling scaling, size_t inputs, size_t outputs) {
  const KernelTable& kernels = ActiveKernels();
  const int type = static_cast<int>(dtype);
  const int how = static_cast<int>(scaling);
  if (op == Combine::kSum && inputs == 2 && outputs <= 2 && IsFloating(dtype))
    return kernels.sum_of_two[type][how][outputs - 1];
  return kernels.general[type][static_cast<int>(op)][how];
}

// Truncates towards zero; what is out of range becomes the nearest limit, NaN becomes 0.
template <class T>
T Truncate(double value) {
  // Of int64, max() itself is no double; max() + 1 always is one.
  constexpr double kEnd = static_cast<double>(std::numeric_limits<T>::max() / 2 + 1) * 2.0;
  if (std::isnan(value)) return 0;
  if (value >= kEnd) return std::numeric_limits<T>::max();
  if (value <= static_cast<double>(std::numeric_limits<T>::min()))
    return std::numeric_limits<T>::min();
  return static_cast<T>(value);
}

template <class T>
void Multiply(const T* src, double factor, size_t count, T* dst) {
  for (size_t i = 0; i < count; ++i) dst[i] = Truncate<T>(static_cast<double>(src[i]) * factor);
}

template <class T>
void Divide(T* data, int64_t divisor, size_t count) {
  if constexpr (sizeof(T) < sizeof(int64_t)) {
    // Quotients of values below 2^53 truncate alike in double, which divides sooner.
    const double by = static_cast<double>(divisor);
    for (size_t i = 0; i < count; ++i) data[i] = static_cast<T>(static_cast<double>(data[i]) / by);
  } else {
    for (size_t i = 0; i < count; ++i) data[i] /= divisor;
  }
}

// By blocks that stay in the nearest cache, since these steps are no part of the vector kernels.
template <class T>
void ReduceScaledIntegers(Kernel combine, std::span<const void* const> inputs,
                          std::span<void* const> outputs, size_t count, const Scaling& scaling) {
  constexpr size_t kBlock = 4096 / sizeof(T);
  T reduced[kBlock];
  T taken[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t here = std::min(kBlock, count - begin);
    const auto take = [&](const void* input, T* room) {
      const T* from = static_cast<const T*>(input) + begin;
      if (scaling.pre != 1.0)
        Multiply(from, scaling.pre, here, room);
      else
        std::memcpy(room, from, here * sizeof(T));
    };
    take(inputs[0], reduced);
    for (const void* input : inputs.subspan(1)) {
      take(input, taken);
      const void* const in[] = {reduced, taken};
      void* const out[] = {reduced};
      combine({in, 2, out, 1, here}, {});
    }
    if (scaling.post != 1.0) Multiply(reduced, scaling.post, here, reduced);
    if (scaling.divisor != 1) Divide(reduced, scaling.divisor, here);
    for (void* output : outputs)
      std::memcpy(static_cast<T*>(output) + begin, reduced, here * sizeof(T));
  }
}

using ScaledIntegers = void (*)(Kernel, std::span<const void* const>, std::span<void* const>,
                                size_t, const Scaling&);

// Null for other types.
ScaledIntegers ScaledIntegersOf(DType dtype) {
  constexpr ScaledIntegers kOf[kDTypeCount] = {
      ReduceScaledIntegers<uint8_t>, ReduceScaledIntegers<int8_t>, ReduceScaledIntegers<int16_t>,
      ReduceScaledIntegers<int32_t>, ReduceScaledIntegers<int64_t>};
  return kOf[static_cast<int>(dtype)];
}

}  // namespace

void Reduce(DType dtype, ReduceOp op, std::span<const void* const> inputs,
            std::span<void* const> outputs, size_t count, const Scaling& scaling) {
  BAGUA_CHECK(!inputs.empty() && !outputs.empty()) << inputs.size() << " to " << outputs.size();
  BAGUA_CHECK(scaling.divisor > 0) << scaling.divisor;
  if (count == 0) return;
  const Combine combine = CombineOf(op);
  if (!scaling.identity()) {
    if (const ScaledIntegers reduce = ScaledIntegersOf(dtype)) {
      const Kernel plain = KernelOf(dtype, combine, KernelScaling::kNone, 2, 1);
      return reduce(plain, inputs, outputs, count, scaling);
    }
  }
  const KernelScaling how =
      dtype == DType::kBool ? KernelScaling::kNone : KernelScalingOf(combine, scaling);
  const Kernel kernel = KernelOf(dtype, combine, how, inputs.size(), outputs.size());
  kernel({inputs.data(), inputs.size(), outputs.data(), outputs.size(), count},
         KernelFactorsOf(how, scaling));
}

void Scale(DType dtype, void* data, size_t count, const Scaling& scaling) {
  if (scaling.identity() || dtype == DType::kBool) return;
  const void* const inputs[] = {data};
  void* const outputs[] = {data};
  Reduce(dtype, ReduceOp::kSum, inputs, outputs, count, scaling);
}

}  // namespace bagua
