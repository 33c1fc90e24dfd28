// Tagged messages between this rank and every other, over one control and one data Pipe per peer.
//
// Messages of one channel between two ranks arrive in the order in which they were sent; a receive
// takes the next one and fails if it is not the one expected. Channels do not block each other:
// what arrives before its receive is kept.
//
// Thread-safety: one thread at a time (the one that drives the engine's loop).
// After Progress returned a failure, or the scheduler failed, this Mesh only fails: build a new
// one.
#ifndef BAGUA_COMMON_TRANSPORT_MESH_H_
#define BAGUA_COMMON_TRANSPORT_MESH_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/scheduler.h"
#include "common/base/wire.h"
#include "common/transport/pipe.h"

namespace bagua {

// What a message belongs to. For a plan: its number, the step and the bucket; for negotiated
// operations of a group: the group and the number of the operation.
struct Tag {
  uint32_t channel = 0;
  uint32_t bucket = 0;
  uint64_t step = 0;
  bool operator==(const Tag&) const = default;
};

// Channels below hold groups' negotiated operations, from here on plans.
inline constexpr uint32_t kFirstPlanChannel = 1u << 16;

// "step 5 of bucket 2 of plan 1 (4096 bytes)".
std::string DescribeMessage(const Tag& tag, uint64_t bytes);

// Numbers since the start; written by the driving thread, read by any.
struct MeshCounters {
  std::atomic<int64_t> messages_sent{0};
  std::atomic<int64_t> bytes_sent_tcp{0};
  std::atomic<int64_t> bytes_sent_ring{0};
};

class Mesh {
 public:
  struct PeerPipes {
    std::unique_ptr<Pipe> control;
    std::unique_ptr<Pipe> data;
  };
  struct Control {
    int peer;
    Bytes message;
  };

  // `peers` by rank; this rank's own entry is empty.
  Mesh(int rank, std::vector<PeerPipes> peers, Scheduler* scheduler);
  ~Mesh();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  Scheduler& scheduler() { return *scheduler_; }

  // Both copy nothing: the memory must stay valid until the Task is done or destroyed. Send is done
  // when the pipe took every byte.
  Task<Status> Send(int peer, Tag tag, std::span<const std::byte> src);
  Task<Status> Recv(int peer, Tag tag, std::span<std::byte> dst);

  // Queues a control message; never waits.
  void PostControl(int peer, Bytes message);
  // The next control message that arrived, from any peer.
  std::optional<Control> TakeControl();

  // Moves what the pipes give and take now; sets `*moved` if anything did. kPeerLost names the rank
  // whose connection broke; kMismatch names both messages; kInternal a checksum that does not hold.
  Status Progress(bool* moved);
  // Nothing waits to be written.
  bool Flushed() const;
  // The peer ended its connection and everything before was taken in.
  bool Ended(int peer) const;
  // Ends this side's directions.
  void CloseWrite();
  // Descriptors to wait on, per peer; empty when its pipes are rings.
  std::vector<int> Descriptors(int peer) const;

  const MeshCounters& counters() const { return counters_; }

 private:
  struct SendOperation;
  struct RecvOperation;
  struct Stream;
  struct PeerState;

  Status ProgressStream(int peer, Stream* stream, bool* moved);
  Status Flush(Stream* stream, bool* moved);
  Status ReadAvailable(int peer, Stream* stream, bool* moved);
  Status BeginMessage(int peer, Stream* stream);
  Status EndMessage(int peer, Stream* stream);
  Status Deliver(int peer, RecvOperation* receive, const Tag& tag, std::span<const std::byte> kept);
  void Count(const Stream& stream, size_t bytes);

  const int rank_;
  Scheduler* const scheduler_;
  std::vector<std::unique_ptr<PeerState>> peers_;
  std::deque<Control> control_;
  MeshCounters counters_;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_MESH_H_
