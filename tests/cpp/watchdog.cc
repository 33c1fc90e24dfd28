// Every test has a deadline: one that misses it shows the stack of each thread and aborts.
#include <dirent.h>
#include <execinfo.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include "tests/cpp/sanitized.h"

namespace bagua {
namespace {

constexpr std::chrono::seconds kDeadline{kSanitized ? 150 : 60};
constexpr int kShowStack = SIGUSR2;

std::atomic<bool> shown{false};

void ShowStack(int) {
  void* frames[48];
  const int count = ::backtrace(frames, 48);
  ::backtrace_symbols_fd(frames, count, STDERR_FILENO);
  shown.store(true);
}

void ShowStacks() {
  struct sigaction action {};
  action.sa_handler = ShowStack;
  ::sigaction(kShowStack, &action, nullptr);
  DIR* const threads = ::opendir("/proc/self/task");
  while (const dirent* entry = ::readdir(threads)) {
    const int thread = std::atoi(entry->d_name);
    if (thread == 0 || thread == ::gettid()) continue;
    std::fprintf(stderr, "--- thread %d\n", thread);
    shown.store(false);
    ::syscall(SYS_tgkill, ::getpid(), thread, kShowStack);
    // A thread that takes no signals is passed over.
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (!shown.load() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  }
  ::closedir(threads);
}

class Watchdog : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo& test) override {
    name_ = std::string(test.test_suite_name()) + "." + test.name();
    running_ = true;
    thread_ = std::thread([this] { Watch(); });
  }
  void OnTestEnd(const testing::TestInfo&) override {
    {
      std::lock_guard lock(mutex_);
      running_ = false;
    }
    ended_.notify_one();
    thread_.join();
  }

 private:
  void Watch() {
    std::unique_lock lock(mutex_);
    if (ended_.wait_for(lock, kDeadline, [this] { return !running_; })) return;
    std::fprintf(stderr, "%s did not end in %d s\n", name_.c_str(),
                 static_cast<int>(kDeadline.count()));
    ShowStacks();
    std::abort();
  }

  std::mutex mutex_;
  std::condition_variable ended_;
  bool running_ = false;
  std::string name_;
  std::thread thread_;
};

// Runs before main: gtest_main offers no other place.
const bool installed = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Watchdog);
  return true;
}();

}  // namespace
}  // namespace bagua
