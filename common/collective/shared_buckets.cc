#include "common/collective/shared_buckets.h"

#include <utility>

namespace bagua {
namespace {

constexpr size_t kPage = 4096;
// Octets of one rank's bucket that are reduced at once: with every rank's, they fit a core's cache.
constexpr size_t kPieceBytes = size_t{128} << 10;
// A claim word holds the step and, below, how many pieces of the chunk were taken in it.
constexpr int kPieceBits = 24;

struct alignas(64) Line {
  std::atomic<uint64_t> word;
};

// In every rank's segment: a line per bucket for "ready". In the first rank's also: a line per
// bucket for "finished" and one per bucket and chunk for claims.
size_t ControlLines(size_t buckets, int size) {
  return buckets * (2 + static_cast<size_t>(size));
}

size_t PieceCount(const BucketShape& shape) {
  return kPieceBytes / SizeOf(shape.dtype);
}

size_t PiecesIn(const BucketShape& shape, int size, int chunk) {
  return BlockCount(ChunkOf(shape.count, size, chunk).count, PieceCount(shape));
}

}  // namespace

BucketLayout BucketLayout::Of(std::vector<BucketShape> buckets, int size) {
  BucketLayout layout;
  size_t at = ControlLines(buckets.size(), size) * sizeof(Line);
  for (const BucketShape& shape : buckets) {
    at = (at + kPage - 1) / kPage * kPage;
    layout.begin.push_back(at);
    at += shape.count * SizeOf(shape.dtype);
  }
  layout.bytes = at;
  layout.buckets = std::move(buckets);
  return layout;
}

SharedBuckets::SharedBuckets(BucketLayout layout, GroupRanks group,
                             std::vector<std::shared_ptr<Segment>> segments,
                             std::vector<Doorbell*> bells, Scheduler* scheduler)
    : layout_(std::move(layout)),
      group_(std::move(group)),
      segments_(std::move(segments)),
      bells_(std::move(bells)),
      scheduler_(scheduler) {}

std::atomic<uint64_t>& SharedBuckets::ready(int rank, size_t bucket) const {
  return reinterpret_cast<Line*>(segments_[rank]->data())[bucket].word;
}

std::atomic<uint64_t>& SharedBuckets::finished(size_t bucket) const {
  return reinterpret_cast<Line*>(segments_[0]->data())[layout_.buckets.size() + bucket].word;
}

std::atomic<uint64_t>& SharedBuckets::claimed(size_t bucket, int chunk) const {
  const size_t line =
      2 * layout_.buckets.size() + bucket * static_cast<size_t>(group_.size()) + chunk;
  return reinterpret_cast<Line*>(segments_[0]->data())[line].word;
}

void SharedBuckets::RingAll() const {
  for (int r = 0; r < group_.size(); ++r)
    if (r != group_.rank) bells_[r]->Ring();
}

void SharedBuckets::Publish(size_t bucket, uint64_t step) {
  ready(group_.rank, bucket).store(step, std::memory_order_release);
  RingAll();
}

bool SharedBuckets::Claim(size_t bucket, int chunk, uint64_t step, size_t pieces,
                          size_t* piece) const {
  std::atomic<uint64_t>& word = claimed(bucket, chunk);
  uint64_t seen = word.load(std::memory_order_relaxed);
  while (true) {
    const uint64_t taken =
        (seen >> kPieceBits) == step ? seen & ((uint64_t{1} << kPieceBits) - 1) : 0;
    if (taken >= pieces) return false;
    const uint64_t next = (step << kPieceBits) | (taken + 1);
    if (word.compare_exchange_weak(seen, next, std::memory_order_acq_rel)) {
      *piece = taken;
      return true;
    }
  }
}

void SharedBuckets::ReducePiece(size_t bucket, const Chunk& piece, const Reduction& how) const {
  const size_t at = layout_.begin[bucket] + piece.begin * SizeOf(how.dtype);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (int r = 0; r < group_.size(); ++r) {
    inputs.push_back(segments_[r]->data() + at);
    outputs.push_back(segments_[r]->data() + at);
  }
  Reduce(how.dtype, how.op, inputs, outputs, piece.count, how.scaling);
}

Task<Status> SharedBuckets::Allreduce(size_t bucket, uint64_t step, Reduction how) {
  for (int r = 0; r < group_.size(); ++r) {
    const std::atomic<uint64_t>& word = ready(r, bucket);
    BAGUA_CO_RETURN_IF_ERROR(co_await scheduler_->Until(
        [&word, step] { return word.load(std::memory_order_acquire) >= step; }, group_.ranks[r]));
  }
  const BucketShape& shape = layout_.buckets[bucket];
  const int n = group_.size();
  size_t total = 0;
  for (int chunk = 0; chunk < n; ++chunk) total += PiecesIn(shape, n, chunk);
  // Own chunk first; then what others have not begun.
  for (int turn = 0; turn < n; ++turn) {
    const int chunk = Mod(group_.rank + turn, n);
    size_t piece = 0;
    while (Claim(bucket, chunk, step, PiecesIn(shape, n, chunk), &piece)) {
      ReducePiece(bucket, BlockOf(ChunkOf(shape.count, n, chunk), PieceCount(shape), piece), how);
      if (finished(bucket).fetch_add(1, std::memory_order_acq_rel) + 1 == step * total) RingAll();
      BAGUA_CO_RETURN_IF_ERROR(co_await scheduler_->Yield());
    }
  }
  const std::atomic<uint64_t>& done = finished(bucket);
  co_return co_await scheduler_->Until(
      [&done, end = step * total] { return done.load(std::memory_order_acquire) >= end; });
}

}  // namespace bagua
