// XLA compiles no communication with other processes. Without a kernel for its devices TensorFlow
// would only say that none is registered. "Unimplemented" lets automatic clustering fall back to
// the ordinary kernels.

#include <absl/strings/str_cat.h>

#include "tensorflow/core/framework/op_kernel.h"

namespace bagua_tensorflow {
namespace {

class XlaRefusal : public tensorflow::OpKernel {
 public:
  explicit XlaRefusal(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    construction->SetStatus(absl::UnimplementedError(absl::StrCat(
        "BaguaError: '", construction->def().name(), "' (", construction->def().op(),
        ") is inside a function that XLA compiles, which cannot communicate with other ranks. Pass "
        "jit_compile=False to tf.function or Model.compile, or keep bagua_ext's operations outside "
        "of the compiled function")));
  }

  void Compute(tensorflow::OpKernelContext*) override {}
};

#define BAGUA_REFUSE_XLA(NAME)                                           \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device("XLA_CPU_JIT"), XlaRefusal); \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device("XLA_GPU_JIT"), XlaRefusal)

BAGUA_REFUSE_XLA("BaguaAllreduce");
BAGUA_REFUSE_XLA("BaguaAllgather");
BAGUA_REFUSE_XLA("BaguaBroadcast");
BAGUA_REFUSE_XLA("BaguaBroadcastVariables");
BAGUA_REFUSE_XLA("BaguaReducescatter");
BAGUA_REFUSE_XLA("BaguaAlltoall");
BAGUA_REFUSE_XLA("BaguaBarrier");
BAGUA_REFUSE_XLA("BaguaJoin");
BAGUA_REFUSE_XLA("BaguaPlanBegin");
BAGUA_REFUSE_XLA("BaguaPlanPut");
BAGUA_REFUSE_XLA("BaguaPlanTake");
BAGUA_REFUSE_XLA("BaguaPlanStep");
BAGUA_REFUSE_XLA("BaguaSize");
BAGUA_REFUSE_XLA("BaguaRank");
BAGUA_REFUSE_XLA("BaguaLocalSize");
BAGUA_REFUSE_XLA("BaguaLocalRank");
BAGUA_REFUSE_XLA("BaguaProcessSetIncluded");

}  // namespace
}  // namespace bagua_tensorflow
