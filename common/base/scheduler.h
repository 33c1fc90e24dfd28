// Keeps the coroutines that wait for something and resumes those whose condition holds.
//
// Thread-safety: one thread at a time (the one that drives the engine's loop).
#ifndef BAGUA_COMMON_BASE_SCHEDULER_H_
#define BAGUA_COMMON_BASE_SCHEDULER_H_

#include <coroutine>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/base/task.h"

namespace bagua {

class Scheduler {
 public:
  static constexpr int kNoPeer = -1;

  // A suspended coroutine and what it waits for; lives in the coroutine's frame.
  class Waiter {
   public:
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;
    virtual bool Ready() = 0;

   protected:
    Waiter(Scheduler* scheduler, int peer) : scheduler_(scheduler), peer_(peer) {}
    ~Waiter() { Unlink(); }
    void Unlink();

    Scheduler* scheduler_;
    const int peer_;
    Status status_;
    std::coroutine_handle<> coroutine_;
    Waiter* previous_ = nullptr;
    Waiter* next_ = nullptr;
    bool linked_ = false;
    friend class Scheduler;
  };

  template <class Predicate>
  class [[nodiscard]] UntilAwaiter final : public Waiter {
   public:
    UntilAwaiter(Scheduler* scheduler, Predicate predicate, int peer)
        : Waiter(scheduler, peer), predicate_(std::move(predicate)) {}
    bool Ready() override { return predicate_(); }
    bool await_ready() {
      if (!scheduler_->failure_.ok()) {
        status_ = scheduler_->failure_;
        return true;
      }
      return predicate_();
    }
    void await_suspend(std::coroutine_handle<> coroutine) {
      coroutine_ = coroutine;
      scheduler_->Link(this);
    }
    Status await_resume() { return status_; }

   private:
    Predicate predicate_;
  };

  // co_await Until(condition, peer): continues with OK once condition() holds, or with the failure
  // given to Fail. `peer`, the rank expected to make it true, is named when the wait takes too
  // long.
  template <class Predicate>
  UntilAwaiter<Predicate> Until(Predicate predicate, int peer = kNoPeer) {
    return UntilAwaiter<Predicate>(this, std::move(predicate), peer);
  }

  // Lets everything else that can run do so first.
  auto Yield() {
    return Until([first = true]() mutable { return !std::exchange(first, false); });
  }

  // Resumes, once over the list, every coroutine whose condition holds. True if there was one.
  bool Poll();

  // Sticky: every wait, present and future, ends with `failure`. Resumes the present ones. The
  // first failure stays.
  void Fail(const Status& failure);
  const Status& failure() const { return failure_; }

  // The ranks that present waits depend on, without repetition.
  std::vector<int> AwaitedPeers() const;
  bool IsAwaited(int peer) const;

 private:
  void Link(Waiter* waiter);
  static void Resume(Waiter* waiter, const Status& status);

  Waiter* head_ = nullptr;
  Waiter* tail_ = nullptr;
  Waiter* cursor_ = nullptr;  // next to look at; Unlink moves it on
  Status failure_;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_SCHEDULER_H_
