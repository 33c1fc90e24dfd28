#include "common/collective/shm_group.h"

#include <utility>

namespace bagua {
namespace {

constexpr size_t kHeaderBytes = 4096;
constexpr size_t kLine = 64;

size_t SlotBytes(const Config& config) {
  return config.shm_slot_bytes / kLine * kLine;
}

size_t StagingBytes(const Config& config) {
  return config.shm_staging_bytes / ShmGroup::kStagingBuffers / 4096 * 4096;
}

ShmGroupHeader& HeaderOf(const Segment& segment) {
  return *reinterpret_cast<ShmGroupHeader*>(segment.data());
}

}  // namespace

size_t ShmGroup::SegmentBytes(const Config& config) {
  return kHeaderBytes + 2 * SlotBytes(config) + kStagingBuffers * StagingBytes(config);
}

void ShmGroup::Prepare(const Config& config, Segment* own) {
  HeaderOf(*own).slot_bytes.store(config.shm_slot_bytes, std::memory_order_relaxed);
  HeaderOf(*own).staging_bytes.store(config.shm_staging_bytes, std::memory_order_relaxed);
}

ShmGroup::ShmGroup(const Config& config, GroupRanks group,
                   std::vector<std::shared_ptr<Segment>> segments, std::vector<Doorbell*> bells,
                   Scheduler* scheduler)
    : group_(std::move(group)),
      slot_bytes_(SlotBytes(config)),
      staging_bytes_(StagingBytes(config)),
      segments_(std::move(segments)),
      bells_(std::move(bells)),
      scheduler_(scheduler) {}

Status ShmGroup::Check() const {
  for (int r = 0; r < size(); ++r) {
    const ShmGroupHeader& theirs = HeaderOf(*segments_[r]);
    const uint64_t slot = theirs.slot_bytes.load(std::memory_order_relaxed);
    const uint64_t staging = theirs.staging_bytes.load(std::memory_order_relaxed);
    const ShmGroupHeader& own = HeaderOf(*segments_[rank()]);
    const uint64_t own_slot = own.slot_bytes.load(std::memory_order_relaxed);
    const uint64_t own_staging = own.staging_bytes.load(std::memory_order_relaxed);
    if (slot == own_slot && staging == own_staging) continue;
    return Status(
        StatusCode::kMismatch,
        StrCat("rank ", group_.ranks[r], " has BAGUA_SHM_SLOT_BYTES=", slot,
               " and BAGUA_SHM_STAGING_BYTES=", staging, ", rank ", group_.ranks[rank()], " has ",
               own_slot, " and ", own_staging, ". Set them to the same values on all ranks."));
  }
  return {};
}

std::atomic<uint64_t>& ShmGroup::posted(int rank) const {
  return HeaderOf(*segments_[rank]).posted;
}

std::byte* ShmGroup::slot(int rank, uint64_t turn) const {
  return segments_[rank]->data() + kHeaderBytes + (turn % 2) * slot_bytes_;
}

std::byte* ShmGroup::staging(int rank, uint64_t turn) const {
  return segments_[rank]->data() + kHeaderBytes + 2 * slot_bytes_ +
         (turn % kStagingBuffers) * staging_bytes_;
}

uint64_t ShmGroup::Post() {
  posted(rank()).store(++step_, std::memory_order_release);
  for (int r = 0; r < size(); ++r)
    if (r != rank()) bells_[r]->Ring();
  return step_;
}

Task<Status> ShmGroup::WaitAll(uint64_t step) {
  for (int r = 0; r < size(); ++r) {
    const std::atomic<uint64_t>& word = posted(r);
    BAGUA_CO_RETURN_IF_ERROR(co_await scheduler_->Until(
        [&word, step] { return word.load(std::memory_order_acquire) >= step; }, group_.ranks[r]));
  }
  co_return Status();
}

}  // namespace bagua
