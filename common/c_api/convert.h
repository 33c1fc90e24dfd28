// From the structs of c_api.h to the core's own.
#ifndef BAGUA_COMMON_C_API_CONVERT_H_
#define BAGUA_COMMON_C_API_CONVERT_H_

#include <vector>

#include "common/base/status.h"
#include "common/c_api.h"
#include "common/runtime/operation.h"
#include "common/runtime/plan.h"
#include "common/transport/bootstrap.h"

namespace bagua {

// All: kInvalidArgument for values outside of their enumeration, negative sizes, missing pointers.
// `group_size` fills in the splits of an alltoall that gives none.
Result<OperationPtr> ToOperation(const bagua_request_t* request, int group_size);
Result<std::vector<int>> ToRanks(const int32_t* ranks, int32_t count);
Result<PlanOptions> ToPlanOptions(const bagua_plan_options_t* options);
Result<BootstrapOptions> ToBootstrapOptions(const bagua_init_options_t* options);

}  // namespace bagua

#endif  // BAGUA_COMMON_C_API_CONVERT_H_
