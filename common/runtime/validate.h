// What a rank can find wrong with an operation before anyone else hears of it.
#ifndef BAGUA_COMMON_RUNTIME_VALIDATE_H_
#define BAGUA_COMMON_RUNTIME_VALIDATE_H_

#include <vector>

#include "common/base/status.h"
#include "common/runtime/operation.h"

namespace bagua {

// kInvalidArgument naming the operation and the value at fault. `ranks` are the group's. The splits
// of an alltoall must be filled in.
Status Validate(const Operation& operation, const std::vector<int>& ranks, int rank);

// The rows of an alltoall for each of `size` ranks when the user gives none; kInvalidArgument if
// they do not divide evenly.
Result<std::vector<int64_t>> EvenSplits(const Operation& operation, int size);

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_VALIDATE_H_
