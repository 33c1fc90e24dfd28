// Carries out collectives among the ranks of one group.
#ifndef BAGUA_COMMON_COLLECTIVE_BACKEND_H_
#define BAGUA_COMMON_COLLECTIVE_BACKEND_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/base/task.h"
#include "common/base/types.h"
#include "common/collective/reduce_kernels.h"
#include "common/transport/mesh.h"

namespace bagua {

// A stretch of elements that is read from `in` and whose result goes to `out`, perhaps the same.
struct Piece {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t count = 0;
};

// Several tensors taken as one: their elements in order. The pieces must stay valid until the
// collective's Task is done.
class Pieces {
 public:
  Pieces(std::span<const Piece> pieces, size_t element_bytes);
  size_t count() const { return count_; }
  size_t bytes() const { return count_ * element_bytes_; }
  size_t element_bytes() const { return element_bytes_; }

  // Calls visit(in, out, offset, count) for each stretch within [begin, begin + count); `offset`
  // counts from `begin`.
  template <class Visit>
  void ForEach(size_t begin, size_t count, Visit visit) const {
    size_t index = FindPiece(begin);
    size_t done = 0;
    while (done < count) {
      const Piece& piece = pieces_[index];
      const size_t skip = begin + done - starts_[index];
      const size_t here = std::min(piece.count - skip, count - done);
      if (here > 0)
        visit(piece.in + skip * element_bytes_, piece.out + skip * element_bytes_, done, here);
      done += here;
      ++index;
    }
  }
  // The memory itself, if it is one stretch that is reduced in place; else empty.
  std::span<std::byte> InPlace() const;
  // Copies elements [begin, begin + count) of the inputs to `dst`, or of `src` to the outputs.
  void Pack(size_t begin, size_t count, std::byte* dst) const;
  void Unpack(size_t begin, size_t count, const std::byte* src) const;

 private:
  size_t FindPiece(size_t element) const;
  std::span<const Piece> pieces_;
  std::vector<size_t> starts_;
  size_t element_bytes_;
  size_t count_ = 0;
};

// Octets copied between users' memory and buffers on the way. Read by any thread.
struct CopyCounter {
  std::atomic<int64_t> bytes{0};
  void Add(size_t more) { bytes.fetch_add(static_cast<int64_t>(more), std::memory_order_relaxed); }
};

// How values are combined.
struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;  // sum, min, max, product
  Scaling scaling;
};

// One rank's view of a collective on several inputs and outputs is the same on every rank of the
// group but for the addresses. Ranks here are ranks within the group. Counts are octets unless
// said.
//
// Thread-safety: the thread that drives the engine's loop. One collective at a time per channel.
// Failure: the Status of the scheduler or transport; the whole engine has failed then.
class CollectiveBackend {
 public:
  virtual ~CollectiveBackend() = default;
  virtual const char* name() const = 0;

  // The same bits on every rank.
  virtual Task<Status> Allreduce(Tag tag, const Pieces& data, Reduction how) = 0;
  // Rank r gives `in` of bytes[r] octets; `out` holds all, in rank order.
  virtual Task<Status> Allgather(Tag tag, std::span<const std::byte> in, std::span<std::byte> out,
                                 const std::vector<size_t>& bytes) = 0;
  virtual Task<Status> Broadcast(Tag tag, std::span<std::byte> data, int root) = 0;
  // `in` holds sum(counts) elements; this rank gets the reduced counts[rank] of them, in `out`.
  virtual Task<Status> ReduceScatter(Tag tag, const std::byte* in, std::byte* out,
                                     const std::vector<size_t>& counts, Reduction how) = 0;
  // Sends send_bytes[r] octets to rank r, gets recv_bytes[r] from it, both in rank order.
  // `largest`: the most octets that any rank sends to any other, the same on all.
  virtual Task<Status> Alltoall(Tag tag, std::span<const std::byte> in,
                                const std::vector<size_t>& send_bytes, std::span<std::byte> out,
                                const std::vector<size_t>& recv_bytes, size_t largest) = 0;
  virtual Task<Status> Barrier(Tag tag) = 0;
};

// Ranks of a group, by global rank, and this rank's place among them.
struct GroupRanks {
  std::vector<int> ranks;
  int rank = 0;  // index into ranks
  int size() const { return static_cast<int>(ranks.size()); }
};

// Ring, tree and direct exchange over messages; any hosts. All must outlive the backend.
std::unique_ptr<CollectiveBackend> MakeMeshBackend(Mesh* mesh, GroupRanks group,
                                                   CopyCounter* copies);

}  // namespace bagua

#endif  // BAGUA_COMMON_COLLECTIVE_BACKEND_H_
