// The vectorised loops under Reduce(), one table for each instruction set.
#ifndef BAGUA_COMMON_COLLECTIVE_REDUCE_KERNELS_TABLE_H_
#define BAGUA_COMMON_COLLECTIVE_REDUCE_KERNELS_TABLE_H_

#include <cstddef>

#include "common/base/types.h"

namespace bagua {

enum class Combine : int { kSum = 0, kMin = 1, kMax = 2, kProduct = 3 };
constexpr int kCombineCount = 4;

// How a kernel scales: not at all, by two factors before and after, or by these and a divisor.
enum class KernelScaling : int { kNone = 0, kMultiply = 1, kDivide = 2 };
constexpr int kKernelScalingCount = 3;
struct KernelFactors {
  double pre = 1.0;
  double post = 1.0;
  double divide = 1.0;  // kDivide: the divisor; kMultiply: one more factor after
};

struct KernelArrays {
  const void* const* in;
  size_t inputs;
  void* const* out;
  size_t outputs;
  size_t count;  // elements of each array
};

// out[j][i] = (pre * in[0][i] op pre * in[1][i] op ...) * post / divide. All inputs of a vector are
// read before any output is written.
using Kernel = void (*)(const KernelArrays& arrays, const KernelFactors& factors);

struct KernelTable {
  // Null where integers or booleans would be scaled, and under kMultiply but for sums.
  Kernel general[kDTypeCount][kCombineCount][kKernelScalingCount];
  // Sums of two inputs into one or two outputs, of which most calls are; null for integers.
  Kernel sum_of_two[kDTypeCount][kKernelScalingCount][2];
};

// That of ActiveIsa().
const KernelTable& ActiveKernels();

}  // namespace bagua

#endif  // BAGUA_COMMON_COLLECTIVE_REDUCE_KERNELS_TABLE_H_
