#include "common/runtime/event_loop.h"

#include <sched.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/base/thread.h"

namespace bagua {
namespace {

// Spinning this long yields to nobody; afterwards others that want the core get it.
constexpr std::chrono::microseconds kEagerSpin{5};

// A yield that takes longer went to a thread that wants the core for itself. A sleeper gets it back
// sooner than one that yields.
constexpr std::chrono::microseconds kLongYield{100};

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

EventLoop::EventLoop(Work* work, Doorbell* bell, std::chrono::nanoseconds spin)
    : work_(work),
      bell_(bell),
      spin_(spin),
      spin_budget_(spin),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  // A wake-up that finds its sleeper awake stays readable until the next sleep drains it.
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = bell_->fd();
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bell_->fd(), &event);
}

EventLoop::~EventLoop() {
  Stop();
}

Status EventLoop::Watch(int fd) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    return ErrnoStatus("watching a connection", errno);
  return {};
}

Status EventLoop::Start() {
  if (!epoll_.valid()) return ErrnoStatus("making an epoll descriptor", errno);
  thread_ = StartThread("bagua-loop", [this] { Run(); });
  return {};
}

void EventLoop::Stop() {
  if (!thread_.joinable()) return;
  stopped_.store(true, std::memory_order_seq_cst);
  WakeThread();
  bell_->Signal();
  thread_.join();
}

void EventLoop::WakeThread() {
  {
    std::lock_guard lock(rest_mutex_);
    roused_ = true;
  }
  rest_over_.notify_one();
}

void EventLoop::RouseThread() {
  ThreadState expected = ThreadState::kResting;
  if (state_.compare_exchange_strong(expected, ThreadState::kAwake)) WakeThread();
}

void EventLoop::Notify() {
  // Whoever is about to sleep stores its state first and looks for work after; the caller of Notify
  // stored its work first.
  notified_.store(true, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool charge = charge_.load(std::memory_order_seq_cst);
  if (!charge && state_.load(std::memory_order_seq_cst) != ThreadState::kWatching)
    return RouseThread();
  // One wake-up is enough, however many follow before somebody takes it.
  if (!signalled_.exchange(true, std::memory_order_seq_cst)) bell_->Signal();
}

void EventLoop::NotifyLazily() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (charge_.load(std::memory_order_seq_cst) ||
      state_.load(std::memory_order_seq_cst) == ThreadState::kWatching)
    Notify();
}

void EventLoop::WakeWaiters() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (on_events_.load(std::memory_order_seq_cst)) bell_->Signal();
  if (sleepers_.load(std::memory_order_relaxed) == 0) return;
  {
    std::lock_guard lock(sleep_mutex_);
    ++wake_count_;
  }
  awake_.notify_all();
}

// ---- Waiters ------------------------------------------------------------------------------------

bool EventLoop::Wait(const Condition& done, Deadline deadline) {
  bool in_charge = false;
  bool took_events = false;
  while (!done()) {
    const Deadline spin_end = std::min(deadline, Clock::now() + spin_);
    bool drove = TryDrive(done, deadline, &in_charge);
    // Nobody else sees the events that this thread took: it must not sleep before it has driven.
    while (!drove && !done() && (took_events || Clock::now() < spin_end)) {
      ::sched_yield();
      drove = TryDrive(done, deadline, &in_charge);
    }
    if (done() || Clock::now() >= deadline) break;
    took_events = false;
    if (in_charge) {
      // Another waiter may drive, and finish what this one waits for.
      on_events_.store(true, std::memory_order_seq_cst);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (!done()) took_events = SleepOnEvents(deadline);
      on_events_.store(false, std::memory_order_relaxed);
    } else {
      // Whoever holds the lock may have looked for work before this thread's arrived.
      Notify();
      SleepOnWaiters(done, deadline);
    }
  }
  if (in_charge) {
    charge_.store(false, std::memory_order_seq_cst);
    // What this waiter took off the events, and did not look at, is the thread's now.
    bell_->Signal();
    RouseThread();
  }
  // This thread may have taken the signal that is to end the background thread.
  if (stopped_.load(std::memory_order_seq_cst)) bell_->Signal();
  return done();
}

bool EventLoop::TryDrive(const Condition& done, Deadline deadline, bool* in_charge) {
  std::unique_lock lock(driver_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  Drive(done, deadline);
  const bool leaves = done();
  if (leaves && *in_charge) {
    *in_charge = false;
    charge_.store(false, std::memory_order_seq_cst);
  } else if (!leaves && !*in_charge) {
    *in_charge = !charge_.exchange(true, std::memory_order_seq_cst);
  }
  LastLook(charge_.load(std::memory_order_seq_cst));
  const bool abandons = leaves && work_->outstanding() && !charge_.load();
  lock.unlock();
  if (abandons) RouseThread();
  return true;
}

void EventLoop::Drive(const Condition& done, Deadline deadline) {
  bell_->Disarm();
  Deadline moved_at = Clock::now();
  while (!done()) {
    const bool moved = work_->Pass();
    const Deadline now = Clock::now();
    if (moved) {
      active_ = true;
      moved_at = now;
    } else if (now - moved_at < kEagerSpin) {
      Pause();
    } else {
      ::sched_yield();
      if (Clock::now() - now > kLongYield) {
        spin_budget_ = std::min<std::chrono::nanoseconds>(spin_, kEagerSpin);
        return;
      }
    }
    if (now >= deadline) return;
    if (now - moved_at >= spin_budget_) {
      LearnFromSpin(false);
      return;
    }
  }
  LearnFromSpin(true);
}

// Spinning pays where peers run at the same time: a sleeping core takes longer to wake than a small
// operation takes. Where others need the cores it only delays them. So what fails is tried for
// shorter, and in full again now and then.
void EventLoop::LearnFromSpin(bool succeeded) {
  if (succeeded) {
    spin_budget_ = std::min(spin_, spin_budget_ * 2);
    return;
  }
  constexpr int kProbe = 16;
  const bool probe = ++failed_spins_ % kProbe == 0;
  spin_budget_ = probe ? spin_ : std::max<std::chrono::nanoseconds>(spin_budget_ / 2, kEagerSpin);
  spin_budget_ = std::min(spin_budget_, spin_);
}

void EventLoop::LastLook(bool arms) {
  do {
    if (arms || !rests_.load(std::memory_order_relaxed) || work_->outstanding()) bell_->Arm();
    if (!work_->Pass()) break;
    active_ = true;
  } while (true);
  const Deadline next = work_->NextDeadline();
  const bool earlier = next < next_deadline_.load(std::memory_order_relaxed);
  next_deadline_.store(next, std::memory_order_seq_cst);
  // The thread would sleep past it.
  if (earlier && (state_.load(std::memory_order_seq_cst) == ThreadState::kWatching ||
                  on_events_.load(std::memory_order_seq_cst)))
    bell_->Signal();
}

bool EventLoop::SleepOnEvents(Deadline deadline) {
  const Deadline until = std::min(deadline, next_deadline_.load(std::memory_order_relaxed));
  epoll_event events[16];
  const int count = ::epoll_wait(epoll_.get(), events, 16, TimeoutUntil(until));
  for (int i = 0; i < count; ++i) {
    if (events[i].data.fd != bell_->fd()) continue;
    bell_->Drain();
    signalled_.exchange(false, std::memory_order_seq_cst);
  }
  return count > 0;
}

void EventLoop::SleepOnWaiters(const Condition& done, Deadline deadline) {
  std::unique_lock lock(sleep_mutex_);
  const uint64_t seen = wake_count_;
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const auto woken = [&] { return wake_count_ != seen; };
  if (!done()) {
    if (deadline == kForever)
      awake_.wait(lock, woken);
    else
      awake_.wait_until(lock, deadline, woken);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

// ---- The background thread ----------------------------------------------------------------------

int EventLoop::TimeoutUntil(Deadline deadline) const {
  if (deadline == kForever) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

bool EventLoop::InBurst() {
  if (!notified_.exchange(false, std::memory_order_relaxed)) return false;
  const Deadline now = Clock::now();
  return now - std::exchange(notified_at_, now) < 2 * kBatch;
}

void EventLoop::RestFor(std::chrono::microseconds limit) {
  std::unique_lock lock(rest_mutex_);
  rest_over_.wait_for(lock, limit, [this] { return roused_; });
  roused_ = false;
}

void EventLoop::Run() {
  while (!stopped_.load(std::memory_order_seq_cst)) {
    Round();
    state_.store(ThreadState::kAwake, std::memory_order_seq_cst);
    wakeups_.fetch_add(1, std::memory_order_relaxed);
  }
}

void EventLoop::Round() {
  std::unique_lock lock(driver_, std::try_to_lock);
  if (!lock.owns_lock() || charge_.load(std::memory_order_seq_cst)) {
    // A waiter looks after everything; if it leaves something outstanding, it ends the rest.
    if (lock.owns_lock()) lock.unlock();
    // What this thread took off the events is the waiter's, who may sleep already.
    if (std::exchange(took_events_, false) && charge_.load(std::memory_order_seq_cst))
      bell_->Signal();
    rests_.store(true, std::memory_order_relaxed);
    state_.store(ThreadState::kResting, std::memory_order_seq_cst);
    RestFor(charge_.load(std::memory_order_seq_cst) ? kLongRest : kRest);
    return;
  }
  took_events_ = false;
  bell_->Disarm();
  bool moved = false;
  while (work_->Pass()) moved = true;
  if (InBurst()) {
    rests_.store(true, std::memory_order_relaxed);
    state_.store(ThreadState::kBatching, std::memory_order_seq_cst);
    lock.unlock();
    return RestFor(kBatch);
  }
  bool watches = !(std::exchange(active_, false) || moved) || work_->outstanding();
  while (true) {
    rests_.store(!watches, std::memory_order_relaxed);
    state_.store(watches ? ThreadState::kWatching : ThreadState::kResting,
                 std::memory_order_seq_cst);
    if (watches) bell_->Arm();
    while (work_->Pass()) active_ = true;
    if (watches || !work_->outstanding()) break;
    watches = true;
  }
  next_deadline_.store(work_->NextDeadline(), std::memory_order_seq_cst);
  lock.unlock();
  if (watches && !stopped_.load(std::memory_order_seq_cst))
    took_events_ = SleepOnEvents(kForever);
  else
    RestFor(kRest);
}

void EventLoop::CloseInChild() {
  epoll_.Reset();
  if (thread_.joinable()) thread_.detach();
}

}  // namespace bagua
