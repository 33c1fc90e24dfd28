// One rank of a job. An object without global state: tests run several in one process.
//
// Failure: a peer that is lost, a transport that breaks or a peer's abort ends the job's
// communication; that is sticky, reaches every operation and plan at once, and a new engine has to
// be made.
#ifndef BAGUA_COMMON_RUNTIME_ENGINE_H_
#define BAGUA_COMMON_RUNTIME_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/base/config.h"
#include "common/base/logging.h"
#include "common/base/scheduler.h"
#include "common/base/status.h"
#include "common/runtime/counters.h"
#include "common/runtime/event_loop.h"
#include "common/runtime/group.h"
#include "common/runtime/operation.h"
#include "common/runtime/plan.h"
#include "common/runtime/plan_table.h"
#include "common/runtime/topology.h"
#include "common/transport/wiring.h"

namespace bagua {

// Thread-safety: any thread.
class Engine final : private Work, private OperationObserver {
 public:
  // Meets the other ranks in the group of all, number 0. Blocks until the deadline at most.
  static Result<std::unique_ptr<Engine>> Start(Wiring wiring, Config config, Deadline deadline,
                                               Logger::Sink log_sink = {});
  ~Engine() override;  // Shutdown
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return wiring_.rank; }
  int size() const { return wiring_.size(); }
  const Topology& topology() const { return topology_; }
  const Config& config() const { return config_; }

  // Operations, to be enqueued, that end when all ranks of the job, members or not, have asked for
  // the same: kMismatch on all if they differ. `added` is then the new group's number, the same on
  // every rank and never used again. Removal is a kMismatch, too, if a rank has operations of the
  // group in flight; plans of the group fail with it. kInvalidArgument for ranks that make no group
  // and for groups that cannot be removed, on this rank alone.
  Result<OperationPtr> AddGroup(std::vector<int> ranks);
  Result<OperationPtr> RemoveGroup(uint32_t group);
  // Ranks of a group; 0 if there is no such group.
  int GroupSize(uint32_t group);
  // This rank's place in a group; -1 if it is no member.
  int GroupRank(uint32_t group);

  // Checks and queues an operation; it then ends by itself, also if the job fails.
  // kInvalidArgument, and nothing queued, for what this rank alone can see to be wrong, a name in
  // flight included. `caller_drives`: the caller waits at once, so nobody else needs to be woken.
  Status Enqueue(const OperationPtr& operation, bool caller_drives = false);
  // Until the operation ended or the deadline. True if it ended.
  bool Wait(const Operation& operation, Deadline deadline);

  // An operation that ends when all ranks of the group have registered the plan.
  OperationPtr RegisterPlan(std::shared_ptr<Plan> plan, uint32_t group);
  Status MakeReady(Plan* plan, size_t tensor);
  // kInProgress at the deadline.
  Status FinishStep(Plan* plan, Deadline deadline);
  void DropPlan(Plan* plan);

  // Says goodbye and ends; what is in flight fails with kAborted. Idempotent, one thread at a time.
  void Shutdown();
  // In a forked child: gives up the connections without a word, takes no lock. The engine must
  // neither be used nor destroyed afterwards.
  void CloseInChild();

  const Counters& counters() const { return counters_; }
  const MeshCounters& mesh_counters() const { return mesh_.counters(); }
  int64_t wakeups() const { return loop_.wakeups(); }

 private:
  Engine(Wiring wiring, Config config, Logger::Sink log_sink);

  bool Pass() override;
  bool outstanding() const override;
  Deadline NextDeadline() const override { return next_check_; }
  void OnEnd(const Operation& operation, const Status& status) override;

  // Makes the group of all ranks.
  Status MeetEveryone(Deadline deadline);
  Status Connect(Group* group, Deadline deadline);
  Status BeginGroup(uint32_t id);
  Task<Status> MakeGroup(OperationPtr operation);
  void EndGroup(const OperationPtr& operation);
  void TakeInbox(bool* moved);
  void MoveMessages(bool* moved);
  Status OnControl(const Mesh::Control& control);
  void RunGroups(bool* moved);
  void TakePeerEvents();
  // True if one is gone since the last look.
  bool CheckLeavers();
  void CheckRenewals();
  Status LeftReason(int peer) const;
  // Once.
  void LogEnd(const Status& reason);
  // True if it was time to look.
  bool CheckStalls();
  Status CheckStalledWork(Deadline now);
  void Abort(const Status& reason);
  void FailEverything(const Status& reason);
  Status Admit(Operation* operation);
  Status AdmitRemoval(Operation* operation);
  // Refuses to join in the midst of a step, and to make steps while joined.
  Status CheckNoStepBegun(uint32_t group);
  Status CheckNotJoined(const Plan& plan);

  const Config config_;
  Wiring wiring_;
  const Topology topology_;
  Logger logger_;
  Counters counters_;
  Scheduler scheduler_;
  Mesh mesh_;
  PlanTable plans_;  // of the driving thread
  GroupContext context_;
  EventLoop loop_;

  // Of the driving thread.
  struct LiveGroup {
    std::unique_ptr<Group> group;
    Task<Status> run;
    bool connected = false;
  };
  // A group that is being made.
  struct Connecting {
    Task<Status>* task = nullptr;
    std::atomic<bool>* done = nullptr;
  };
  std::map<uint32_t, LiveGroup> groups_;
  Connecting connecting_;
  uint32_t last_group_ = 0;                               // the number given last
  std::vector<uint32_t> ended_groups_;                    // to be forgotten after this pass
  std::map<uint32_t, std::vector<Mesh::Control>> early_;  // for groups that are not made yet
  std::set<int> leavers_;  // said goodbye, their last messages not seen
  std::set<int> left_;     // are gone for good
  Status failure_;
  bool end_logged_ = false;
  bool closing_ = false;
  bool wake_ = false;  // somebody may wait for what happened in this pass
  Deadline next_check_ = kForever;
  int64_t seen_work_ = 0;                  // units and buckets, when it was last checked
  Deadline progressed_ = Deadline::min();  // when there was more than before
  std::set<std::string> warned_;

  // What enqueueing threads know of a group.
  struct GroupEntry {
    std::vector<int> ranks;
    // In flight; of the group of all ranks, which is never removed, the named ones alone.
    std::unordered_map<OperationKey, Kind, OperationKeyHash> in_flight;
    uint64_t unnamed = 0;   // the last sequence
    bool removing = false;  // asked for, not ended
    bool joining = false;   // this rank has joined
  };
  std::mutex mutex_;
  std::vector<OperationPtr> inbox_;               // guarded by mutex_
  std::map<uint32_t, GroupEntry> group_entries_;  // guarded by mutex_
  // By group and name: number of the plan that was dropped last, and the steps it made.
  std::map<std::pair<uint32_t, std::string>, std::vector<int64_t>> dropped_plans_;  // as above
  std::atomic<bool> inbox_filled_{false};
  std::atomic<int> joins_{0};  // of this rank, under way
  std::atomic<bool> flushed_{false};
  std::atomic<bool> shut_down_{false};
};

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_ENGINE_H_
