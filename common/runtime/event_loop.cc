#include "common/runtime/event_loop.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/base/thread.h"

namespace bagua {
namespace {

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

EventLoop::EventLoop(Work* work, Doorbell* bell, std::chrono::nanoseconds spin)
    : work_(work), bell_(bell), spin_(spin), epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  // A wake-up that finds the thread awake is level-triggered and drained by it.
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = bell_->fd();
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bell_->fd(), &event);
}

EventLoop::~EventLoop() { Stop(); }

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
  stopped_.store(true, std::memory_order_release);
  bell_->Signal();
  thread_.join();
}

void EventLoop::Notify() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_relaxed) && asleep_.exchange(false)) bell_->Signal();
}

void EventLoop::WakeWaiters() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_relaxed) == 0) return;
  {
    std::lock_guard lock(sleep_mutex_);
    ++wake_count_;
  }
  awake_.notify_all();
}

bool EventLoop::Wait(const Condition& done, Deadline deadline) {
  while (true) {
    const Deadline spin_end = std::min(deadline, Clock::now() + spin_);
    do {
      if (driver_.try_lock()) {
        Drive(done, deadline);
        Leave();
        Unlock();
        break;
      }
      Pause();
    } while (!done() && Clock::now() < spin_end);
    if (done()) return true;
    if (Clock::now() >= deadline) return false;
    // Whoever held the lock may have looked for work before this thread's arrived.
    Notify();
    SleepUntil(done, deadline);
    if (done()) return true;
  }
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
    } else {
      Pause();
    }
    if (now >= deadline || now - moved_at >= spin_) return;
  }
}

void EventLoop::Leave() {
  if (watching_ && !work_->outstanding()) return;
  bell_->Arm();
  while (work_->Pass()) active_ = true;
}

void EventLoop::Unlock() {
  const bool earlier = work_->NextDeadline() < wake_at_;
  driver_.unlock();
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool missed = missed_.load(std::memory_order_relaxed) && missed_.exchange(false);
  if (earlier || missed) bell_->Signal();
}

void EventLoop::SleepUntil(const Condition& done, Deadline deadline) {
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

int EventLoop::PrepareSleep(bool moved) {
  watching_ = std::exchange(active_, false) || moved;
  do {
    if (!watching_ || work_->outstanding()) bell_->Arm();
  } while (work_->Pass());
  const Deadline now = Clock::now();
  wake_at_ = work_->NextDeadline();
  if (watching_) wake_at_ = std::min<Deadline>(wake_at_, now + kWatchInterval);
  if (wake_at_ == kForever) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(wake_at_ - now).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

void EventLoop::Run() {
  while (!stopped_.load(std::memory_order_acquire)) {
    int timeout = -1;
    missed_.store(true, std::memory_order_seq_cst);
    if (driver_.try_lock()) {
      missed_.store(false, std::memory_order_relaxed);
      bell_->Disarm();
      bool moved = false;
      while (work_->Pass()) moved = true;
      asleep_.store(true, std::memory_order_seq_cst);
      timeout = PrepareSleep(moved);
      driver_.unlock();
    } else {
      asleep_.store(true, std::memory_order_seq_cst);
    }
    epoll_event events[16];
    const int count = ::epoll_wait(epoll_.get(), events, 16, timeout);
    asleep_.store(false, std::memory_order_relaxed);
    wakeups_.fetch_add(1, std::memory_order_relaxed);
    for (int i = 0; i < count; ++i)
      if (events[i].data.fd == bell_->fd()) bell_->Drain();
  }
}

void EventLoop::CloseInChild() {
  epoll_.Reset();
  if (thread_.joinable()) thread_.detach();
}

}  // namespace bagua
