// Collectives of one host under stress: ranks that run ahead and lag behind, over the memory that
// they share.
//
// Under ThreadSanitizer all ranks use one mapping of each segment, so that it sees how their
// accesses are ordered; elsewhere each rank has mappings of its own, as processes have.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "common/collective/shared_buckets.h"
#include "common/collective/shm_group.h"
#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"

namespace bagua {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kOneMapping = true;
#else
constexpr bool kOneMapping = false;
#endif

// Delays by an amount of work: up to some hundred microseconds, often none.
class Dawdler {
 public:
  explicit Dawdler(unsigned seed) : random_(seed) {}
  void Dawdle() {
    if (random_() % 3 != 0) return;
    const unsigned end = random_() % (random_() % 8 == 0 ? 200000 : 5000);
    for (unsigned i = 0; i < end; ++i) sum_ = sum_ * 31 + i;
    if (sum_ % 2 == 0) std::this_thread::yield();
  }
  std::mt19937& random() { return random_; }

 private:
  std::mt19937 random_;
  unsigned sum_ = 1;
};

// Segments and bells of ranks that are threads.
class Host {
 public:
  Host(int size, size_t bytes) : words_(size) {
    for (int r = 0; r < size; ++r) {
      segments_.push_back(Segment::Create(bytes).value());
      events_.push_back(Doorbell::MakeEvent());
      bells_.push_back(std::make_unique<Doorbell>(&words_[r], std::move(events_.back())));
    }
  }
  Segment* segment(int rank) { return segments_[rank].get(); }
  std::vector<Doorbell*> bells() {
    std::vector<Doorbell*> bells;
    for (const auto& bell : bells_) bells.push_back(bell.get());
    return bells;
  }
  std::vector<std::shared_ptr<Segment>> MappingsOf(int rank) {
    std::vector<std::shared_ptr<Segment>> all;
    for (size_t r = 0; r < segments_.size(); ++r)
      all.push_back(kOneMapping || static_cast<int>(r) == rank ? segments_[r] : MapAgain(r));
    return all;
  }

 private:
  std::shared_ptr<Segment> MapAgain(size_t rank) {
    UniqueFd copy(::fcntl(segments_[rank]->fd(), F_DUPFD_CLOEXEC, 0));
    return Segment::Map(std::move(copy), segments_[rank]->bytes()).value();
  }

  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<UniqueFd> events_;
  std::vector<DoorbellWord> words_;
  std::vector<std::unique_ptr<Doorbell>> bells_;
};

// Carries the task on until it is done.
Status Drive(Scheduler* scheduler, Task<Status>* task) {
  const Deadline end = Patience();
  while (!task->done()) {
    if (!scheduler->Poll()) std::this_thread::yield();
    if (Clock::now() >= end) return Status(StatusCode::kTimeout, "a collective does not end");
  }
  return task->Take();
}

class SharedMemoryTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SharedMemoryTest, testing::Values(1, 2, 3, 5));

float BucketValue(uint64_t step, int rank, size_t bucket, size_t i) {
  return static_cast<float>((step * 131 + static_cast<size_t>(rank) * 17 + bucket * 7 + i) % 251);
}

TEST_P(SharedMemoryTest, BucketsHoldEveryStepsSumHoweverRanksDawdle) {
  const int size = GetParam();
  const uint64_t steps = kSanitized ? 12 : 40;
  // Less than a piece, several pieces per chunk, fewer elements than ranks, none.
  const std::vector<size_t> counts = {1000, 250007, 2, 0, 40009};
  std::vector<BucketShape> shapes;
  for (const size_t count : counts) shapes.push_back({DType::kFloat32, count});
  const BucketLayout layout = BucketLayout::Of(shapes, size);
  Host host(size, layout.bytes);
  OnEachRank(size, [&](int rank) {
    Scheduler scheduler;
    const auto segments = host.MappingsOf(rank);
    SharedBuckets buckets(layout, {RanksUpTo(size), rank}, segments, host.bells(), &scheduler);
    Dawdler dawdler(rank);
    const auto data = [&](size_t b) {
      return reinterpret_cast<float*>(segments[rank]->data() + layout.begin[b]);
    };
    for (uint64_t step = 1; step <= steps; ++step) {
      for (size_t b = 0; b < counts.size(); ++b) {
        for (size_t i = 0; i < counts[b]; ++i) data(b)[i] = BucketValue(step, rank, b, i);
        dawdler.Dawdle();
        buckets.Publish(b, step);
      }
      for (size_t b = 0; b < counts.size(); ++b) {
        dawdler.Dawdle();
        Task<Status> task =
            buckets.Allreduce(b, step, {DType::kFloat32, ReduceOp::kSum, {1, 2, 1}});
        ExpectOk(Drive(&scheduler, &task));
      }
      for (size_t b = 0; b < counts.size(); ++b)
        for (size_t i = 0; i < counts[b]; ++i) {
          int64_t expected = 0;
          for (int r = 0; r < size; ++r)
            expected += static_cast<int64_t>(BucketValue(step, r, b, i)) * 2;
          ASSERT_EQ(data(b)[i], static_cast<float>(expected))
              << "step " << step << " bucket " << b << " element " << i;
        }
    }
  });
}

// One random collective, the same on every rank, whose result is checked.
class Rounds {
 public:
  Rounds(int size, int rank, CollectiveBackend* backend, Scheduler* scheduler)
      : size_(size), rank_(rank), backend_(backend), scheduler_(scheduler) {}

  void Run(unsigned seed) {
    std::mt19937 random(seed);
    const unsigned kind = random() % 6;
    const size_t count = random() % (random() % 3 == 0 ? 9000 : 200);
    seed_ = static_cast<int>(seed);
    if (kind == 0) return ExpectOk(Do(backend_->Barrier({})));
    if (kind == 1) return Allreduce(count);
    if (kind == 2) return Allgather(random);
    if (kind == 3) return Broadcast(count, static_cast<int>(random() % size_));
    if (kind == 4) return ReduceScatter(random);
    Alltoall(random);
  }

 private:
  Status Do(Task<Status> task) { return Drive(scheduler_, &task); }
  Bytes Values(size_t count, int rank) const { return ValuesOf(DType::kInt32, count, rank, seed_); }
  static void Append(Bytes* to, const Bytes& more) {
    to->insert(to->end(), more.begin(), more.end());
  }

  void Allreduce(size_t count) {
    Bytes data = Values(count, rank_);
    const Piece pieces[] = {
        {data.data(), data.data(), count / 3},
        {data.data() + count / 3 * 4, data.data() + count / 3 * 4, count - count / 3}};
    const Pieces whole(pieces, 4);
    if (count > 0)
      ExpectOk(Do(backend_->Allreduce({}, whole, {DType::kInt32, ReduceOp::kSum, {}})));
    ExpectReduced(data, DType::kInt32, ReduceOp::kSum, RanksUpTo(size_), seed_);
  }

  void Allgather(std::mt19937& random) {
    std::vector<size_t> bytes;
    Bytes expected;
    for (int r = 0; r < size_; ++r) {
      const size_t count = random() % 3 == 0 ? 0 : random() % 3000;
      bytes.push_back(count * 4);
      Append(&expected, Values(count, r));
    }
    const Bytes in = Values(bytes[rank_] / 4, rank_);
    Bytes out(expected.size());
    ExpectOk(Do(backend_->Allgather({}, in, out, bytes)));
    EXPECT_EQ(out, expected);
  }

  void Broadcast(size_t count, int root) {
    Bytes data = Values(count, rank_);
    ExpectOk(Do(backend_->Broadcast({}, data, root)));
    EXPECT_EQ(data, Values(count, root));
  }

  void ReduceScatter(std::mt19937& random) {
    std::vector<size_t> counts;
    size_t total = 0, begin = 0;
    for (int r = 0; r < size_; ++r) {
      counts.push_back(random() % 4 == 0 ? 0 : random() % 2500);
      if (r == rank_) begin = total;
      total += counts.back();
    }
    const Bytes in = Values(total, rank_);
    Bytes out(counts[rank_] * 4);
    ExpectOk(Do(backend_->ReduceScatter({}, in.data(), out.data(), counts,
                                        {DType::kInt32, ReduceOp::kSum, {}})));
    ExpectReduced(out, DType::kInt32, ReduceOp::kSum, RanksUpTo(size_), seed_, begin);
  }

  void Alltoall(std::mt19937& random) {
    std::vector<size_t> rows(size_ * size_);
    size_t largest = 0;
    for (size_t& count : rows) {
      count = random() % 3 == 0 ? 0 : random() % 1500;
      largest = std::max(largest, count * 4);
    }
    const auto part = [&](int from, int to) {
      return ValuesOf(DType::kInt32, rows[from * size_ + to], from, seed_ + to);
    };
    Bytes in, expected;
    std::vector<size_t> sent, received;
    for (int r = 0; r < size_; ++r) {
      Append(&in, part(rank_, r));
      Append(&expected, part(r, rank_));
      sent.push_back(rows[rank_ * size_ + r] * 4);
      received.push_back(rows[r * size_ + rank_] * 4);
    }
    Bytes out(expected.size());
    ExpectOk(Do(backend_->Alltoall({}, in, sent, out, received, largest)));
    EXPECT_EQ(out, expected);
  }

  const int size_;
  const int rank_;
  CollectiveBackend* const backend_;
  Scheduler* const scheduler_;
  int seed_ = 0;
};

TEST_P(SharedMemoryTest, CollectivesInAnyOrderNeverMeetInABufferThatIsStillRead) {
  const int size = GetParam();
  const int rounds = kSanitized ? 150 : 1000;
  Config config;
  config.shm_slot_bytes = 1024;
  config.shm_staging_bytes = 3 * 8192;
  Host host(size, ShmGroup::SegmentBytes(config));
  for (int r = 0; r < size; ++r) ShmGroup::Prepare(config, host.segment(r));
  OnEachRank(size, [&](int rank) {
    Scheduler scheduler;
    auto group = std::make_unique<ShmGroup>(config, GroupRanks{RanksUpTo(size), rank},
                                            host.MappingsOf(rank), host.bells(), &scheduler);
    ExpectOk(group->Check());
    CopyCounter copies;
    const auto backend = MakeShmBackend(std::move(group), &copies);
    Rounds collectives(size, rank, backend.get(), &scheduler);
    Dawdler dawdler(rank);
    for (int round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
      collectives.Run(round);
      dawdler.Dawdle();
    }
  });
}

TEST(Segment, KeepsPointersValidWhenItBecomesPrivate) {
  const std::shared_ptr<Segment> own = Segment::Create(10000).value();
  UniqueFd copy(::fcntl(own->fd(), F_DUPFD_CLOEXEC, 0));
  const std::shared_ptr<Segment> theirs = Segment::Map(std::move(copy), 10000).value();
  std::byte* const data = own->data();
  data[9999] = std::byte{1};
  EXPECT_EQ(theirs->data()[9999], std::byte{1});
  ExpectOk(own->MakePrivate());
  EXPECT_EQ(own->data(), data);
  EXPECT_EQ(data[9999], std::byte{1});
  data[9999] = std::byte{2};
  EXPECT_EQ(theirs->data()[9999], std::byte{1});
  theirs->data()[0] = std::byte{3};
  EXPECT_EQ(data[0], std::byte{0});
}

TEST(Segment, RefusesAFileThatIsTooSmall) {
  const std::shared_ptr<Segment> small = Segment::Create(4096).value();
  UniqueFd copy(::fcntl(small->fd(), F_DUPFD_CLOEXEC, 0));
  ExpectFails(Segment::Map(std::move(copy), 4097).status(), StatusCode::kInternal,
              {"4096", "8192"});
}

}  // namespace
}  // namespace bagua
