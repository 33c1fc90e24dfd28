// Numbers since the engine's start, for counters(). Written by the driving thread, read by any.
#ifndef BAGUA_COMMON_RUNTIME_COUNTERS_H_
#define BAGUA_COMMON_RUNTIME_COUNTERS_H_

#include <atomic>
#include <cstdint>

#include "common/collective/backend.h"

namespace bagua {

struct Counters {
  std::atomic<int64_t> operations{0};         // that ended well
  std::atomic<int64_t> negotiated_full{0};    // submissions that carried name and description
  std::atomic<int64_t> negotiated_cached{0};  // submissions that carried an id
  std::atomic<int64_t> units{0};              // collectives of negotiated operations
  std::atomic<int64_t> fused_tensors{0};      // tensors that shared a collective with others
  std::atomic<int64_t> reduced_bytes{0};      // given to allreduce and reducescatter
  std::atomic<int64_t> gathered_bytes{0};     // received by allgather, broadcast and alltoall
  std::atomic<int64_t> plan_buckets{0};       // buckets of plans that were exchanged
  std::atomic<int64_t> plan_bytes{0};         // their octets
  std::atomic<int64_t> thread_wakeups{0};     // of the background thread
  CopyCounter copies;

  static void Add(std::atomic<int64_t>& counter, int64_t amount = 1) {
    counter.fetch_add(amount, std::memory_order_relaxed);
  }
};

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_COUNTERS_H_
