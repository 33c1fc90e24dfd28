// The loop loses no wake-up, whoever drives.
#include "common/runtime/event_loop.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"

namespace bagua {
namespace {

// Jobs that are done some passes after they were given, as operations are.
class Jobs final : public Work {
 public:
  struct Job {
    std::atomic<bool> done{false};
    int passes = 0;
  };

  explicit Jobs(std::chrono::microseconds spin) : loop_(this, &bell_, spin) {
    ExpectOk(loop_.Start());
  }
  ~Jobs() override { loop_.Stop(); }

  void Give(Job* job) {
    {
      std::lock_guard lock(mutex_);
      inbox_.push_back(job);
      filled_.store(true, std::memory_order_seq_cst);
    }
  }
  // By somebody who does not belong to this process: writes, then rings.
  void GiveFromOutside(Job* job) {
    Give(job);
    bell_.Ring();
  }
  EventLoop& loop() { return loop_; }
  void Postpone(Deadline until) { postponed_ = until; }

  bool Pass() override {
    EXPECT_FALSE(driving_.exchange(true)) << "two threads drive at once";
    bool moved = false;
    if (filled_.load(std::memory_order_seq_cst)) {
      std::lock_guard lock(mutex_);
      filled_.store(false, std::memory_order_relaxed);
      jobs_.insert(jobs_.end(), inbox_.begin(), inbox_.end());
      inbox_.clear();
      moved = true;
    }
    bool ended = false;
    std::erase_if(jobs_, [&](Job* job) {
      if (job->passes-- > 0) {
        moved = true;
        return false;
      }
      job->done.store(true, std::memory_order_release);
      return ended = true;
    });
    if (Clock::now() >= postponed_) {
      postponed_ = kForever;
      due_.store(true);
      moved = ended = true;
    }
    if (ended) loop_.WakeWaiters();
    driving_.store(false);
    return moved || ended;
  }
  bool outstanding() const override { return !jobs_.empty(); }
  Deadline NextDeadline() const override { return postponed_; }
  bool due() const { return due_.load(); }

 private:
  DoorbellWord word_{};
  Doorbell bell_{&word_, Doorbell::MakeEvent()};
  std::mutex mutex_;
  std::vector<Job*> inbox_;
  std::atomic<bool> filled_{false};
  std::atomic<bool> driving_{false};
  std::vector<Job*> jobs_;
  Deadline postponed_ = kForever;
  std::atomic<bool> due_{false};
  EventLoop loop_;
};

class EventLoopTest : public testing::TestWithParam<int> {
 protected:
  std::chrono::microseconds spin() const { return std::chrono::microseconds(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(SpinMicroseconds, EventLoopTest, testing::Values(0, 50));

constexpr int kRounds = kSanitized ? 1500 : 10000;

TEST_P(EventLoopTest, WaitersDriveTheirOwnWork) {
  Jobs jobs(spin());
  for (int i = 0; i < kRounds; ++i) {
    Jobs::Job job;
    job.passes = i % 3;
    jobs.Give(&job);
    ASSERT_TRUE(jobs.loop().WaitUntil([&] { return job.done.load(); }, Patience())) << i;
  }
}

TEST_P(EventLoopTest, ManyThreadsThatGiveAndWaitLoseNoWakeUp) {
  Jobs jobs(spin());
  OnEachRank(4, [&](int thread) {
    std::mt19937 random(thread);
    for (int i = 0; i < kRounds / 4; ++i) {
      std::vector<Jobs::Job> own(1 + random() % 3);
      for (Jobs::Job& job : own) {
        job.passes = static_cast<int>(random() % 4);
        jobs.Give(&job);
        // Sometimes the background thread is to begin; sometimes the waiter does it all.
        if (random() % 2 == 0) jobs.loop().Notify();
      }
      for (Jobs::Job& job : own)
        ASSERT_TRUE(jobs.loop().WaitUntil([&] { return job.done.load(); }, Patience()))
            << thread << " " << i;
    }
  });
}

TEST_P(EventLoopTest, TheBackgroundThreadServesThoseWhoOnlyNotify) {
  Jobs jobs(spin());
  OnEachRank(3, [&](int) {
    for (int i = 0; i < kRounds / 8; ++i) {
      Jobs::Job job;
      jobs.Give(&job);
      jobs.loop().Notify();
      const Deadline end = Patience();
      while (!job.done.load(std::memory_order_acquire)) {
        ASSERT_LT(Clock::now(), end) << i;
        std::this_thread::yield();
      }
    }
  });
}

TEST_P(EventLoopTest, PeersThatRingAreHeardByWaitersAndByTheThread) {
  Jobs jobs(spin());
  std::atomic<Jobs::Job*> handed{nullptr};
  OnEachRank(2, [&](int thread) {
    for (int i = 0; i < kRounds / 4; ++i) {
      if (thread == 0) {
        Jobs::Job job;
        job.passes = i % 2;
        handed.store(&job);
        ASSERT_TRUE(jobs.loop().WaitUntil([&] { return job.done.load(); }, Patience())) << i;
      } else {
        Jobs::Job* job = nullptr;
        while ((job = handed.exchange(nullptr)) == nullptr) std::this_thread::yield();
        jobs.GiveFromOutside(job);
      }
    }
  });
}

TEST_P(EventLoopTest, ReturnsAtTheDeadlineWhenNothingComes) {
  Jobs jobs(spin());
  for (const double seconds : {0.0, 0.001, 0.02}) {
    const Deadline before = Clock::now();
    EXPECT_FALSE(jobs.loop().WaitUntil([] { return false; }, After(Seconds(seconds))));
    EXPECT_GE(Seconds(Clock::now() - before).count(), seconds);
  }
}

TEST_P(EventLoopTest, TakesAPassWhenTheWorkIsDueThoughNothingHappens) {
  Jobs jobs(spin());
  jobs.loop().AsDriver([&] { jobs.Postpone(After(Seconds(0.03))); });
  jobs.loop().Notify();
  EXPECT_TRUE(jobs.loop().WaitUntil([&] { return jobs.due(); }, Patience()));
}

TEST_P(EventLoopTest, SleepsWhileThereIsNothingToDo) {
  Jobs jobs(spin());
  Jobs::Job job;
  jobs.Give(&job);
  EXPECT_TRUE(jobs.loop().WaitUntil([&] { return job.done.load(); }, Patience()));
  // It comes back some times after activity, then sleeps without limit.
  const Deadline end = Patience();
  while (!jobs.loop().asleep() && Clock::now() < end) std::this_thread::yield();
  ASSERT_TRUE(jobs.loop().asleep());
  const int64_t before = jobs.loop().wakeups();
  // Meanwhile another loop's work becomes due, after the time of many rests.
  Jobs others(spin());
  others.loop().AsDriver([&] { others.Postpone(After(10 * EventLoop::kRest)); });
  others.loop().Notify();
  EXPECT_TRUE(others.loop().WaitUntil([&] { return others.due(); }, Patience()));
  EXPECT_TRUE(jobs.loop().asleep());
  EXPECT_EQ(jobs.loop().wakeups(), before);
}

TEST(EngineWaiters, ManyThreadsOfEachRankLoseNoWakeUp) {
  for (const double spin : {0.0, 50.0})
    for (const Fabric fabric : {Fabric::kLoopback, Fabric::kShm, Fabric::kTcp}) {
      Config config = UnwatchedConfig();
      config.spin_microseconds = spin;
      Cluster cluster(fabric, 2, config);
      cluster.Run([&](int rank, Engine& engine) {
        OnEachRank(3, [&](int thread) {
          for (int i = 0; i < (kSanitized ? 60 : 300); ++i) {
            Bytes data = ValuesOf(DType::kInt32, 50, rank, i);
            const OperationPtr operation =
                MakeAllreduce(StrCat("thread ", thread), DType::kInt32, &data);
            ExpectOk(engine.Enqueue(operation, /*caller_drives=*/i % 2 == 0));
            ExpectOk(Await(&engine, operation));
            ExpectReduced(data, DType::kInt32, ReduceOp::kSum, {0, 1}, i);
          }
        });
      });
    }
}

}  // namespace
}  // namespace bagua
