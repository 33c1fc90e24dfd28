// A process group: some of the job's ranks, which agree on operations among themselves and carry
// them out one after the other. Several groups run side by side.
#ifndef BAGUA_COMMON_RUNTIME_GROUP_H_
#define BAGUA_COMMON_RUNTIME_GROUP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/base/config.h"
#include "common/base/scheduler.h"
#include "common/collective/backend.h"
#include "common/runtime/counters.h"
#include "common/runtime/executor.h"
#include "common/runtime/negotiator.h"
#include "common/runtime/plan.h"
#include "common/runtime/plan_table.h"
#include "common/transport/mesh.h"
#include "common/transport/wiring.h"

namespace bagua {

// What a group needs of its engine; outlives it.
struct GroupContext {
  const Config* config;
  Wiring* wiring;
  Mesh* mesh;
  Scheduler* scheduler;
  Counters* counters;
  PlanTable* plans;
  // All ranks of the job agreed on a change of groups; ends the operation.
  std::function<Task<Status>(OperationPtr)> add_group;
  std::function<void(const OperationPtr&)> remove_group;
};

// Thread-safety: the thread that drives the engine's loop.
class Group {
 public:
  Group(uint32_t id, GroupRanks ranks, GroupContext* context);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Chooses the backend and, where memory is shared, meets the other members.
  Task<Status> Connect();
  // Carries agreed units out for ever; ends with the failure that ends the job. Operations of the
  // unit that failed are ended with it.
  Task<Status> Run();

  uint32_t id() const { return id_; }
  const GroupRanks& ranks() const { return ranks_; }
  const CollectiveBackend& backend() const { return *backend_; }
  Negotiator& negotiator() { return negotiator_; }
  bool executing() const { return executing_ != nullptr; }
  // Since when the unit under way runs; kForever if there is none.
  Deadline executing_since() const { return executing() ? since_ : kForever; }
  std::string DescribeExecuting() const;

 private:
  bool shares_memory() const;
  // Gives `own` to the other members and takes theirs, of `least` octets; `all` by rank of the
  // group.
  Task<Status> ShareSegment(uint64_t id, std::shared_ptr<Segment> own, size_t least,
                            std::vector<std::shared_ptr<Segment>>* all);
  std::vector<Doorbell*> Bells() const;
  Task<Status> MakeBackend(uint64_t segment_id, std::unique_ptr<CollectiveBackend>* backend);
  Task<Status> StartPlan(OperationPtr operation);
  Task<Status> EndJoin(AgreedOperation agreed);
  Task<Status> RunUnit(const AgreedUnit& unit);

  const uint32_t id_;
  const GroupRanks ranks_;
  GroupContext* const context_;
  Negotiator negotiator_;
  std::unique_ptr<CollectiveBackend> backend_;
  std::unique_ptr<Executor> executor_;
  const AgreedUnit* executing_ = nullptr;
  Deadline since_ = kForever;
  uint64_t next_unit_ = 1;
  uint32_t next_plan_ = 0;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_GROUP_H_
