// One rank's ready-made connections to all others: pipes for messages, bells to wake local peers,
// lifelines that tell when a peer is gone.
#ifndef BAGUA_COMMON_TRANSPORT_WIRING_H_
#define BAGUA_COMMON_TRANSPORT_WIRING_H_

#include <memory>
#include <string>
#include <vector>

#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/transport/bootstrap.h"
#include "common/transport/doorbell.h"
#include "common/transport/lifeline.h"
#include "common/transport/mesh.h"

namespace bagua {

// Ids by which segments travel over lifelines: a kind and a number.
enum SegmentKind : uint32_t {
  kWiringSegment = 1,
  kBellEvent = 2,
  kGroupSegment = 3,
  kPlanSegment = 4
};
constexpr uint64_t SegmentId(SegmentKind kind, uint32_t number) {
  return (uint64_t{kind} << 32) | number;
}

// Handed over whole to the engine, which drives it.
struct Wiring {
  struct Peer {
    std::string name;     // "rank 3 on host b (pid 17, torch)"
    int host = 0;         // numbered by first appearance
    bool shares = false;  // memory can be shared with it; true for this rank itself
    Mesh::PeerPipes pipes;
    std::unique_ptr<Doorbell> bell;  // of a peer whose pipes are rings
  };
  int rank = 0;
  std::vector<Peer> peers;         // by rank
  std::shared_ptr<void> memory;    // what own bell and rings live in
  std::unique_ptr<Doorbell> bell;  // this rank's own
  std::unique_ptr<Lifelines> lifelines;

  int size() const { return static_cast<int>(peers.size()); }
};

// Rings in shared memory with peers of this host, TCP with others. Waits for the local peers'
// segments: kTimeout past the deadline, kPeerLost naming a rank that is gone.
Result<Wiring> ConnectWiring(int rank, Membership membership, Deadline deadline);

// Ranks that are threads of this process, joined by rings in its memory.
std::vector<Wiring> MakeLoopbackWiring(int size);

// Ranks that are threads of this process, to be joined by shared segments as processes of one host
// are.
std::vector<Membership> MakeLocalMemberships(int size);

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_WIRING_H_
