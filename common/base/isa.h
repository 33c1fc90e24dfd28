// The instruction set that vectorised kernels run on, chosen at run time by table: no ifunc, whose
// resolvers run before a sanitizer's runtime is ready.
#ifndef BAGUA_COMMON_BASE_ISA_H_
#define BAGUA_COMMON_BASE_ISA_H_

namespace bagua {

// Each set holds the ones before it. Values index tables.
enum class Isa : int {
  kBaseline = 0,  // what the compiler assumes anyway
  kAvx2 = 1,      // AVX2, F16C
  kAvx512 = 2,    // AVX-512 F, BW, DQ, VL
};
constexpr int kIsaCount = 3;

// The best set that this processor has. Results are the same bits on each. Thread-safety: any
// thread.
Isa ActiveIsa();

// Holds ActiveIsa() down to `most` while it lives, for tests. Not nested; no kernel runs meanwhile
// on another thread.
class ScopedIsaLimit {
 public:
  explicit ScopedIsaLimit(Isa most);
  ~ScopedIsaLimit();
  ScopedIsaLimit(const ScopedIsaLimit&) = delete;
  ScopedIsaLimit& operator=(const ScopedIsaLimit&) = delete;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_ISA_H_
