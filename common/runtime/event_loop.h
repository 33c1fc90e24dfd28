// Carries the engine's work on: by a background thread that sleeps on events, and by threads that
// wait for a result, which spare the hand-over to it and back.
//
// One thread at a time drives: it takes passes over the work until nothing moves. Whoever waits
// drives, spins for a moment and then sleeps on the engine's events itself, in charge of whatever
// arrives; the background thread rests meanwhile. Without a waiter in charge the background thread
// watches the events. Before any of them sleeps it arms the doorbell and takes a last pass, so that
// whoever brings work afterwards, this process through Notify or a peer through the bell, wakes it.
//
// While short operations follow each other, the background thread rests for kRest at a time, for
// kLongRest where a waiter is in charge, and a
// waiter that leaves nothing outstanding leaves the bell unarmed: peers then need no system call to
// wake somebody who is about to come anyway. After a rest without activity the thread arms the bell
// and sleeps without limit. Likewise it rests for kBatch while this process brings work faster than
// it could be woken for each.
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
  static constexpr std::chrono::milliseconds kRest{2};
  // While notifications follow each other closely the thread takes them in batches, this far apart.
  static constexpr std::chrono::microseconds kBatch{100};
  // A rest ends at the latest then, though a waiter is in charge.
  static constexpr std::chrono::milliseconds kLongRest{50};

  EventLoop(Work* work, Doorbell* bell, std::chrono::nanoseconds spin);
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Before Start: also wakes for arrivals and room at `fd`.
  Status Watch(int fd);
  Status Start();
  // Ends the thread. Whoever waits, or comes to wait, drives by itself. Idempotent.
  void Stop();

  // Something to do was left for the next pass. Never blocks.
  void Notify();
  // The same for work that a waiter of this process is about to come for: a resting thread is left
  // alone, since it looks in soon enough.
  void NotifyLazily();

  // Until done() or the deadline; true if done(). Drives meanwhile if nobody else does. `done` is
  // called often, by this thread, and must become true in a pass or before WakeWaiters.
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

  // The background thread sleeps until something wakes it, however long that takes.
  bool asleep() const {
    return state_.load(std::memory_order_seq_cst) == ThreadState::kWatching &&
           next_deadline_.load(std::memory_order_seq_cst) == kForever;
  }
  // How often the background thread woke.
  int64_t wakeups() const { return wakeups_.load(std::memory_order_relaxed); }
  // In a forked child: closes the descriptor; takes no lock. The loop must not be used afterwards.
  void CloseInChild();

 private:
  using Condition = std::function<bool()>;
  enum class ThreadState : int { kAwake, kWatching, kResting, kBatching };

  bool Wait(const Condition& done, Deadline deadline);
  // Tries to drive; false if somebody else does. `in_charge`: this waiter is the one to sleep on
  // the events; ends when it is done.
  bool TryDrive(const Condition& done, Deadline deadline, bool* in_charge);
  // With driver_ held: passes until done() or nothing moves for the spin time.
  void Drive(const Condition& done, Deadline deadline);
  void LearnFromSpin(bool succeeded);
  // With driver_ held: a last look, before it the bell is armed if `arms`, so that what comes from
  // here on wakes somebody.
  void LastLook(bool arms);
  // True if there was an event, which nobody else sees then.
  bool SleepOnEvents(Deadline deadline);
  void SleepOnWaiters(const Condition& done, Deadline deadline);
  void WakeThread();
  // Lets the thread watch the events if it rests.
  void RouseThread();
  void Run();
  // One round of the thread: pass, then watch or rest.
  void Round();
  void RestFor(std::chrono::microseconds limit);
  // Whether notifications come faster than waking for each is worth.
  bool InBurst();
  int TimeoutUntil(Deadline deadline) const;

  Work* const work_;
  Doorbell* const bell_;
  const std::chrono::nanoseconds spin_;
  std::mutex driver_;
  std::chrono::nanoseconds spin_budget_;  // guarded by driver_: spin time of the next wait
  int failed_spins_ = 0;                  // guarded by driver_
  bool active_ = false;              // guarded by driver_: something moved since the thread looked
  std::atomic<bool> rests_{false};   // the thread comes back by itself soon; it alone writes
  std::atomic<bool> charge_{false};  // a waiter sleeps on the events, or is about to
  std::atomic<bool> on_events_{false};             // the waiter in charge sleeps
  std::atomic<Deadline> next_deadline_{kForever};  // of the work, as last seen
  std::atomic<ThreadState> state_{ThreadState::kAwake};
  bool took_events_ = false;            // of the thread
  Deadline notified_at_{};              // of the thread: its last round that was notified of
  std::atomic<bool> notified_{false};   // since the thread looked
  std::atomic<bool> signalled_{false};  // Notify signalled, and nobody has taken it
  std::atomic<bool> stopped_{false};
  std::atomic<int64_t> wakeups_{0};

  std::mutex rest_mutex_;
  std::condition_variable rest_over_;
  bool roused_ = false;  // guarded by rest_mutex_

  std::mutex sleep_mutex_;
  std::condition_variable awake_;
  std::atomic<int> sleepers_{0};
  uint64_t wake_count_ = 0;  // guarded by sleep_mutex_

  UniqueFd epoll_;
  std::thread thread_;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_EVENT_LOOP_H_
