// Element-wise reductions of several inputs into several outputs in one pass over memory.
#ifndef BAGUA_COMMON_COLLECTIVE_REDUCE_KERNELS_H_
#define BAGUA_COMMON_COLLECTIVE_REDUCE_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/base/types.h"

namespace bagua {

// result = post * (reduce(pre * x_r)) / divisor. Average is kSum with divisor n. Floating types are
// scaled in the type in which they are reduced, each step rounded.
// For integers pre and post other than 1 are applied in double and truncated towards zero, and the
// division truncates; a scaled value out of the type's range becomes the nearest limit, NaN becomes
// 0. float16 and bfloat16 are reduced in float and rounded once. kBool is not scaled.
struct Scaling {
  double pre = 1.0;
  double post = 1.0;
  int64_t divisor = 1;  // at least 1
  bool identity() const { return pre == 1.0 && post == 1.0 && divisor == 1; }
};

// outputs[j][i] = scaling of inputs[0][i] op inputs[1][i] op ..., in that order, for i < count and
// every j. At least one input and one output. An output may be the same array as an input, and
// inputs may repeat; partial overlap is not allowed. No alignment beyond the element's is needed.
// op: kSum, kMin, kMax, kProduct. kBool: sum and max are "or", product and min are "and".
// Min and max propagate NaN. Sums of float32 accumulate in float32, in the order of inputs. Sums
// and products of integers wrap. An element's bits depend neither on the processor nor on its
// place; only the payload of a NaN may. Thread-safety: any thread.
void Reduce(DType dtype, ReduceOp op, std::span<const void* const> inputs,
            std::span<void* const> outputs, size_t count, const Scaling& scaling = {});

// data[i] = post * pre * data[i] / divisor in place; nothing is done for an identity.
void Scale(DType dtype, void* data, size_t count, const Scaling& scaling);

}  // namespace bagua

#endif  // BAGUA_COMMON_COLLECTIVE_REDUCE_KERNELS_H_
