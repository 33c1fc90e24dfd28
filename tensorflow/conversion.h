// Tensors, dtypes and errors between TensorFlow and the core.
#ifndef BAGUA_TENSORFLOW_CONVERSION_H_
#define BAGUA_TENSORFLOW_CONVERSION_H_

#include <absl/status/status.h>
#include <absl/strings/string_view.h>

#include <string>
#include <vector>

#include "common/c_api.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace bagua_tensorflow {

// The dtypes that all operations take, as an op's attribute: "uint8, int8, ...".
#define BAGUA_TENSORFLOW_DTYPES \
  "{uint8, int8, int16, int32, int64, half, bfloat16, float, double, bool}"

// -1 for a dtype that is not one of BAGUA_TENSORFLOW_DTYPES.
int32_t ToCoreDtype(tensorflow::DataType dtype);
// `dtype` is a bagua_dtype_t; DT_INVALID if it is none.
tensorflow::DataType ToDtype(int32_t dtype);

// Memory of a tensor for the core, which may write to it. The shape lives in `dims`, which must
// outlive the descriptor.
bagua_tensor_t Describe(const tensorflow::Tensor& tensor, std::vector<int64_t>* dims);

tensorflow::TensorShape ToShape(int32_t ndim, const int64_t* dims);

// The error that stands for a bagua_status_t other than BAGUA_OK. Its text begins with the name of
// the Python class: Aborted for PeerLostError and AbortedError, DeadlineExceeded for
// CollectiveTimeoutError, InvalidArgument for MismatchError and ValueError, FailedPrecondition for
// NotInitializedError.
absl::Status ToStatus(int status, absl::string_view message);

// The same with bagua_last_error() of this thread; OK for BAGUA_OK.
absl::Status LastStatus(int status);

}  // namespace bagua_tensorflow

#endif  // BAGUA_TENSORFLOW_CONVERSION_H_
