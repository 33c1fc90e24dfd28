// Allreduce of flat buckets that lie in memory shared by all ranks of the group: nothing is copied.
// Once every rank has made a bucket ready, whoever has time reduces pieces of it, reading all
// ranks' buckets and writing the result to all of them; a rank that comes late finds the work done.
#ifndef BAGUA_COMMON_COLLECTIVE_SHARED_BUCKETS_H_
#define BAGUA_COMMON_COLLECTIVE_SHARED_BUCKETS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/scheduler.h"
#include "common/collective/backend.h"
#include "common/collective/chunk.h"
#include "common/transport/doorbell.h"
#include "common/transport/segment.h"

namespace bagua {

struct BucketShape {
  DType dtype = DType::kFloat32;
  size_t count = 0;
};

// Where things lie in a rank's segment of a plan; equal on all ranks.
struct BucketLayout {
  std::vector<BucketShape> buckets;
  std::vector<size_t> begin;  // octets, page-aligned
  size_t bytes = 0;           // of the segment
  static BucketLayout Of(std::vector<BucketShape> buckets, int size);
};

// Thread-safety: Publish from any thread; the rest by the thread that drives the engine's loop.
class SharedBuckets {
 public:
  // `segments` and `bells` by rank of the group; this rank's own bell may be null.
  SharedBuckets(BucketLayout layout, GroupRanks group,
                std::vector<std::shared_ptr<Segment>> segments, std::vector<Doorbell*> bells,
                Scheduler* scheduler);

  // This rank's bucket holds its values of `step` (1, 2, ...). Never blocks.
  void Publish(size_t bucket, uint64_t step);
  // Done when the bucket holds the result of `step` on every rank.
  Task<Status> Allreduce(size_t bucket, uint64_t step, Reduction how);

 private:
  std::atomic<uint64_t>& ready(int rank, size_t bucket) const;
  std::atomic<uint64_t>& claimed(size_t bucket, int chunk) const;
  std::atomic<uint64_t>& finished(size_t bucket) const;
  bool Claim(size_t bucket, int chunk, uint64_t step, size_t pieces, size_t* piece) const;
  void ReducePiece(size_t bucket, const Chunk& piece, const Reduction& how) const;
  void RingAll() const;

  const BucketLayout layout_;
  const GroupRanks group_;
  const std::vector<std::shared_ptr<Segment>> segments_;
  const std::vector<Doorbell*> bells_;
  Scheduler* const scheduler_;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_COLLECTIVE_SHARED_BUCKETS_H_
