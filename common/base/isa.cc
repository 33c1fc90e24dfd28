#include "common/base/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <atomic>

namespace bagua {
namespace {

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows the name.
bool HasF16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

Isa Detect() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !HasF16c()) return Isa::kBaseline;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return Isa::kAvx512;
  return Isa::kAvx2;
}
#else
Isa Detect() {
  return Isa::kBaseline;
}
#endif

std::atomic<Isa> limit{Isa::kAvx512};

}  // namespace

Isa ActiveIsa() {
  static const Isa detected = Detect();
  return std::min(detected, limit.load(std::memory_order_relaxed));
}

ScopedIsaLimit::ScopedIsaLimit(Isa most) {
  limit.store(most, std::memory_order_relaxed);
}

ScopedIsaLimit::~ScopedIsaLimit() {
  limit.store(Isa::kAvx512, std::memory_order_relaxed);
}

}  // namespace bagua
