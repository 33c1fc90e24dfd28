// Pipes made of two ByteRings. In segments of shared memory they join processes of a host (shm); in
// plain memory they join ranks that are threads of one process (loopback).
#ifndef BAGUA_COMMON_TRANSPORT_RING_PIPE_H_
#define BAGUA_COMMON_TRANSPORT_RING_PIPE_H_

#include <functional>
#include <memory>

#include "common/transport/byte_ring.h"
#include "common/transport/pipe.h"

namespace bagua {

// `owner` keeps the rings' memory; `ring_peer` wakes the peer after bytes were written or room was
// made. The pipe never fails by itself: death of the peer is seen by its lifeline.
std::unique_ptr<Pipe> MakeRingPipe(ByteRing* outgoing, ByteRing* incoming,
                                   std::shared_ptr<void> owner, std::function<void()> ring_peer);

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_RING_PIPE_H_
