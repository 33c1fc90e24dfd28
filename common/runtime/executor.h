// Carries agreed units out: from operations to the calls of a backend and back.
#ifndef BAGUA_COMMON_RUNTIME_EXECUTOR_H_
#define BAGUA_COMMON_RUNTIME_EXECUTOR_H_

#include <cstdint>
#include <vector>

#include "common/base/task.h"
#include "common/collective/backend.h"
#include "common/runtime/counters.h"
#include "common/runtime/negotiator.h"

namespace bagua {

// Rows of a reducescatter's result on each rank: the first ranks get one more where `size` does not
// divide `rows`.
std::vector<size_t> ScatteredRows(size_t rows, int size);

// Thread-safety: the thread that drives the engine's loop; one unit at a time.
class Executor {
 public:
  // `channel` tags the messages. `backend` and `counters` must outlive it.
  Executor(GroupRanks group, uint32_t channel, CollectiveBackend* backend, Counters* counters);

  // Runs the unit, whose number is the same on every rank, and ends its operations. A failure is
  // the backend's; the operations that could not be carried out are left to the caller then. Plans,
  // joins and changes of groups are not for it.
  Task<Status> Run(const AgreedUnit& unit, uint64_t number);

 private:
  Task<Status> Allreduce(const AgreedUnit& unit, Tag tag);
  Task<Status> Allgather(const AgreedOperation& agreed, Tag tag);
  Task<Status> Broadcast(const AgreedOperation& agreed, Tag tag);
  Task<Status> ReduceScatter(const AgreedOperation& agreed, Tag tag);
  Task<Status> Alltoall(const AgreedOperation& agreed, Tag tag);
  int size() const { return group_.size(); }
  int rank() const { return group_.rank; }

  const GroupRanks group_;
  const uint32_t channel_;
  CollectiveBackend* const backend_;
  Counters* const counters_;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_EXECUTOR_H_
