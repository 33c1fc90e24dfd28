// Coroutines: a collective is written as straight-line code that co_awaits its peers.
//
// A Task runs at once, on the calling thread, until it first has to wait; so several can be started
// before the first is awaited. Whoever resumes the event it waits for carries it on. Destroying an
// unfinished Task abandons it: its waits are unlinked, its operations taken back. What the code
// throws, as where memory is short, becomes the Task's Status: whoever awaits it goes on as after
// any failure. So T is Status or a Result.
#ifndef BAGUA_COMMON_BASE_TASK_H_
#define BAGUA_COMMON_BASE_TASK_H_

#include <coroutine>
#include <optional>
#include <utility>

#include "common/base/check.h"
#include "common/base/status.h"

namespace bagua {

template <class T>
class [[nodiscard]] Task {
 public:
  struct promise_type {
    std::optional<T> value;
    std::coroutine_handle<> continuation;

    Task get_return_object() {
      return Task(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_never initial_suspend() noexcept { return {}; }
    auto final_suspend() noexcept {
      struct Final {
        bool await_ready() noexcept { return false; }
        std::coroutine_handle<> await_suspend(std::coroutine_handle<promise_type> self) noexcept {
          const std::coroutine_handle<> next = self.promise().continuation;
          return next ? next : std::noop_coroutine();
        }
        void await_resume() noexcept {}
      };
      return Final{};
    }
    void return_value(T result) { value = std::move(result); }
    void unhandled_exception() { value.emplace(CaughtStatus()); }
  };

  Task() = default;
  Task(Task&& other) noexcept : coroutine_(std::exchange(other.coroutine_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      if (coroutine_) coroutine_.destroy();
      coroutine_ = std::exchange(other.coroutine_, nullptr);
    }
    return *this;
  }
  ~Task() {
    if (coroutine_) coroutine_.destroy();
  }

  bool done() const { return !coroutine_ || coroutine_.done(); }
  // The result; only once done().
  T Take() {
    BAGUA_CHECK(coroutine_ && coroutine_.done());
    return std::move(*coroutine_.promise().value);
  }

  auto operator co_await() noexcept {
    struct Awaiter {
      Task* task;
      bool await_ready() noexcept { return task->coroutine_.done(); }
      void await_suspend(std::coroutine_handle<> parent) noexcept {
        task->coroutine_.promise().continuation = parent;
      }
      T await_resume() { return task->Take(); }
    };
    return Awaiter{this};
  }

 private:
  explicit Task(std::coroutine_handle<promise_type> coroutine) : coroutine_(coroutine) {}
  std::coroutine_handle<promise_type> coroutine_;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_TASK_H_
