// Wakes a rank that sleeps. Ringing one that is awake costs one load.
//
// The word lives in memory that the ringers share with the sleeper. The sleeper arms the bell,
// looks once more for work, and only then sleeps; the ringer publishes its work first and rings
// after: one of the two always sees the other.
#ifndef BAGUA_COMMON_TRANSPORT_DOORBELL_H_
#define BAGUA_COMMON_TRANSPORT_DOORBELL_H_

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "common/base/fd.h"

namespace bagua {

// Cache-line sized; zero-initialised memory is a valid, disarmed word.
struct alignas(64) DoorbellWord {
  std::atomic<uint32_t> armed;
};

// Thread-safety: Ring from any thread; the rest by the sleeper.
class Doorbell {
 public:
  Doorbell() = default;
  Doorbell(DoorbellWord* word, UniqueFd event) : word_(word), event_(std::move(event)) {}

  static UniqueFd MakeEvent() { return UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)); }

  void Ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (word_->armed.load(std::memory_order_relaxed) == 0) return;
    if (word_->armed.exchange(0, std::memory_order_acq_rel) != 0) Signal();
  }
  // Wakes the sleeper whether armed or not.
  void Signal() {
    const uint64_t one = 1;
    // A full counter means that a wake-up is pending already.
    [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof(one));
  }
  // Before the last look for work.
  void Arm() {
    word_->armed.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  void Disarm() { word_->armed.store(0, std::memory_order_relaxed); }
  // After waking: takes pending signals off the descriptor.
  void Drain() {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_.get(), &count, sizeof(count));
  }
  int fd() const { return event_.get(); }

 private:
  DoorbellWord* word_ = nullptr;
  UniqueFd event_;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_DOORBELL_H_
