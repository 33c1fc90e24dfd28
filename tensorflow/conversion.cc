#include "tensorflow/conversion.h"

#include <absl/strings/str_cat.h>

namespace bagua_tensorflow {
namespace {

struct DtypePair {
  tensorflow::DataType own;
  bagua_dtype_t core;
};

constexpr DtypePair kDtypes[] = {
    {tensorflow::DT_UINT8, BAGUA_UINT8},       {tensorflow::DT_INT8, BAGUA_INT8},
    {tensorflow::DT_INT16, BAGUA_INT16},       {tensorflow::DT_INT32, BAGUA_INT32},
    {tensorflow::DT_INT64, BAGUA_INT64},       {tensorflow::DT_HALF, BAGUA_FLOAT16},
    {tensorflow::DT_BFLOAT16, BAGUA_BFLOAT16}, {tensorflow::DT_FLOAT, BAGUA_FLOAT32},
    {tensorflow::DT_DOUBLE, BAGUA_FLOAT64},    {tensorflow::DT_BOOL, BAGUA_BOOL},
};

}  // namespace

int32_t ToCoreDtype(tensorflow::DataType dtype) {
  for (const DtypePair& pair : kDtypes) {
    if (pair.own == dtype) return pair.core;
  }
  return -1;
}

tensorflow::DataType ToDtype(int32_t dtype) {
  for (const DtypePair& pair : kDtypes) {
    if (pair.core == dtype) return pair.own;
  }
  return tensorflow::DT_INVALID;
}

bagua_tensor_t Describe(const tensorflow::Tensor& tensor, std::vector<int64_t>* dims) {
  dims->clear();
  for (int axis = 0; axis < tensor.dims(); ++axis) dims->push_back(tensor.dim_size(axis));
  bagua_tensor_t descriptor{};
  descriptor.data = tensor.NumElements() == 0 ? nullptr : tensor.data();
  descriptor.dtype = ToCoreDtype(tensor.dtype());
  descriptor.device = -1;
  descriptor.ndim = tensor.dims();
  descriptor.shape = dims->data();
  return descriptor;
}

tensorflow::TensorShape ToShape(int32_t ndim, const int64_t* dims) {
  tensorflow::TensorShape shape;
  for (int32_t axis = 0; axis < ndim; ++axis) shape.AddDim(dims[axis]);
  return shape;
}

absl::Status ToStatus(int status, absl::string_view message) {
  switch (status) {
    case BAGUA_OK:
      return absl::OkStatus();
    case BAGUA_NOT_INITIALIZED:
      return absl::FailedPreconditionError(absl::StrCat("NotInitializedError: ", message));
    case BAGUA_INVALID_ARGUMENT:
      return absl::InvalidArgumentError(absl::StrCat("ValueError: ", message));
    case BAGUA_MISMATCH:
      return absl::InvalidArgumentError(absl::StrCat("MismatchError: ", message));
    case BAGUA_PEER_LOST:
      return absl::AbortedError(absl::StrCat("PeerLostError: ", message));
    case BAGUA_TIMEOUT:
      return absl::DeadlineExceededError(absl::StrCat("CollectiveTimeoutError: ", message));
    case BAGUA_ABORTED:
      return absl::AbortedError(absl::StrCat("AbortedError: ", message));
    default:
      return absl::InternalError(absl::StrCat("BaguaError: ", message));
  }
}

absl::Status LastStatus(int status) {
  return status == BAGUA_OK ? absl::OkStatus() : ToStatus(status, bagua_last_error());
}

}  // namespace bagua_tensorflow
