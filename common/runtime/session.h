// An engine with the tickets that its users hold: handles of operations and numbers of plans.
#ifndef BAGUA_COMMON_RUNTIME_SESSION_H_
#define BAGUA_COMMON_RUNTIME_SESSION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/runtime/engine.h"

namespace bagua {

// Things by number. Numbers are never used again. Thread-safety: any thread.
template <class T>
class TicketTable {
 public:
  explicit TicketTable(uint64_t first) : next_(first) {}

  uint64_t Add(T value) {
    std::lock_guard lock(mutex_);
    entries_.emplace(next_, std::move(value));
    return next_++;
  }
  // An empty T if there is none.
  T Find(uint64_t ticket) const {
    std::lock_guard lock(mutex_);
    const auto found = entries_.find(ticket);
    return found == entries_.end() ? T{} : found->second;
  }
  bool Remove(uint64_t ticket) {
    T removed;  // destroyed after the lock
    std::lock_guard lock(mutex_);
    const auto found = entries_.find(ticket);
    if (found == entries_.end()) return false;
    removed = std::move(found->second);
    entries_.erase(found);
    return true;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, T> entries_;  // guarded by mutex_
  uint64_t next_;                            // guarded by mutex_
};

// Thread-safety: any thread. Failures carry kInvalidArgument for a ticket that nobody holds.
class Session {
 public:
  // Tickets count from `first_ticket`.
  Session(std::unique_ptr<Engine> engine, uint64_t first_ticket);

  Engine& engine() { return *engine_; }

  Result<uint64_t> Enqueue(OperationPtr operation);
  // kInProgress at the deadline, else the operation's own status.
  Status Wait(uint64_t handle, Deadline deadline);
  Status Poll(uint64_t handle);
  // Enqueues and waits. A handle is given, else 0, if the operation goes on, or if it ended well
  // and the session keeps its results.
  Status Run(OperationPtr operation, Deadline deadline, uint64_t* handle);
  // The operation, ended well; kInvalidArgument if it is not.
  Result<OperationPtr> Ended(uint64_t handle);
  Status Release(uint64_t handle);

  // One change of groups at a time. kInProgress at the deadline: the same call goes on with it.
  Status AddGroup(std::vector<int> ranks, Deadline deadline, uint32_t* group);
  Status RemoveGroup(uint32_t group, Deadline deadline);

  // The first call, with `*ticket` 0, registers; all wait. kInProgress at the deadline: call again.
  // On failure `*ticket` is 0 again.
  Status CreatePlan(PlanOptions options, Deadline deadline, uint64_t* ticket);
  Result<std::shared_ptr<Plan>> FindPlan(uint64_t ticket);
  Status DropPlan(uint64_t ticket);

 private:
  struct PlanEntry {
    std::shared_ptr<Plan> plan;
    OperationPtr registration;
  };
  Status StartPlan(PlanOptions options, uint64_t* ticket);
  // The change that `key` tells from others: the one under way, or what `make` gives.
  Result<OperationPtr> FindChange(const std::string& key,
                                  const std::function<Result<OperationPtr>()>& make);
  Status AwaitChange(const OperationPtr& change, Deadline deadline);

  const std::unique_ptr<Engine> engine_;
  TicketTable<OperationPtr> operations_;
  TicketTable<PlanEntry> plans_;
  std::mutex change_mutex_;
  OperationPtr change_;     // guarded by change_mutex_: nobody has seen its end
  std::string change_key_;  // guarded by change_mutex_
};

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_SESSION_H_
