// How long the thread that runs a kernel may carry the core's work on itself.
#ifndef BAGUA_TENSORFLOW_WAITING_H_
#define BAGUA_TENSORFLOW_WAITING_H_

namespace bagua_tensorflow {

// Longest time in the core between two looks at signals and cancellation.
constexpr double kSliceSeconds = 0.1;

// How long the thread of a graph's kernel helps before it leaves an operation to the core's thread:
// handing a short one over and back costs more than the operation, about as much as this.
constexpr double kHelpSeconds = 200e-6;
// The same for the gradients of a step, which take longer.
constexpr double kHelpWithPlanSeconds = 1e-3;

// See python_border.h.
void WatchInterrupts(int (*interrupted)());

// Asks Python whether a signal handler raised; runs the handlers if this is the main thread.
bool Interrupted();

}  // namespace bagua_tensorflow

#endif  // BAGUA_TENSORFLOW_WAITING_H_
