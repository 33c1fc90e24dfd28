#include "tensorflow/waiting.h"

#include <atomic>

namespace bagua_tensorflow {
namespace {

std::atomic<int (*)()> g_interrupted{nullptr};

}  // namespace

void WatchInterrupts(int (*interrupted)()) {
  g_interrupted.store(interrupted, std::memory_order_release);
}

bool Interrupted() {
  int (*const ask)() = g_interrupted.load(std::memory_order_acquire);
  return ask != nullptr && ask() != 0;
}

}  // namespace bagua_tensorflow
