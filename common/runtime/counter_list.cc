#include "common/runtime/counter_list.h"

namespace bagua {

std::vector<NamedCounter> ReadCounters(const Engine& engine) {
  const Counters& own = engine.counters();
  const MeshCounters& mesh = engine.mesh_counters();
  return {{"operations", own.operations},
          {"negotiated_full", own.negotiated_full},
          {"negotiated_cached", own.negotiated_cached},
          {"units", own.units},
          {"fused_tensors", own.fused_tensors},
          {"reduced_bytes", own.reduced_bytes},
          {"gathered_bytes", own.gathered_bytes},
          {"plan_buckets", own.plan_buckets},
          {"plan_bytes", own.plan_bytes},
          {"copied_bytes", own.copies.bytes},
          {"messages_sent", mesh.messages_sent},
          {"bytes_sent_tcp", mesh.bytes_sent_tcp},
          {"bytes_sent_shm", mesh.bytes_sent_ring},
          {"thread_wakeups", engine.wakeups()}};
}

}  // namespace bagua
