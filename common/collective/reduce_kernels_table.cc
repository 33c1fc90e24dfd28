#include "common/collective/reduce_kernels_table.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "common/base/half.h"
#include "common/base/isa.h"

namespace bagua {

namespace baseline {
#define BAGUA_TARGET
#define BAGUA_VECTOR_BYTES 16
#include "common/collective/reduce_kernels_inl.h"
#undef BAGUA_TARGET
#undef BAGUA_VECTOR_BYTES
}  // namespace baseline

#if defined(__x86_64__)
constexpr int kToNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

namespace avx2 {
#define BAGUA_TARGET __attribute__((target("avx2,f16c")))
#define BAGUA_VECTOR_BYTES 32
#include "common/collective/reduce_kernels_inl.h"
#undef BAGUA_TARGET
#undef BAGUA_VECTOR_BYTES
}  // namespace avx2

namespace avx512 {
#define BAGUA_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define BAGUA_VECTOR_BYTES 64
#include "common/collective/reduce_kernels_inl.h"
#undef BAGUA_TARGET
#undef BAGUA_VECTOR_BYTES
}  // namespace avx512

namespace {
constexpr const KernelTable* kTables[kIsaCount] = {&baseline::kKernels, &avx2::kKernels,
                                                   &avx512::kKernels};
}  // namespace
#else
namespace {
constexpr const KernelTable* kTables[kIsaCount] = {&baseline::kKernels, &baseline::kKernels,
                                                   &baseline::kKernels};
}  // namespace
#endif

const KernelTable& ActiveKernels() {
  return *kTables[static_cast<int>(ActiveIsa())];
}

}  // namespace bagua
