// Carries the engine's work on: by a background thread that sleeps on events, and by threads that wait
// for a result, which spare the hand-over to it and back.
//
// One thread at a time drives. A driver takes passes over the work until nothing moves, spins for a
// moment, then arms the doorbell, takes a last pass and goes. Whoever brings work afterwards, this
// process through Notify or a peer through the doorbell, wakes the background thread.
//
// While short operations follow each other, the thread watches: it looks in every kWatchInterval and a
// driver that leaves nothing outstanding may leave the bell unarmed, so that peers need no system call
// to wake somebody who is about to come anyway. After an interval without activity the bell is armed
// and the thread sleeps without limit.
#ifndef BAGUA_COMMON_RUNTIME_EVENT_LOOP_H_
#define BAGUA_COMMON_RUNTIME_EVENT_LOOP_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "common/base/clock.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/transport/doorbell.h"

namespace bagua {

// What the loop drives. Thread-safety: the driving thread.
class Work {
 public:
  virtual ~Work() = default;
  // Does what can be done without waiting; true if anything moved.
  virtual bool Pass() = 0;
  // Whether something is under way that peers carry on.
  virtual bool outstanding() const = 0;
  // When Pass has something to do even if nothing happens.
  virtual Deadline NextDeadline() const = 0;
};

// Thread-safety: any thread, unless said otherwise.
class EventLoop {
 public:
  static constexpr std::chrono::milliseconds kWatchInterval{2};

  EventLoop(Work* work, Doorbell* bell, std::chrono::nanoseconds spin);
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Before Start: also wakes for arrivals and room at `fd`.
  Status Watch(int fd);
  Status Start();
  // Ends the thread; nobody must be waiting or come to wait. Idempotent.
  void Stop();

  // Something to do was left for the next pass. Never blocks.
  void Notify();

  // Until done() or the deadline; true if done(). Drives meanwhile if nobody else does. `done` is called
  // often, by this thread, and must become true in a pass or before WakeWaiters.
  template <class Done>
  bool WaitUntil(Done done, Deadline deadline) {
    if (done()) return true;
    return Wait(std::ref(done), deadline);
  }
  // What somebody waits for may hold now.
  void WakeWaiters();

  // Runs `action` as the driver, after whoever drives now.
  template <class Action>
  auto AsDriver(Action action) {
    std::lock_guard lock(driver_);
    return action();
  }

  int64_t wakeups() const { return wakeups_.load(std::memory_order_relaxed); }
  // In a forked child: closes the descriptor; takes no lock. The loop must not be used afterwards.
  void CloseInChild();

 private:
  using Condition = std::function<bool()>;
  bool Wait(const Condition& done, Deadline deadline);
  // With driver_ held: passes until done() or nothing moves for the spin time.
  void Drive(const Condition& done, Deadline deadline);
  // With driver_ held: makes sure that what comes from here on wakes the thread.
  void Leave();
  void Unlock();
  void SleepUntil(const Condition& done, Deadline deadline);
  void Run();
  // With driver_ held, on the thread: how long to sleep, in ms; -1 without limit.
  int PrepareSleep(bool moved);

  Work* const work_;
  Doorbell* const bell_;
  const std::chrono::nanoseconds spin_;
  std::mutex driver_;
  // The thread could not take a pass because somebody else drove: look again after unlocking.
  std::atomic<bool> missed_{false};
  std::atomic<bool> asleep_{false};  // the thread sleeps or is about to
  bool watching_ = false;            // guarded by driver_
  bool active_ = false;              // guarded by driver_: something moved since the thread looked
  Deadline wake_at_ = kForever;      // guarded by driver_: when the thread wakes by itself
  std::atomic<bool> stopped_{false};
  std::atomic<int64_t> wakeups_{0};

  std::mutex sleep_mutex_;
  std::condition_variable awake_;
  std::atomic<int> sleepers_{0};
  uint64_t wake_count_ = 0;  // guarded by sleep_mutex_

  UniqueFd epoll_;
  std::thread thread_;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_EVENT_LOOP_H_
