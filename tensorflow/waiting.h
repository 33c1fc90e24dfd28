// How long the thread that runs a kernel may carry the core's work on itself.
#ifndef BAGUA_TENSORFLOW_WAITING_H_
#define BAGUA_TENSORFLOW_WAITING_H_

#include <atomic>

namespace bagua_tensorflow {

// Longest time in the core between two looks at signals and cancellation.
constexpr double kSliceSeconds = 0.1;

// See python_border.h.
void WatchInterrupts(int (*interrupted)());

// Asks Python whether a signal handler raised; runs the handlers if this is the main thread.
bool Interrupted();

// In a graph the thread of a kernel helps for a moment: handing a short operation to the core's
// thread and back costs more than the operation. Peers that are late are not worth it, so that the
// time is given only now and then after several that were in vain. Thread-safety: any thread.
class Patience {
 public:
  // Seconds to help with the next operation; 0: not at all.
  double Next();
  void Learn(bool ended);

 private:
  static constexpr double kSeconds = 200e-6;
  static constexpr int kMostMisses = 3;
  static constexpr int kRetryEvery = 32;

  std::atomic<int> misses_{0};
  std::atomic<int> skipped_{0};
};

}  // namespace bagua_tensorflow

#endif  // BAGUA_TENSORFLOW_WAITING_H_
