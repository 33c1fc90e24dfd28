#include "tensorflow/waiting.h"

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

double Patience::Next() {
  if (misses_.load(std::memory_order_relaxed) < kMostMisses) return kSeconds;
  const int skipped = skipped_.fetch_add(1, std::memory_order_relaxed);
  return skipped % kRetryEvery == kRetryEvery - 1 ? kSeconds : 0.0;
}

void Patience::Learn(bool ended) {
  if (ended)
    misses_.store(0, std::memory_order_relaxed);
  else
    misses_.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace bagua_tensorflow
