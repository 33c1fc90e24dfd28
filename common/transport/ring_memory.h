// What a rank lays out in memory that its local peers write to.
#ifndef BAGUA_COMMON_TRANSPORT_RING_MEMORY_H_
#define BAGUA_COMMON_TRANSPORT_RING_MEMORY_H_

#include <memory>

#include "common/transport/byte_ring.h"
#include "common/transport/doorbell.h"
#include "common/transport/mesh.h"
#include "common/transport/ring_pipe.h"

namespace bagua {

struct RingPair {
  ByteRing control;
  ByteRing data;
};

// The rank's bell, then a pair of incoming rings from each rank of the host, in their order; its
// own pair is not used. Zeroed memory is a valid one.
struct RingMemory {
  DoorbellWord bell;

  RingPair* incoming(int place) { return reinterpret_cast<RingPair*>(this + 1) + place; }
  static size_t Bytes(int ranks) {
    return sizeof(RingMemory) + sizeof(RingPair) * static_cast<size_t>(ranks);
  }
};
static_assert(sizeof(RingMemory) % alignof(RingPair) == 0);

// The pipes from the rank at `own_place` to the one at `their_place`. `bell` is the peer's and
// outlives them; `owner` keeps both memories.
inline Mesh::PeerPipes JoinRings(RingMemory* own, int own_place, RingMemory* theirs,
                                 int their_place, const std::shared_ptr<void>& owner,
                                 Doorbell* bell) {
  RingPair* const out = theirs->incoming(own_place);
  RingPair* const in = own->incoming(their_place);
  const auto ring = [bell] { bell->Ring(); };
  return {MakeRingPipe(&out->control, &in->control, owner, ring),
          MakeRingPipe(&out->data, &in->data, owner, ring)};
}

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_RING_MEMORY_H_
