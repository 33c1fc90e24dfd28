// What the ranks of a group on one host share to run collectives: per rank a counter of published
// steps, two mailbox slots for small messages, and three staging buffers.
//
// Rules that make the buffers safe without acknowledgements. Every rank runs the same collectives
// in the same order, so all count the same steps. A step is: write own memory, Post, WaitAll, read
// the others'. A rank that posts step s + 1 has read everything of step s. Small collectives
// alternate between the two slots, so that a slot is written again only after its readers posted
// the step between; large ones take the staging buffers in turn, where a reader may lag by two.
#ifndef BAGUA_COMMON_COLLECTIVE_SHM_GROUP_H_
#define BAGUA_COMMON_COLLECTIVE_SHM_GROUP_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/config.h"
#include "common/base/scheduler.h"
#include "common/collective/backend.h"
#include "common/transport/doorbell.h"
#include "common/transport/segment.h"

namespace bagua {

// Start of a rank's segment.
struct ShmGroupHeader {
  // The configuration, for comparison: it must be the same on every rank.
  std::atomic<uint64_t> slot_bytes;
  std::atomic<uint64_t> staging_bytes;
  alignas(64) std::atomic<uint64_t> posted;
};

// Thread-safety: the thread that drives the engine's loop.
class ShmGroup {
 public:
  static constexpr int kStagingBuffers = 3;

  // Octets of a rank's segment.
  static size_t SegmentBytes(const Config& config);
  // `segments` and `bells` by rank of the group; this rank's own bell may be null.
  // Check gives kMismatch naming both ranks' values if the configurations differ.
  ShmGroup(const Config& config, GroupRanks group, std::vector<std::shared_ptr<Segment>> segments,
           std::vector<Doorbell*> bells, Scheduler* scheduler);
  // Writes this rank's header; before its segment is handed to the peers.
  static void Prepare(const Config& config, Segment* own);
  Status Check() const;

  int size() const { return group_.size(); }
  int rank() const { return group_.rank; }
  size_t slot_bytes() const { return slot_bytes_; }
  size_t staging_bytes() const { return staging_bytes_; }  // of one buffer
  std::byte* slot(int rank, uint64_t turn) const;
  std::byte* staging(int rank, uint64_t turn) const;

  // Publishes what this rank wrote and wakes those who sleep; returns the step's number.
  uint64_t Post();
  // Until every rank has published `step`.
  Task<Status> WaitAll(uint64_t step);
  Scheduler& scheduler() { return *scheduler_; }

 private:
  std::atomic<uint64_t>& posted(int rank) const;
  const GroupRanks group_;
  const size_t slot_bytes_;
  const size_t staging_bytes_;
  const std::vector<std::shared_ptr<Segment>> segments_;
  const std::vector<Doorbell*> bells_;
  Scheduler* const scheduler_;
  uint64_t step_ = 0;
};

// The collectives over such a group.
std::unique_ptr<CollectiveBackend> MakeShmBackend(std::unique_ptr<ShmGroup> group,
                                                  CopyCounter* copies);

}  // namespace bagua

#endif  // BAGUA_COMMON_COLLECTIVE_SHM_GROUP_H_
