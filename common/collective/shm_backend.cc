// Collectives among the ranks of one host. Small allreduces take one step: everyone publishes its
// values and reduces all of them, in the same order. Large ones stream through staging memory that
// stays in the cache: rank r reduces part r of each block.
#include <cstring>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/collective/chunk.h"
#include "common/collective/shm_group.h"

namespace bagua {
namespace {

class ShmBackend final : public CollectiveBackend {
 public:
  ShmBackend(std::unique_ptr<ShmGroup> group, CopyCounter* copies)
      : group_(std::move(group)), copies_(copies) {}
  const char* name() const override { return "shm"; }

  Task<Status> Allreduce(Tag tag, const Pieces& data, Reduction how) override;
  Task<Status> Allgather(Tag tag, std::span<const std::byte> in, std::span<std::byte> out,
                         const std::vector<size_t>& bytes) override;
  Task<Status> Broadcast(Tag tag, std::span<std::byte> data, int root) override;
  Task<Status> ReduceScatter(Tag tag, const std::byte* in, std::byte* out,
                             const std::vector<size_t>& counts, Reduction how) override;
  Task<Status> Alltoall(Tag tag, std::span<const std::byte> in,
                        const std::vector<size_t>& send_bytes, std::span<std::byte> out,
                        const std::vector<size_t>& recv_bytes, size_t largest) override;
  Task<Status> Barrier(Tag tag) override;

 private:
  int size() const { return group_->size(); }
  int rank() const { return group_->rank(); }
  Task<Status> Meet() { return group_->WaitAll(group_->Post()); }

  Task<Status> AllreduceSmall(const Pieces& data, Reduction how);
  void CopyIn(const Pieces& data, const Chunk& block, uint64_t turn);
  void ReduceOwn(const Pieces& data, const Chunk& block, uint64_t turn, const Reduction& how);
  void CopyOut(const Pieces& data, const Chunk& block, uint64_t turn);

  // To or from staging memory.
  void Copy(void* dst, const void* src, size_t bytes) {
    if (bytes == 0) return;
    std::memcpy(dst, src, bytes);
    copies_->Add(bytes);
  }

  const std::unique_ptr<ShmGroup> group_;
  CopyCounter* const copies_;
  uint64_t slot_turn_ = 0;
  uint64_t staging_turn_ = 0;
};

Task<Status> ShmBackend::AllreduceSmall(const Pieces& data, Reduction how) {
  const uint64_t turn = slot_turn_++;
  data.Pack(0, data.count(), group_->slot(rank(), turn));
  copies_->Add(data.bytes());
  BAGUA_CO_RETURN_IF_ERROR(co_await Meet());
  const size_t each = data.element_bytes();
  std::vector<const void*> inputs(size());
  data.ForEach(0, data.count(), [&](const std::byte*, std::byte* out, size_t offset, size_t count) {
    for (int r = 0; r < size(); ++r) inputs[r] = group_->slot(r, turn) + offset * each;
    void* const outputs[] = {out};
    Reduce(how.dtype, how.op, inputs, outputs, count, how.scaling);
  });
  co_return Status();
}

// Own part stays where it is: the rank reads it there.
void ShmBackend::CopyIn(const Pieces& data, const Chunk& block, uint64_t turn) {
  for (int part = 0; part < size(); ++part) {
    if (part == rank()) continue;
    const Chunk chunk = ChunkOf(block.count, size(), part);
    data.Pack(block.begin + chunk.begin, chunk.count,
              group_->staging(rank(), turn) + chunk.begin * data.element_bytes());
    copies_->Add(chunk.count * data.element_bytes());
  }
}

// The result goes to this rank's output and, for the others to copy, to its staging memory.
void ShmBackend::ReduceOwn(const Pieces& data, const Chunk& block, uint64_t turn,
                           const Reduction& how) {
  const Chunk own = ChunkOf(block.count, size(), rank());
  std::vector<const void*> inputs(size());
  data.ForEach(block.begin + own.begin, own.count,
               [&](const std::byte* in, std::byte* out, size_t offset, size_t count) {
                 const size_t at = (own.begin + offset) * data.element_bytes();
                 for (int r = 0; r < size(); ++r) inputs[r] = group_->staging(r, turn) + at;
                 inputs[rank()] = in;
                 void* const outputs[] = {out, group_->staging(rank(), turn) + at};
                 Reduce(how.dtype, how.op, inputs, outputs, count, how.scaling);
               });
}

void ShmBackend::CopyOut(const Pieces& data, const Chunk& block, uint64_t turn) {
  for (int part = 0; part < size(); ++part) {
    if (part == rank()) continue;
    const Chunk chunk = ChunkOf(block.count, size(), part);
    data.Unpack(block.begin + chunk.begin, chunk.count,
                group_->staging(part, turn) + chunk.begin * data.element_bytes());
    copies_->Add(chunk.count * data.element_bytes());
  }
}

Task<Status> ShmBackend::Allreduce(Tag /*tag*/, const Pieces& data, Reduction how) {
  if (data.bytes() <= group_->slot_bytes()) co_return co_await AllreduceSmall(data, how);
  const size_t most = group_->staging_bytes() / data.element_bytes();
  const size_t blocks = BlockCount(data.count(), most);
  const auto block = [&](size_t k) { return BlockOf({0, data.count()}, most, k); };
  const uint64_t turn = staging_turn_;
  staging_turn_ += blocks;

  // Block k + 1 is copied in before anyone waits for block k, so that ranks rarely wait at all.
  CopyIn(data, block(0), turn);
  BAGUA_CO_RETURN_IF_ERROR(co_await Meet());
  ReduceOwn(data, block(0), turn, how);
  uint64_t reduced = group_->Post();
  for (size_t k = 0; k < blocks; ++k) {
    const bool more = k + 1 < blocks;
    uint64_t copied = 0;
    if (more) {
      CopyIn(data, block(k + 1), turn + k + 1);
      copied = group_->Post();
    }
    BAGUA_CO_RETURN_IF_ERROR(co_await group_->WaitAll(reduced));
    CopyOut(data, block(k), turn + k);
    if (!more) break;
    BAGUA_CO_RETURN_IF_ERROR(co_await group_->WaitAll(copied));
    ReduceOwn(data, block(k + 1), turn + k + 1, how);
    reduced = group_->Post();
  }
  co_return Status();
}

Task<Status> ShmBackend::Allgather(Tag /*tag*/, std::span<const std::byte> in,
                                   std::span<std::byte> out, const std::vector<size_t>& bytes) {
  const size_t most = group_->staging_bytes();
  const size_t rounds = BlockCount(*std::max_element(bytes.begin(), bytes.end()), most);
  for (size_t k = 0; k < rounds; ++k) {
    const uint64_t turn = staging_turn_++;
    const Chunk mine = BlockOf({0, in.size()}, most, k);
    Copy(group_->staging(rank(), turn), in.data() + mine.begin, mine.count);
    BAGUA_CO_RETURN_IF_ERROR(co_await Meet());
    size_t begin = 0;
    for (int r = 0; r < size(); ++r) {
      const Chunk theirs = BlockOf({begin, bytes[r]}, most, k);
      Copy(out.data() + theirs.begin, group_->staging(r, turn), theirs.count);
      begin += bytes[r];
    }
  }
  co_return Status();
}

Task<Status> ShmBackend::Broadcast(Tag /*tag*/, std::span<std::byte> data, int root) {
  const size_t most = group_->staging_bytes();
  for (size_t k = 0; k < BlockCount(data.size(), most); ++k) {
    const uint64_t turn = staging_turn_++;
    const Chunk block = BlockOf({0, data.size()}, most, k);
    if (rank() == root) Copy(group_->staging(root, turn), data.data() + block.begin, block.count);
    BAGUA_CO_RETURN_IF_ERROR(co_await Meet());
    if (rank() != root) Copy(data.data() + block.begin, group_->staging(root, turn), block.count);
  }
  co_return Status();
}

// A round's staging memory holds one part for each rank.
Task<Status> ShmBackend::ReduceScatter(Tag /*tag*/, const std::byte* in, std::byte* out,
                                       const std::vector<size_t>& counts, Reduction how) {
  const size_t each = SizeOf(how.dtype);
  const size_t most = std::max<size_t>(1, group_->staging_bytes() / size() / each);
  BAGUA_CHECK(most * size() * each <= group_->staging_bytes()) << size() << " ranks";
  const size_t rounds = BlockCount(*std::max_element(counts.begin(), counts.end()), most);
  std::vector<const void*> inputs(size());
  for (size_t k = 0; k < rounds; ++k) {
    const uint64_t turn = staging_turn_++;
    size_t begin = 0;
    Chunk mine;
    for (int r = 0; r < size(); ++r) {
      const Chunk theirs = BlockOf({begin, counts[r]}, most, k);
      if (r == rank()) mine = theirs;
      Copy(group_->staging(rank(), turn) + r * most * each, in + theirs.begin * each,
           theirs.count * each);
      begin += counts[r];
    }
    BAGUA_CO_RETURN_IF_ERROR(co_await Meet());
    if (mine.count == 0) continue;
    for (int r = 0; r < size(); ++r) inputs[r] = group_->staging(r, turn) + rank() * most * each;
    void* const outputs[] = {out + k * most * each};
    Reduce(how.dtype, how.op, inputs, outputs, mine.count, how.scaling);
  }
  co_return Status();
}

Task<Status> ShmBackend::Alltoall(Tag /*tag*/, std::span<const std::byte> in,
                                  const std::vector<size_t>& send_bytes, std::span<std::byte> out,
                                  const std::vector<size_t>& recv_bytes, size_t largest) {
  const size_t most = group_->staging_bytes() / size();
  for (size_t k = 0; k < BlockCount(largest, most); ++k) {
    const uint64_t turn = staging_turn_++;
    size_t begin = 0;
    for (int r = 0; r < size(); ++r) {
      const Chunk part = BlockOf({begin, send_bytes[r]}, most, k);
      Copy(group_->staging(rank(), turn) + r * most, in.data() + part.begin, part.count);
      begin += send_bytes[r];
    }
    BAGUA_CO_RETURN_IF_ERROR(co_await Meet());
    begin = 0;
    for (int r = 0; r < size(); ++r) {
      const Chunk part = BlockOf({begin, recv_bytes[r]}, most, k);
      Copy(out.data() + part.begin, group_->staging(r, turn) + rank() * most, part.count);
      begin += recv_bytes[r];
    }
  }
  co_return Status();
}

Task<Status> ShmBackend::Barrier(Tag /*tag*/) {
  co_return co_await Meet();
}

}  // namespace

std::unique_ptr<CollectiveBackend> MakeShmBackend(std::unique_ptr<ShmGroup> group,
                                                  CopyCounter* copies) {
  return std::make_unique<ShmBackend>(std::move(group), copies);
}

}  // namespace bagua
