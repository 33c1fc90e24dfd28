// Collectives over messages between ranks of a group. Small ones take log2(n) rounds, large ones
// move the least bytes; every rank ends with the same bits, since each element is reduced on one
// rank and copied, or in an order that is the same everywhere.
#include <bit>
#include <cstring>
#include <utility>

#include "common/base/check.h"
#include "common/collective/backend.h"
#include "common/collective/chunk.h"

namespace bagua {
namespace {

// Up to here latency counts more than bytes.
constexpr size_t kSmallBytes = size_t{32} << 10;
// A ring's chunk travels in segments of this size, so that reducing one overlaps receiving the
// next.
constexpr size_t kSegmentBytes = size_t{256} << 10;

class MeshBackend final : public CollectiveBackend {
 public:
  MeshBackend(Mesh* mesh, GroupRanks group, CopyCounter* copies)
      : mesh_(mesh), group_(std::move(group)), copies_(copies) {}
  const char* name() const override { return "mesh"; }

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
  int size() const { return group_.size(); }
  int rank() const { return group_.rank; }
  Task<Status> Send(int to, Tag tag, std::span<const std::byte> src) {
    return mesh_->Send(group_.ranks[to], tag, src);
  }
  Task<Status> Recv(int from, Tag tag, std::span<std::byte> dst) {
    return mesh_->Recv(group_.ranks[from], tag, dst);
  }

  void AllreduceAlone(const Pieces& data, const Reduction& how) const;
  Task<Status> ReduceAtRoot(Tag tag, std::span<std::byte> data, size_t count, Reduction how);
  Task<Status> ReduceChunksDirect(Tag tag, std::span<std::byte> data, std::span<const Chunk> chunks,
                                  Reduction how);
  Task<Status> RingReduceScatter(Tag tag, std::span<std::byte> data, Reduction how);
  Task<Status> ReceiveAndReduce(int from, Tag tag, std::span<std::byte> data, Reduction how);
  Task<Status> SendSegments(int to, Tag tag, std::span<const std::byte> data);
  Task<Status> RingAllgather(Tag tag, std::span<std::byte> data, std::span<const Chunk> chunks);

  Mesh* const mesh_;
  const GroupRanks group_;
  CopyCounter* const copies_;
};

// Binomial tree, reduced in rank order: rank r takes in r + 1, r + 2, r + 4, ... whose subtrees
// follow it without gap.
Task<Status> MeshBackend::ReduceAtRoot(Tag tag, std::span<std::byte> data, size_t count,
                                       Reduction how) {
  Bytes received(data.size());
  for (int distance = 1; distance < size(); distance *= 2) {
    if (rank() % (2 * distance) != 0) co_return co_await Send(rank() - distance, tag, data);
    if (rank() + distance >= size()) continue;
    BAGUA_CO_RETURN_IF_ERROR(co_await Recv(rank() + distance, tag, received));
    const void* const inputs[] = {data.data(), received.data()};
    void* const outputs[] = {data.data()};
    Reduce(how.dtype, how.op, inputs, outputs, count);
  }
  co_return Status();
}

// Every rank sends chunk r of its data to rank r, which reduces all of them in rank order with one
// rounding: for types whose partial sums must not be rounded on the way.
Task<Status> MeshBackend::ReduceChunksDirect(Tag tag, std::span<std::byte> data,
                                             std::span<const Chunk> chunks, Reduction how) {
  const size_t each = SizeOf(how.dtype);
  const Chunk mine = chunks[rank()];
  const size_t bytes = mine.count * each;
  Bytes received(bytes * static_cast<size_t>(size()));
  std::vector<Task<Status>> transfers;
  for (int step = 1; step < size(); ++step) {
    const int to = Mod(rank() + step, size());
    const int from = Mod(rank() - step, size());
    transfers.push_back(Recv(from, tag, std::span(received).subspan(from * bytes, bytes)));
    transfers.push_back(
        Send(to, tag, data.subspan(chunks[to].begin * each, chunks[to].count * each)));
  }
  for (Task<Status>& transfer : transfers) BAGUA_CO_RETURN_IF_ERROR(co_await transfer);
  if (mine.count == 0) co_return Status();
  std::vector<const void*> inputs;
  for (int from = 0; from < size(); ++from)
    inputs.push_back(from == rank() ? data.data() + mine.begin * each
                                    : received.data() + from * bytes);
  void* const outputs[] = {data.data() + mine.begin * each};
  Reduce(how.dtype, how.op, inputs, outputs, mine.count, how.scaling);
  co_return Status();
}

Task<Status> MeshBackend::SendSegments(int to, Tag tag, std::span<const std::byte> data) {
  for (size_t done = 0; done < data.size(); done += kSegmentBytes) {
    const auto segment = data.subspan(done, std::min(kSegmentBytes, data.size() - done));
    BAGUA_CO_RETURN_IF_ERROR(co_await Send(to, tag, segment));
  }
  co_return Status();
}

// Two segments in turn: while one is reduced the other is on its way.
Task<Status> MeshBackend::ReceiveAndReduce(int from, Tag tag, std::span<std::byte> data,
                                           Reduction how) {
  const size_t segments = BlockCount(data.size(), kSegmentBytes);
  if (segments == 0) co_return Status();
  Bytes memory(2 * std::min(kSegmentBytes, data.size()));
  const auto room = [&](size_t segment) {
    const Chunk block = BlockOf({0, data.size()}, kSegmentBytes, segment);
    return std::span(memory).subspan(segment % 2 * (memory.size() / 2), block.count);
  };
  Task<Status> receiving[2];
  receiving[0] = Recv(from, tag, room(0));
  for (size_t segment = 0; segment < segments; ++segment) {
    if (segment + 1 < segments) receiving[(segment + 1) % 2] = Recv(from, tag, room(segment + 1));
    BAGUA_CO_RETURN_IF_ERROR(co_await receiving[segment % 2]);
    const Chunk block = BlockOf({0, data.size()}, kSegmentBytes, segment);
    const void* const inputs[] = {room(segment).data(), data.data() + block.begin};
    void* const outputs[] = {data.data() + block.begin};
    Reduce(how.dtype, how.op, inputs, outputs, block.count / SizeOf(how.dtype));
  }
  co_return Status();
}

// After it rank r holds the reduced chunk r + 1, unscaled.
Task<Status> MeshBackend::RingReduceScatter(Tag tag, std::span<std::byte> data, Reduction how) {
  const size_t each = SizeOf(how.dtype);
  const size_t count = data.size() / each;
  const auto part = [&](int index) {
    const Chunk chunk = ChunkOf(count, size(), Mod(index, size()));
    return data.subspan(chunk.begin * each, chunk.count * each);
  };
  for (int step = 0; step < size() - 1; ++step) {
    Task<Status> send = SendSegments(Mod(rank() + 1, size()), tag, part(rank() - step));
    BAGUA_CO_RETURN_IF_ERROR(
        co_await ReceiveAndReduce(Mod(rank() - 1, size()), tag, part(rank() - step - 1), how));
    BAGUA_CO_RETURN_IF_ERROR(co_await send);
  }
  co_return Status();
}

// chunks[r] stands complete on rank r; passes all of them around.
Task<Status> MeshBackend::RingAllgather(Tag tag, std::span<std::byte> data,
                                        std::span<const Chunk> chunks) {
  const auto part = [&](int index) {
    const Chunk& chunk = chunks[Mod(index, size())];
    return data.subspan(chunk.begin, chunk.count);
  };
  for (int step = 0; step < size() - 1; ++step) {
    Task<Status> receive = Recv(Mod(rank() - 1, size()), tag, part(rank() - step - 1));
    Task<Status> send = Send(Mod(rank() + 1, size()), tag, part(rank() - step));
    BAGUA_CO_RETURN_IF_ERROR(co_await receive);
    BAGUA_CO_RETURN_IF_ERROR(co_await send);
  }
  co_return Status();
}

// Of a group of one rank.
void MeshBackend::AllreduceAlone(const Pieces& data, const Reduction& how) const {
  data.ForEach(0, data.count(), [&](const std::byte* in, std::byte* out, size_t, size_t count) {
    if (in == out && how.scaling.identity()) return;
    const void* const inputs[] = {in};
    void* const outputs[] = {out};
    Reduce(how.dtype, how.op, inputs, outputs, count, how.scaling);
    if (in != out) copies_->Add(count * data.element_bytes());
  });
}

Task<Status> MeshBackend::Allreduce(Tag tag, const Pieces& data, Reduction how) {
  if (size() == 1) {
    AllreduceAlone(data, how);
    co_return Status();
  }
  const size_t each = SizeOf(how.dtype);
  std::span<std::byte> flat = data.InPlace();
  Bytes packed;
  if (flat.empty()) {
    packed.resize(data.bytes());
    data.Pack(0, data.count(), packed.data());
    copies_->Add(data.bytes());
    flat = packed;
  }
  const bool rounds_partial_sums = each == 2 && IsFloating(how.dtype);
  const bool prescaled = how.scaling.pre != 1.0;
  if (prescaled && !rounds_partial_sums)
    Scale(how.dtype, flat.data(), data.count(), Scaling{how.scaling.pre, 1.0, 1});
  Scaling after{1.0, how.scaling.post, how.scaling.divisor};
  if (rounds_partial_sums) {
    std::vector<Chunk> chunks;
    for (int r = 0; r < size(); ++r) chunks.push_back(ChunkOf(data.count(), size(), r));
    BAGUA_CO_RETURN_IF_ERROR(co_await ReduceChunksDirect(tag, flat, chunks, how));
    for (Chunk& chunk : chunks) chunk = {chunk.begin * each, chunk.count * each};
    BAGUA_CO_RETURN_IF_ERROR(co_await RingAllgather(tag, flat, chunks));
  } else if (flat.size() <= kSmallBytes) {
    BAGUA_CO_RETURN_IF_ERROR(co_await ReduceAtRoot(tag, flat, data.count(), how));
    if (rank() == 0) Scale(how.dtype, flat.data(), data.count(), after);
    BAGUA_CO_RETURN_IF_ERROR(co_await Broadcast(tag, flat, 0));
  } else {
    BAGUA_CO_RETURN_IF_ERROR(co_await RingReduceScatter(tag, flat, how));
    std::vector<Chunk> chunks;
    for (int r = 0; r < size(); ++r) {
      const Chunk held = ChunkOf(data.count(), size(), Mod(r + 1, size()));
      chunks.push_back({held.begin * each, held.count * each});
    }
    const Chunk mine = chunks[rank()];
    Scale(how.dtype, flat.data() + mine.begin, mine.count / each, after);
    BAGUA_CO_RETURN_IF_ERROR(co_await RingAllgather(tag, flat, chunks));
  }
  if (!packed.empty()) {
    data.Unpack(0, data.count(), packed.data());
    copies_->Add(data.bytes());
  }
  co_return Status();
}

Task<Status> MeshBackend::Allgather(Tag tag, std::span<const std::byte> in,
                                    std::span<std::byte> out, const std::vector<size_t>& bytes) {
  std::vector<Chunk> chunks;
  size_t begin = 0;
  for (const size_t count : bytes) {
    chunks.push_back({begin, count});
    begin += count;
  }
  BAGUA_CHECK(begin == out.size()) << begin << " vs " << out.size();
  if (!in.empty()) std::memcpy(out.data() + chunks[rank()].begin, in.data(), in.size());
  copies_->Add(in.size());
  co_return co_await RingAllgather(tag, out, chunks);
}

// Binomial tree from the root; large messages go down it in segments, one level forwarding while
// the next segment arrives.
Task<Status> MeshBackend::Broadcast(Tag tag, std::span<std::byte> data, int root) {
  const int place = Mod(rank() - root, size());
  const int span =
      place == 0 ? static_cast<int>(std::bit_ceil(static_cast<unsigned>(size()))) : place & -place;
  const int parent = Mod(place - (place & -place) + root, size());
  const size_t segments = std::max<size_t>(1, BlockCount(data.size(), kSegmentBytes));
  for (size_t index = 0; index < segments; ++index) {
    const Chunk block = BlockOf({0, data.size()}, kSegmentBytes, index);
    const auto segment = data.subspan(block.begin, block.count);
    if (place != 0) BAGUA_CO_RETURN_IF_ERROR(co_await Recv(parent, tag, segment));
    std::vector<Task<Status>> sends;
    for (int distance = span / 2; distance >= 1; distance /= 2)
      if (place + distance < size())
        sends.push_back(Send(Mod(place + distance + root, size()), tag, segment));
    for (Task<Status>& send : sends) BAGUA_CO_RETURN_IF_ERROR(co_await send);
  }
  co_return Status();
}

Task<Status> MeshBackend::ReduceScatter(Tag tag, const std::byte* in, std::byte* out,
                                        const std::vector<size_t>& counts, Reduction how) {
  std::vector<Chunk> chunks;
  size_t total = 0;
  for (const size_t count : counts) {
    chunks.push_back({total, count});
    total += count;
  }
  const size_t each = SizeOf(how.dtype);
  Bytes flat(total * each);
  if (total > 0) std::memcpy(flat.data(), in, flat.size());
  copies_->Add(flat.size());
  BAGUA_CO_RETURN_IF_ERROR(co_await ReduceChunksDirect(tag, flat, chunks, how));
  const Chunk mine = chunks[rank()];
  if (mine.count > 0) std::memcpy(out, flat.data() + mine.begin * each, mine.count * each);
  co_return Status();
}

Task<Status> MeshBackend::Alltoall(Tag tag, std::span<const std::byte> in,
                                   const std::vector<size_t>& send_bytes, std::span<std::byte> out,
                                   const std::vector<size_t>& recv_bytes, size_t /*largest*/) {
  std::vector<size_t> send_begin(size()), recv_begin(size());
  for (int r = 1; r < size(); ++r) {
    send_begin[r] = send_begin[r - 1] + send_bytes[r - 1];
    recv_begin[r] = recv_begin[r - 1] + recv_bytes[r - 1];
  }
  if (send_bytes[rank()] > 0)
    std::memcpy(out.data() + recv_begin[rank()], in.data() + send_begin[rank()],
                send_bytes[rank()]);
  for (int step = 1; step < size(); ++step) {
    const int to = Mod(rank() + step, size());
    const int from = Mod(rank() - step, size());
    Task<Status> receive = Recv(from, tag, out.subspan(recv_begin[from], recv_bytes[from]));
    Task<Status> send = Send(to, tag, in.subspan(send_begin[to], send_bytes[to]));
    BAGUA_CO_RETURN_IF_ERROR(co_await receive);
    BAGUA_CO_RETURN_IF_ERROR(co_await send);
  }
  co_return Status();
}

// Dissemination: after round k every rank has heard from the 2^k ranks before it.
Task<Status> MeshBackend::Barrier(Tag tag) {
  for (int distance = 1; distance < size(); distance *= 2) {
    Task<Status> receive = Recv(Mod(rank() - distance, size()), tag, {});
    Task<Status> send = Send(Mod(rank() + distance, size()), tag, {});
    BAGUA_CO_RETURN_IF_ERROR(co_await receive);
    BAGUA_CO_RETURN_IF_ERROR(co_await send);
  }
  co_return Status();
}

}  // namespace

std::unique_ptr<CollectiveBackend> MakeMeshBackend(Mesh* mesh, GroupRanks group,
                                                   CopyCounter* copies) {
  return std::make_unique<MeshBackend>(mesh, std::move(group), copies);
}

}  // namespace bagua
